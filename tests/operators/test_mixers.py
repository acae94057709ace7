"""A made-up architecture with its own kind of mixer, added by one function and one line of the registry."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import pytest

from tests.engines.samples import DENSE, spec_of
from tests.report.printed import printed
from topoplan.operators.activations import layer_activations
from topoplan.operators.builder import Builder
from topoplan.operators.finetuning import megatron_linears
from topoplan.operators.layers import Mixer, divided, layer_tensors, mixer_of, sizes_divided
from topoplan.operators.op import BF16, Weight
from topoplan.operators.params import parameter_count
from topoplan.operators.shard import Shard
from topoplan.planner.account import memory_account, time_account
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.report.explanation import explanation_to_dict, print_explanation
from topoplan.specs.model import AnyAttention, Model
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A state of a few numbers per channel that is carried along the sequence."""

    channels: int
    state: int
    kind: str = "recurrence"


def recurrence(build: Builder, mixer: Recurrence) -> None:
    """The mixer in both implementations: a projection in, a scan over the sequence, a projection out."""
    channels = mixer.channels / build.shard.tp
    build.norm("input_layernorm")
    build.linear("in_proj", build.hidden, 2 * mixer.channels, divides="scan width")
    moved = BF16 * build.tokens * channels
    build.moved(
        "scan",
        (2 + mixer.state) * moved,
        (4 + 2 * mixer.state) * moved,
        weights=(Weight("decay", mixer.channels * mixer.state, "tp"),),
        divided=(("heads", mixer.channels),),
    )
    build.keep("states", mixer.state * moved)
    build.linear("out_proj", mixer.channels, build.hidden, "row")


@pytest.fixture
def spec() -> Iterator[Spec]:
    mixer_of[Recurrence] = Mixer(recurrence, recurrence)
    mixed = spec_of(DENSE, nodes=1)
    plain = mixed.model.layers[0]
    own = replace(plain, attention=cast("AnyAttention", Recurrence(channels=8192, state=16)))
    yield replace(mixed, model=replace(mixed.model, name="made/up", layers=(own, own, own, plain) * 9))
    del mixer_of[Recurrence]


def test_its_weights_are_counted_and_split(spec: Spec) -> None:
    model: Model = spec.model
    own, plain = model.layers[0], model.layers[3]
    weights = {weight.name: weight.elements for weight in layer_tensors(model, own)}
    assert weights["in_proj"] == weights["out_proj"] * 2 == 4096 * 2 * 8192
    attention = sum(weight.elements for weight in layer_tensors(model, plain)) - sum(weights.values())
    assert parameter_count(model) == parameter_count(replace(model, layers=(plain,) * 36)) - 27 * attention
    assert [linear.name for linear in megatron_linears(model, own)][:2] == ["in_proj", "out_proj"]
    assert sizes_divided(model, "heads") == (32, 8192)
    assert ("scan width", 16384) in divided(model)


def test_what_it_saves_is_split_and_freed(spec: Spec) -> None:
    shard = Shard(tokens=1024, seq_len=1024, tp=2, cp=1, ep=1, etp=1, sequence_parallel=True, precision="bf16")
    saved = {tensor.name: tensor for tensor in layer_activations(spec.model, spec.model.layers[0], shard).saved}
    assert saved["states"].saved_bytes == 2 * 1024 * 16 * 4096
    assert saved["in_proj input"].saved_bytes == 2 * 512 * 4096


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp2"])
def test_it_is_ranked_and_explained(spec: Spec, backend: str) -> None:
    asked = replace(spec, backends=(backend,))
    ranking = rank(asked)
    assert ranking.plans
    plan = predict(asked, ranking.plans[0].layout)
    time, memory = time_account(asked, plan), memory_account(asked, plan)
    (own,) = (term for term in time.layers if "recurrence" in term.name)
    assert {"in_proj", "scan", "out_proj"} <= {term.name for term in own.children}
    text = " ".join(printed(print_explanation, asked, plan, time=time, memory=memory, width=120).split())
    assert "recurrence + mlp" in text
    assert "states" in text
    assert explanation_to_dict(asked, plan, time=time, memory=memory)
