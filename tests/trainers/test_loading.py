"""What quantizing a model in loading needs of each GPU."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, make_spec_and_layout
from topoplan.layout.layout import Layout
from topoplan.planner.predict import predict
from topoplan.specs import known
from topoplan.specs.spec import Spec
from topoplan.trainers.loading import loaded_bytes, loading_note, too_large_to_load
from topoplan.trainers.registry import caveats_of, choose_trainer, trainer_named
from topoplan.units import GIB

ZERO3, ZERO2, FSDP2 = ({"backend": "deepspeed"}, {"backend": "deepspeed", "zero_stage": 2}, {"backend": "fsdp2"})


def case(layout: dict[str, Any], *, model: str = "meta-llama/Llama-3.1-70B", **software: str) -> tuple[Spec, Layout]:
    cluster = replace(CLUSTER, gpu=known.gpu("rtx4090"), software=software)
    job = {"finetuning": "qlora", "packing": False}
    return make_spec_and_layout(cluster=cluster, model=known.model(model), job=job, **layout)


def test_every_gpu_loads_the_whole_model_where_it_is_sharded_afterwards() -> None:
    held = loaded_bytes(*case(FSDP2))
    # 68.5 billion weights in NF4, 2.1 billion in bf16, one of 8,192 x 28,672 on its way, and the context.
    assert 37.0 * GIB < held < 38.5 * GIB
    assert loaded_bytes(*case(ZERO3)) == loaded_bytes(*case(ZERO3, transformers="5.6.0")) == held
    assert loaded_bytes(*case(ZERO3, transformers="4.55.4")) == loaded_bytes(*case(ZERO2)) == 0.0
    spec, layout = case(FSDP2)
    assert loaded_bytes(replace(spec, job=replace(spec.job, finetuning="lora")), layout) == 0.0


@pytest.mark.parametrize(
    ("layout", "software", "is_refused", "has_caveat"),
    [
        (FSDP2, {}, True, False),
        (FSDP2, {"transformers": "4.55.4"}, True, False),
        (ZERO3, {}, False, True),
        (ZERO3, {"transformers": "5.6.0"}, True, False),
        (ZERO3, {"transformers": "4.55.4"}, False, False),
    ],
)
def test_a_model_that_no_card_holds_whole_is_refused_or_told(
    layout: dict[str, Any], software: dict[str, str], is_refused: bool, has_caveat: bool
) -> None:
    spec, whole = case(layout, **software)
    words = "loads the whole quantized model on every GPU: 37.7 of 24.0 GiB"
    assert [words in one.what for one in too_large_to_load(spec, whole)] == [True] * is_refused
    assert (choose_trainer(spec, whole, "swift").trainer is None) == is_refused
    assert any(words in one for one in caveats_of(spec, whole, trainer_named("swift"))) == has_caveat


def test_a_smaller_model_is_told_to_take_more_in_loading_than_in_training() -> None:
    spec, layout = case(FSDP2, model="Qwen/Qwen3-32B")
    held = loaded_bytes(spec, layout)
    assert loading_note(spec, layout, held - 1).startswith("loading takes 18.6 GiB of each GPU, more than training")
    assert loading_note(spec, layout, held + 1) == ""
    cluster = known.machines(spec.cluster.gpu, spec.cluster.nodes, spec.cluster.gpus_per_node, "here")
    plan = predict(replace(spec, cluster=cluster, job=replace(spec.job, seq_len=512), trainer="swift"), layout)
    assert plan.memory.device_bytes < held
    assert any("more than training" in warning for warning in plan.warnings)
    assert loading_note(*case(FSDP2), 0.0) == ""  # refused
    assert loading_note(*make_spec_and_layout(model=QWEN3_8B, **FSDP2), 0.0) == ""
