"""Time of a step: its parts, what scales it, what the overlap switches hide, and measured runs."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from tests.engines.samples import (
    CASES,
    DENSE,
    MIXED,
    TIED,
    layout_of,
    layout_of_run,
    measured_runs,
    pipeline_times_of,
    spec_of,
    spec_of_run,
    time_of,
)
from topoplan.engines.megatron.states import stage_parameters
from topoplan.engines.megatron.step import DataParallel, data_parallel, optimizer_time, pipeline_work, predict_time
from topoplan.layout.layout import Layout, changed
from topoplan.planner.measured import MeasuredRun
from topoplan.specs.case import case_with
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.traits import MEGATRON

RUNS = measured_runs("SimuMax B200")


def error_of(run: MeasuredRun) -> float:
    assert run.measured.step_s is not None
    return abs(time_of(spec_of_run(run), layout_of_run(run)).step_s / run.measured.step_s - 1)


def test_throughput_of_measured_runs_is_within_fifteen_percent_at_the_median() -> None:
    errors = [error_of(run) for run in RUNS]
    assert len(errors) == 19
    assert median(errors) < 0.15
    assert max(errors) < 0.30


def test_measured_layouts_of_one_model_are_put_in_the_measured_order() -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for run in RUNS:
        if run.id.endswith("preview"):
            continue
        layout, batch = layout_of_run(run), run.document["job"]["global_batch_size"]
        key = f"{run.document['model']} {layout.gradient_accumulation_steps}"
        assert run.measured.step_s is not None
        pair = (batch / time_of(spec_of_run(run), layout).step_s, batch / run.measured.step_s)
        groups.setdefault(key, []).append(pair)
    assert len(groups) == 6
    for members in groups.values():
        assert max(members)[1] == max(measured for _, measured in members)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_the_parts_add_up_to_the_step_exactly(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    time = time_of(spec, layout_of(spec, **form))
    assert sum(time.parts_s.values()) == time.step_s
    assert all(seconds > 0 for seconds in time.parts_s.values())


@pytest.mark.parametrize(("model", "form"), CASES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_band_is_even_and_at_least_as_wide_as_the_profile_says(
    model: str, form: dict[str, Any], precision: str
) -> None:
    spec = spec_of(model, precision=precision)
    time = time_of(spec, layout_of(spec, **form))
    low, high = (bound / time.step_s for bound in time.band_s)
    assert 0 < low < 1 < high
    assert high - 1 == pytest.approx(1 - low)
    assert high - 1 >= profile_of(spec.cluster.gpu).time_band - 1e-9


def test_experts_and_low_precision_are_no_surer_than_a_dense_bf16_model() -> None:
    def width(model: str, precision: str) -> float:
        spec = spec_of(model, precision=precision)
        time = time_of(spec, layout_of(spec, tp=2))
        return time.band_s[1] / time.step_s

    assert width(MIXED, "bf16") >= width(DENSE, "bf16") - 1e-9
    assert width(DENSE, "fp8") >= width(DENSE, "bf16") - 1e-9


@pytest.mark.parametrize(("model", "form"), CASES)
def test_every_further_micro_batch_takes_the_same_time(model: str, form: dict[str, Any]) -> None:
    steps = []
    for batch in (256, 512, 768):
        spec = spec_of(model, global_batch_size=batch)
        steps.append(time_of(spec, layout_of(spec, **form)).step_s)
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1], rel=1e-6)
    assert steps[1] < 2 * steps[0]  # gradients, optimizer and the bubble come once a step


def test_the_bubble_is_there_with_a_pipeline_alone_and_shrinks_with_interleaving() -> None:
    spec = spec_of(DENSE)
    assert "pp_bubble" not in time_of(spec, layout_of(spec, tp=2)).parts_s
    plain = time_of(spec, layout_of(spec, pp=4)).parts_s["pp_bubble"]
    assert time_of(spec, layout_of(spec, pp=4, vpp=3)).parts_s["pp_bubble"] < plain


def test_messages_cost_most_where_nothing_runs_beside_them() -> None:
    spec = spec_of(DENSE, global_batch_size=512)
    plain = time_of(spec, layout_of(spec, pp=4)).parts_s["pp_comm"]
    interleaved = time_of(spec, layout_of(spec, pp=4, vpp=3)).parts_s["pp_comm"]
    # The first layout waits for two messages per micro-batch; the other sends three times as many, but waits for few of
    # them.
    assert interleaved < plain / 2


def test_parts_appear_with_what_causes_them() -> None:
    spec, mixed = spec_of(DENSE), spec_of(MIXED)
    one = spec_of(DENSE, nodes=1, gpus_per_node=1)
    assert {"tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "recompute"}.isdisjoint(
        time_of(one, layout_of(one)).parts_s
    )
    assert "tp_comm" in time_of(spec, layout_of(spec, tp=2)).parts_s
    # Attention hides the ring inside a node, but not between nodes.
    assert "cp_comm" not in time_of(spec, layout_of(spec, cp=2)).parts_s
    assert "cp_comm" in time_of(spec, layout_of(spec, tp=8, cp=2)).parts_s
    assert "pp_comm" in time_of(spec, layout_of(spec, pp=2)).parts_s
    assert "ep_comm" in time_of(mixed, layout_of(mixed, ep=8)).parts_s
    assert "recompute" in time_of(spec, layout_of(spec, recompute="full")).parts_s


def test_overlap_hides_gradient_reduction_and_weight_gathering() -> None:
    spec = spec_of(DENSE)
    hidden = layout_of(spec, tp=2)
    bare = changed(hidden, overlap_grad_reduce=False, overlap_param_gather=False)
    only_gradients = changed(hidden, overlap_param_gather=False)
    times = [time_of(spec, layout).parts_s["dp_comm"] for layout in (hidden, only_gradients, bare)]
    assert times == sorted(times)
    assert times[0] < times[2] / 4
    # Reduce-scatter of 4 bytes and all-gather of 2 bytes per element, over the network.
    assert (times[2] - times[1]) > (times[1] - times[0])


@pytest.mark.parametrize(
    ("other", "bytes_of_an_element"),
    [({"grad_reduce_in_fp32": False}, 2 + 2), ({"distributed_optimizer": False}, 4 + 4)],
)
def test_gradients_are_reduced_and_weights_gathered_in_their_own_bytes(
    other: dict[str, bool], bytes_of_an_element: int
) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, overlap_grad_reduce=False, overlap_param_gather=False)
    usual, changed_s = (time_of(spec, one).parts_s["dp_comm"] for one in (layout, changed(layout, **other)))
    assert changed_s == pytest.approx(usual * bytes_of_an_element / (4 + 2), rel=0.02)


def test_the_ends_of_a_pipeline_add_up_the_gradients_of_a_tied_embedding() -> None:
    spec = spec_of(TIED)
    layout = layout_of(spec, pp=2)
    tied = time_of(spec, layout).parts_s["dp_comm"]
    loose = replace(spec, model=replace(spec.model, tie_word_embeddings=False))
    extra = tied - time_of(loose, layout).parts_s["dp_comm"]
    # One all-reduce of two ranks in different nodes: the whole fp32 gradient once each way, over one NIC.
    network = 50e9 * profile_of(spec.cluster.gpu).network_efficiency
    assert extra == pytest.approx(4 * 151_936 * 2560 / network, rel=0.02)


def test_the_copies_of_the_embedding_are_added_up_with_token_prediction_too() -> None:
    plain, deep = spec_of(DENSE), spec_of(DENSE, mtp_num_layers=1)
    layout = layout_of(plain, pp=2, tp=8)
    network = 50e9 * profile_of(plain.cluster.gpu).network_efficiency
    extra = time_of(deep, layout).parts_s["dp_comm"] - time_of(plain, layout).parts_s["dp_comm"]
    assert extra > 4 * 151_936 * 4096 / 8 / network


def test_full_recomputation_repeats_about_a_third_of_the_work() -> None:
    spec = spec_of(DENSE)
    plain = time_of(spec, layout_of(spec, tp=2)).step_s
    full = time_of(spec, layout_of(spec, tp=2, recompute="full")).step_s
    assert 1.2 < full / plain < 1.4


def test_offload_pays_for_the_host() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    card, host = time_of(spec, layout), time_of(spec, changed(layout, optimizer_offload_fraction=1.0))
    assert host.parts_s["optimizer"] > 3 * card.parts_s["optimizer"]


def test_slower_networks_and_cards_take_longer() -> None:
    fast, slow = spec_of(DENSE), spec_of(DENSE, cluster={"ib_bandwidth": "100Gb/s", "nvlink_bandwidth": "900GB/s"})
    layout = layout_of(fast, pp=2, overlap_grad_reduce=False, overlap_param_gather=False)
    assert time_of(slow, layout).step_s > time_of(fast, layout).step_s
    ampere = spec_of(DENSE, gpu="a100-sxm-80gb")
    assert time_of(ampere, layout).step_s > 1.5 * time_of(fast, layout).step_s


def told_by(spec: Spec, layout: Layout) -> DataParallel:
    return data_parallel(case_of(spec, layout.backend), layout, pipeline_times_of(spec, layout))


def test_what_follows_the_pipeline_is_that_of_the_rank_with_most_weights() -> None:
    """The last rank is the busiest, because of its loss; the first has more layers and an equally large table."""
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=2, pipeline_layout="Et*19|t*17,L", overlap_grad_reduce=False)
    case = case_of(spec, layout.backend)
    assert pipeline_work(case, layout).rank == 1
    ((_, reduced),) = told_by(spec, layout).reduces
    assert reduced.sent_bytes == 4 * stage_parameters(case, layout, 0).dense
    assert sum(dict(optimizer_time(case, layout)).values()) == time_of(spec, layout).parts_s["optimizer"]


def test_without_overlap_all_of_data_parallel_is_exposed() -> None:
    spec = spec_of(DENSE)
    told = told_by(spec, layout_of(spec, overlap_grad_reduce=False))
    assert told.exposed_reduce_s == sum(one.call_s for _, one in told.reduces)
    assert told.exposed_gather_s == sum(one.call_s for _, one in told.gathers)
    assert told.exposed_s == told.exposed_reduce_s + told.exposed_gather_s


def test_without_the_distributed_optimizer_one_all_reduce_is_told_and_no_gather() -> None:
    spec = spec_of(DENSE)
    told = told_by(spec, layout_of(spec, distributed_optimizer=False))
    assert [one.kind for _, one in told.reduces] == ["all-reduce"]
    assert told.gathers == ()


def test_experts_are_reduced_over_their_own_ranks() -> None:
    spec = spec_of(MIXED)
    told = told_by(spec, layout_of(spec, ep=8))
    assert {name: one.group.size for name, one in told.reduces} == {"dense": 32, "expert": 4}


def test_a_tied_embedding_is_added_up_by_its_two_stages_alone() -> None:
    spec = spec_of(TIED)
    tied = told_by(spec, layout_of(spec, pp=2)).tied
    assert tied.group.size == 2
    assert told_by(spec, layout_of(spec)).tied is None


def test_an_offloaded_optimizer_takes_the_way_over_pcie_and_the_host() -> None:
    spec = spec_of(DENSE)

    case = case_of(spec, "megatron")

    def names(**form: Any) -> list[str]:
        layout = layout_of(spec, **form)
        times = optimizer_time(case, layout)
        assert all(seconds > 0 for _, seconds in times)
        return [name for name, _ in times]

    assert names() == ["gradient norm, Adam", "host work of a step"]
    assert "offload over PCIe" in names(optimizer_offload_fraction=1.0)


def test_weights_come_back_from_the_host_in_fp32_unless_bf16_is_all_there_is() -> None:
    spec = spec_of(DENSE)

    case = case_of(spec, "megatron")

    def over_pcie(**form: Any) -> float:
        layout = layout_of(spec, optimizer_offload_fraction=1.0, backend="megatron", **form)
        return dict(optimizer_time(case, layout))["offload over PCIe"]

    assert over_pcie() / over_pcie(precision_aware_optimizer=True) == pytest.approx(8 / 6)


def test_adapters_leave_next_to_nothing_to_reduce_and_to_optimise() -> None:
    spec, frozen = spec_of(DENSE), spec_of(DENSE, finetuning="lora")
    layout = layout_of(spec, tp=2)
    plain, found = (predict_time(case_with(one, MEGATRON), layout) for one in (spec, frozen))
    assert found.step_s < plain.step_s
    assert found.parts_s["optimizer"] < plain.parts_s["optimizer"]
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)


def test_gradients_of_whole_adapters_are_summed_over_the_tensor_parallel_group() -> None:
    def told(**form: Any) -> DataParallel:
        spec = spec_of(DENSE, finetuning="lora")
        layout = layout_of(spec, **form)
        return told_by(spec, layout)

    once = told(tp=2).replicated
    assert once.sent_bytes == 4 * 36 * 8 * 4 * 4096
    assert told(tp=2).exposed_s > told(tp=2).exposed_reduce_s + once.call_s
    assert told().replicated is None
    assert told(tp=2, sequence_parallel=False).replicated is None


def test_a_tied_embedding_that_is_frozen_is_not_summed() -> None:
    spec = spec_of(TIED, finetuning="lora")
    layout = layout_of(spec, pp=2)
    assert told_by(spec, layout).tied is None


def test_experts_exchange_tokens_beside_the_other_pass_but_for_the_first_micro_batches() -> None:
    spec = spec_of(MIXED, nodes=4, global_batch_size=256)
    plain = layout_of(spec, ep=8, pp=2, vpp=2, backend="megatron")
    before, after = (time_of(spec, changed(plain, overlap_moe_expert_parallel_comm=on)) for on in (False, True))
    assert after.step_s < before.step_s
    assert 0.6 < after.parts_s["ep_comm"] / before.parts_s["ep_comm"] < 0.8
    assert {**before.parts_s, "ep_comm": 0, "pp_bubble": 0, "dp_comm": 0} == pytest.approx(
        {**after.parts_s, "ep_comm": 0, "pp_bubble": 0, "dp_comm": 0}
    )
    few = layout_of(spec_of(MIXED, nodes=4, global_batch_size=32), ep=8, backend="megatron")
    assert few.gradient_accumulation_steps == 1  # no other micro-batch
    alone, beside = (time_of(spec, changed(few, overlap_moe_expert_parallel_comm=on)) for on in (False, True))
    assert alone == beside
