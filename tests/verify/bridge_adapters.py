"""Run by tests/verify/test_adapters_against_mcore_bridge.py: adapters that mcore_bridge builds, as JSON.

The real LoraParallelLinear on stand-ins for the layers of Transformer Engine, which has no CPU build. They hold the
weights that a rank has of theirs, and nothing else.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import peft.tuners.lora.te  # noqa: F401  (asks for Transformer Engine's specification, before there is a stand-in)
import torch
import transformers.utils  # noqa: F401
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extensions


class TELinear(torch.nn.Module):
    """`inputs` x `outputs` of the whole model; what its weight is on one of `tp` ranks."""

    tp = 1
    side = "duplicated"

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__()
        side = others.get("parallel_mode", self.side)
        self.config, self.parallel_mode = config, None if side == "duplicated" else side
        self.is_expert, self.tp_group = others.get("is_expert", False), None
        parts = 1 if self.is_expert else self.tp
        self.in_features = input_size // parts if side == "row" else input_size
        self.out_features = output_size // parts if side == "column" else output_size
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features))
        self.weight.tensor_model_parallel = side != "duplicated"  # type: ignore[attr-defined]


class TEColumnParallelLinear(TELinear):
    side = "column"


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    pass


class TERowParallelLinear(TELinear):
    side = "row"


class TEGroupedLinear(torch.nn.Module):
    """One weight each of `num_gemms` experts, which tensor parallel does not split."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__()
        self.config, self.num_gemms, self.is_expert, self.parallel_mode = config, num_gemms, True, None
        self.in_features, self.out_features = input_size, output_size
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(output_size, input_size)))


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    pass


class TERowParallelGroupedLinear(TEGroupedLinear):
    pass


STAND_INS = (TELinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)
STAND_INS_OF_EXPERTS = (TEGroupedLinear, TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)


def bridge_adapter() -> Any:
    """LoraParallelLinear, without the rest of its package, which asks for Transformer Engine."""
    for one in (*STAND_INS, *STAND_INS_OF_EXPERTS):
        setattr(extensions, one.__name__, one)
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    found = find_spec("mcore_bridge")
    assert found is not None
    (root,) = found.submodule_search_locations or ()
    for name, path in (("mcore_bridge", root), ("mcore_bridge.tuners", f"{root}/tuners")):
        package = ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    utils = ModuleType("mcore_bridge.utils")
    utils.get_current_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["mcore_bridge.utils"] = utils
    from mcore_bridge.tuners import lora

    parallel_state.get_expert_tensor_parallel_world_size = lambda: 1
    lora.get_expert_tensor_parallel_world_size = lambda: 1
    lora.get_tensor_model_parallel_world_size = lambda: TELinear.tp
    return lora.LoraParallelLinear


def adapter(build: Any, asked: dict[str, Any]) -> dict[str, int]:
    """Elements of A and of B on a rank, and of what is summed over its tensor-parallel group."""
    TELinear.tp = asked["tp"]
    config = SimpleNamespace(init_method=None, sequence_parallel=asked["tp"] > 1)
    classes = {one.__name__: one for one in (*STAND_INS, *STAND_INS_OF_EXPERTS)}
    base, sides = classes[asked["base"]], (asked["inputs"], asked["outputs"])
    layer = base(asked["experts"], *sides, config=config) if asked["experts"] else base(*sides, config=config)
    found = build(base_layer=layer, adapter_name="default", r=asked["rank"], lora_alpha=32)
    a, b = ([*factor["default"].parameters()] for factor in (found.lora_A, found.lora_B))
    return {
        "a": sum(weight.numel() for weight in a),
        "b": sum(weight.numel() for weight in b),
        "summed": sum(weight.numel() for weight in (*a, *b) if getattr(weight, "sequence_parallel", False)),
    }


if __name__ == "__main__":
    builder = bridge_adapter()
    print(json.dumps([adapter(builder, asked) for asked in json.loads(sys.stdin.read())]))
