"""Compare the elements of LoRA on a rank, and what it saves for backward, with the modules that mcore_bridge builds."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from topoplan.operators.activations import layer_activations
from topoplan.operators.adapters import DROPOUT, LORA_RANK, Adapters
from topoplan.operators.finetuning import megatron_linears
from topoplan.operators.layers import mtp_layer
from topoplan.operators.op import Linear
from topoplan.operators.params import adapter_parameters, adapter_tensors, cut, replicated_elements
from topoplan.operators.shard import Shard
from topoplan.specs import known
from topoplan.specs.model import Layer, Model, Moe

pytestmark = pytest.mark.verify

MODELS = (
    *("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    *("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite"),
)
GRIDS = ((1, 1), (4, 1), (2, 8))
"""(tp, ep)"""
ADAPTERS = Adapters(16, ("all",))


NORMED = ("linear_qkv", "in_proj", "linear_fc1", "linear_q_up_proj", "linear_kv_up_proj")
"""Layers with a norm in them (megatron-core `core/models/gpt/gpt_layer_specs.py`)."""
SMALL = (("Qwen/Qwen3-0.6B", 1), ("deepseek-ai/DeepSeek-V2-Lite", 16))
"""(model, ep) for which saved tensors are measured in a real forward pass."""


def base_of(linear: Linear) -> str:
    """Return the class of which megatron-core builds the layer."""
    side = linear.side
    if linear.experts:
        return "TERowParallelGroupedLinear" if side == "row" else "TEColumnParallelGroupedLinear"
    column = "TELayerNormColumnParallelLinear" if linear.name in NORMED else "TEColumnParallelLinear"
    bases = {"row": "TERowParallelLinear", "replicated": "TELinear", "column": column}
    return bases[side]


def layers() -> Iterator[tuple[Model, Layer, int, int]]:
    for name in MODELS:
        model = known.model(name)
        for layer in (*{id(layer): layer for layer in model.layers}.values(), mtp_layer(model)):
            for tp, ep in GRIDS:
                yield model, layer, tp, ep


def asked(model: Model, layer: Layer, tp: int, ep: int, shard: Shard | None = None) -> list[dict[str, Any]]:
    routed = shard.routed_tokens(layer.ffn) if shard and isinstance(layer.ffn, Moe) else 0
    tokens = shard.tokens if shard else 0
    return [
        {
            **{"tp": tp, "rank": ADAPTERS.rank, "base": base_of(linear), "experts": linear.experts // ep},
            **{"inputs": linear.inputs, "outputs": linear.outputs, "rows": int(routed) if linear.experts else tokens},
        }
        for linear in megatron_linears(model, layer)
    ]


def built_of(wanted: list[list[dict[str, Any]]]) -> list[list[dict[str, int]]]:
    """Return the adapters that mcore_bridge builds for a list of requests."""
    for package in ("megatron.core", "mcore_bridge"):
        root, _, _ = package.partition(".")
        if importlib.util.find_spec(root) is None:
            pytest.skip(f"{package} is not installed (the verify-swift extra has it)")
    command = [sys.executable, "-W", "ignore", "-m", "tests.verify.bridge_adapters"]
    sent = json.dumps([one for some in wanted for one in some])
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=sent, capture_output=True, text=True, check=True, cwd=root)
    found = iter(json.loads(done.stdout.splitlines()[-1]))
    return [[next(found) for _ in some] for some in wanted]


@pytest.fixture(scope="module")
def built() -> list[list[dict[str, int]]]:
    """Return the adapters of the linear layers of each of `layers`."""
    return built_of([asked(*one) for one in layers()])


def test_what_an_adapter_saves_is_what_is_predicted_beside_a_frozen_layer() -> None:
    wanted, predicted = [], []
    for name, ep in SMALL:
        model = known.model(name)
        shard = Shard(
            **{"tokens": 16, "seq_len": 16, "tp": 1, "cp": 1, "ep": ep, "etp": 1},
            **{"sequence_parallel": False, "precision": "bf16", "adapters": ADAPTERS},
        )
        for layer in {id(layer): layer for layer in model.layers}.values():
            wanted.append(asked(model, layer, 1, ep, shard))
            tensors = layer_activations(model, layer, shard).saved
            for linear in megatron_linears(model, layer):
                own = [f"{linear.name} {words}" for words in ("norm output", "adapter input, mask")]
                own.append(f"{linear.name} adapter, between A and B")
                predicted.append((linear.name, sum(one.saved_bytes for one in tensors if one.name in own)))
    found = [one["saved"] for some in built_of(wanted) for one in some]
    assert found == [saved for _, saved in predicted]


def test_every_adapter_is_as_large_on_a_rank_as_the_trainer_builds_it(built: list[list[dict[str, int]]]) -> None:
    for (model, layer, tp, ep), found in zip(layers(), built, strict=True):
        tensors = iter(adapter_tensors(model, layer, ADAPTERS))
        for one in found:
            assert one["a"] == cut(next(tensors), tp, ep, 1)
            assert one["b"] == cut(next(tensors), tp, ep, 1)
        total = adapter_parameters(model, layer, ADAPTERS, tp, ep, 1)
        assert total.total == sum(one["a"] + one["b"] for one in found)


def test_what_is_summed_over_a_tensor_parallel_group_is_what_is_whole_on_its_ranks(
    built: list[list[dict[str, int]]],
) -> None:
    for (model, layer, tp, _), found in zip(layers(), built, strict=True):
        assert sum(one["summed"] for one in found) == (replicated_elements(model, layer, ADAPTERS) if tp > 1 else 0)


def source_of(package: str, *parts: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed (the verify-swift extra has it)")
    return Path(found.submodule_search_locations[0], *parts).read_text(encoding="utf-8")


def test_the_trainers_defaults_and_limits_are_those_that_are_predicted_with() -> None:
    arguments = source_of("swift", "megatron", "arguments", "megatron_args.py")
    assert f"lora_rank: int = {LORA_RANK}\n" in arguments
    assert f"lora_dropout: float = {DROPOUT}\n" in arguments
    assert "target_modules: List[str] = field(default_factory=lambda: ['all-linear'])" in arguments
    utils = source_of("swift", "megatron", "utils", "utils.py")
    assert "(TELinear, TELayerNormColumnParallelLinear, TEGroupedLinear, nn.Linear)" in utils
    assert "LoRA does not support ETP" in source_of("mcore_bridge", "tuners", "lora.py")
