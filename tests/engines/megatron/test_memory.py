"""Memory of the stages and of the card: measured runs, activations in flight, and what fits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import (
    CASES,
    DENSE,
    MIXED,
    VISION,
    full_recompute,
    layout_of,
    layout_of_run,
    measured_runs,
    memory_of,
    spec_of,
    spec_of_run,
    stage_of,
)
from topoplan import catalog
from topoplan.engines.megatron.memory import predict_memory
from topoplan.operators.activations import layer_activations
from topoplan.operators.shard import shard_of
from topoplan.planner.measured import MeasuredRun
from topoplan.specs.config_json import model_from_config
from topoplan.specs.gpu_profile import profile_of
from topoplan.trainers.case import case_of

GIB = 2**30
RUNS = [run for run in measured_runs("SimuMax B200") if run.measured.stage_allocated_gib]
STAGES = [(run, stage) for run in RUNS for stage in range(len(run.measured.stage_allocated_gib))]
ALLOWED_ERROR = 0.01


@pytest.mark.parametrize(("run", "stage"), STAGES, ids=[f"{run.id}-{stage}" for run, stage in STAGES])
def test_a_measured_stage_is_predicted_within_one_percent(run: MeasuredRun, stage: int) -> None:
    measured = run.measured.stage_allocated_gib[stage]
    predicted = stage_of(spec_of_run(run), layout_of_run(run), stage).allocated_bytes / GIB
    assert predicted == pytest.approx(measured, rel=ALLOWED_ERROR)


def test_every_measured_row_says_where_it_is_from() -> None:
    assert len(STAGES) == 8
    assert all(run.source and run.notes for run in RUNS)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_the_parts_of_a_stage_add_up_to_what_it_allocates(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    memory = memory_of(spec, layout_of(spec, **form))
    for stage in memory.by_stage:
        assert sum(stage.parts_bytes.values()) == pytest.approx(stage.allocated_bytes)
        assert all(size >= 0 for size in stage.parts_bytes.values())
    assert memory.allocated_bytes == max(stage.allocated_bytes for stage in memory.by_stage)


def test_the_search_does_without_the_moments() -> None:
    spec = spec_of(DENSE)
    case = case_of(spec, "megatron")
    memory = predict_memory(case, layout_of(spec))
    assert memory.by_stage[0].moments == ()
    assert stage_of(spec, layout_of(spec)).moments != ()


@pytest.mark.parametrize(("model", "form"), CASES)
def test_distinct_stages_hold_the_worst_one(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    layout = layout_of(spec, **form)
    case = case_of(spec, layout.backend)
    some = predict_memory(case, layout, all_stages=False)
    everything = memory_of(spec, layout)
    assert len(everything.by_stage) == layout.pp
    assert (some.device_bytes, some.host_bytes) == (everything.device_bytes, everything.host_bytes)


def test_a_trained_projector_alone_needs_no_activations_of_the_tower() -> None:
    spec = spec_of(VISION, freeze_multi_modal_projector=False)
    assert "vision activations" not in stage_of(spec, layout_of(spec, tp=2)).parts_bytes


def test_the_vision_tower_is_held_for_every_micro_batch_in_flight_of_the_first_chunk() -> None:
    spec = spec_of(VISION, freeze_vision_tower=False, global_batch_size=128)
    one = stage_of(spec, layout_of(spec)).parts_bytes["vision activations"]
    plain = stage_of(spec, layout_of(spec, pp=2)).parts_bytes["vision activations"]
    interleaved = stage_of(spec, layout_of(spec, pp=2, vpp=2)).parts_bytes["vision activations"]
    assert plain == 2 * one
    assert interleaved == 4 * one


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_stage_keeps_the_activations_of_pp_micro_batches_at_first_and_one_at_last(pp: int) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=pp)
    a_layer = layer_activations(
        spec.model, spec.model.layers[0], shard_of(case_of(spec, "megatron"), layout)
    ).saved_bytes
    for rank in range(pp):
        expected = (pp - rank) * 36 / pp * a_layer
        assert stage_of(spec, layout, rank).parts_bytes["activations"] == pytest.approx(expected)


def test_recomputation_saves_more_the_more_it_repeats() -> None:
    spec = spec_of(DENSE)
    modes: list[Any] = ["none", {"granularity": "selective", "modules": ["mlp"]}, full_recompute("block", 30), "full"]
    sizes = [stage_of(spec, layout_of(spec, recompute=mode)).allocated_bytes for mode in modes]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("model", [DENSE, MIXED])
def test_longer_sequences_and_larger_micro_batches_need_more(model: str) -> None:
    sizes = []
    for seq_len, micro_batch in ((2048, 1), (4096, 1), (4096, 2), (8192, 2)):
        spec = spec_of(model, seq_len=seq_len)
        sizes.append(memory_of(spec, layout_of(spec, tp=2, micro_batch_size=micro_batch)).device_bytes)
    assert sizes == sorted(sizes)


def test_reserved_is_above_allocated_and_device_above_reserved() -> None:
    spec = spec_of(DENSE)
    memory = memory_of(spec, layout_of(spec, tp=2, pp=2))
    assert memory.allocated_bytes < memory.reserved_bytes < memory.device_bytes
    assert memory.capacity_bytes == spec.cluster.gpu.memory_bytes


def test_gaps_of_the_allocator_are_a_share_of_what_comes_and_goes_and_need_not_fit() -> None:
    spec = spec_of(DENSE)
    memory, light = (memory_of(spec, layout_of(spec, tp=2, recompute=mode)) for mode in ("none", "full"))
    (stage,) = memory.by_stage
    states = sum(stage.parts_bytes[part] for part in ("weights", "gradients", "optimizer", "workspace"))
    share = profile_of(spec.cluster.gpu).transient_gaps
    assert memory.reserved_bytes + memory.gaps_bytes == pytest.approx(
        stage.allocated_bytes + share * (stage.allocated_bytes - states)
    )
    assert memory.shown_bytes == (memory.band_bytes[0], memory.device_bytes + memory.gaps_bytes)
    assert memory.reserved_band == pytest.approx(memory.gaps_bytes / memory.reserved_bytes)
    assert memory.excess_bytes == memory.device_bytes + memory.margin_bytes - memory.capacity_bytes
    assert (light.shown_bytes, light.reserved_band) == (light.band_bytes, light.band)


def test_a_plan_fits_up_to_the_margin_and_not_beyond() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    device = memory_of(spec, layout).device_bytes
    room = 1.0 - device / spec.cluster.gpu.memory_bytes
    for margin, fits in ((room - 0.001, True), (room + 0.001, False)):
        narrow = spec_of(DENSE, cluster={"margin": margin})
        assert memory_of(narrow, layout).fits is fits
        assert memory_of(narrow, layout).margin_bytes == pytest.approx(margin * spec.cluster.gpu.memory_bytes)


def test_the_margin_is_the_error_band_and_the_drivers_share_unless_the_spec_has_one() -> None:
    dense, mixed, adapted = spec_of(DENSE), spec_of(MIXED), spec_of(DENSE, finetuning="lora")
    profile = profile_of(dense.cluster.gpu)
    for spec, layout, band in (
        (dense, layout_of(dense, tp=2), profile.memory_band),
        (mixed, layout_of(mixed, ep=8), profile.moe_memory_band),
        (adapted, replace(layout_of(adapted, tp=2), backend="megatron"), profile.adapter_memory_band),
    ):
        memory = memory_of(spec, layout)
        assert memory.margin_bytes == pytest.approx(band * memory.device_bytes + profile.driver_bytes)
    assert profile.memory_band < profile.moe_memory_band < profile.adapter_memory_band


def test_dropout_keeps_a_byte_an_element_twice_a_layer() -> None:
    config = catalog.model_config(DENSE) | {"model_type": "gpt2"}
    with_masks, without = (
        replace(spec_of(DENSE), model=model_from_config(config | {"resid_pdrop": rate}, name="x", where="x"))
        for rate in (0.1, 0.0)
    )
    assert model_from_config(config, name="x", where="x").hidden_dropout == 0.1
    layout = layout_of(without)
    kept = [
        sum(stage.parts_bytes["activations"] for stage in memory_of(spec, layout).by_stage)
        for spec in (with_masks, without)
    ]
    model, tokens = without.model, layout.micro_batch_size * without.job.seq_len
    assert kept[0] - kept[1] == 2 * tokens * model.hidden_size * model.num_layers
