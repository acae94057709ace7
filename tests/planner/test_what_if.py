from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, spec_of
from tests.samples import make_plan, make_ranking, make_spec
from topoplan.errors import LayoutError
from topoplan.planner.plan import Ranking
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.planner.what_if import GRAIN, Sizing, fate_of, found_by, longest, outcome, size
from topoplan.specs.spec import Spec


def small(**options: Any) -> Spec:
    pin = {"tp": 2, "pp": 1, "cp": 1} | options.pop("pin", {})
    return spec_of(DENSE, pin=pin, **options)


def test_the_best_plan_is_that_of_the_ranking() -> None:
    spec = small()
    found, ranking = found_by(spec, rank)
    assert found.best == ranking.plans[0]
    assert found.counts == ranking.counts
    assert not found.reason


def test_the_same_spec_leaves_the_best_plan_the_best() -> None:
    spec = small()
    best = rank(spec).plans[0]
    case = outcome({}, spec, best, rank)
    assert (case.fate.rank, case.fate.slower) == (1, 0)
    assert case.found.best.layout == best.layout


def test_more_nodes_give_the_old_plan_more_data_parallel_ranks() -> None:
    spec, twice = small(), small(nodes=8)
    best = predict(spec, {"tp": 2, "micro_batch_size": 1})
    fate = fate_of(twice, best, rank(twice))
    assert fate.layout.dp == 2 * best.layout.dp
    assert fate.plan is not None
    assert fate.rank is not None


def test_a_slower_place_is_told_with_its_share() -> None:
    spec = small()
    ranking = rank(spec)
    last = ranking.plans[-1]
    fate = fate_of(spec, last, ranking)
    assert fate.rank == len(ranking.plans)
    assert fate.slower == pytest.approx(1 - last.tokens_per_s_per_gpu / ranking.plans[0].tokens_per_s_per_gpu)
    assert fate.slower > 0


def test_a_batch_that_no_longer_divides_is_illegal_with_its_equation() -> None:
    old = predict(spec_of(DENSE), {"tp": 2})
    fate = fate_of(spec_of(DENSE, nodes=3), old, None)
    assert fate.rule == "layout"
    assert fate.reason == "global_batch_size 64 % (micro_batch_size 1 * dp 12) = 4"
    assert fate.plan is None


def test_a_broken_rule_is_told_with_its_equation() -> None:
    old = predict(spec_of(DENSE), {"tp": 8, "pp": 4})
    fate = fate_of(spec_of(DENSE, gpu="rtx4090-24gb", gpus_per_node=4, nodes=8), old, None)
    assert "tp 8" in fate.reason
    assert fate.fix


def test_what_no_longer_fits_is_told_with_its_gib() -> None:
    old = predict(spec_of(DENSE), {"tp": 2})
    fate = fate_of(spec_of(DENSE, seq_len=65536), old, None)
    assert fate.rule == "memory"
    assert "GiB too much" in fate.reason


def test_a_legal_plan_that_the_search_leaves_out_is_still_compared() -> None:
    spec = small()
    old = predict(spec_of(DENSE), {"tp": 4})
    fate = fate_of(spec, old, rank(spec))
    assert fate.rank is None
    assert fate.plan is not None


def test_a_spec_without_a_legal_layout_says_why() -> None:
    found, ranking = found_by(spec_of(DENSE, pin={"tp": 1, "pp": 1, "cp": 1}, global_batch_size=63), rank)
    assert ranking is None
    assert found.best is None
    assert not found.is_legal
    assert "63" in found.reason


def test_a_spec_in_which_nothing_fits_names_the_nearest() -> None:
    found, _ = found_by(spec_of("Qwen/Qwen2.5-72B", nodes=1, template="x", pin={"tp": 8}), rank)
    assert found.best is None
    assert found.is_legal
    assert "no layout fits; the nearest, tp8" in found.reason


def test_without_a_plan_before_there_is_no_fate() -> None:
    assert outcome({"nodes": "4"}, small(), None, rank).fate is None


def test_a_plan_that_splits_data_alone_is_held_to_its_own_rules() -> None:
    spec, twice = (small(pin={"tp": 1, "backend": "fsdp2"}, nodes=nodes) for nodes in (4, 8))
    best = rank(spec).plans[0]
    fate = fate_of(twice, best, rank(twice))
    assert not fate.reason
    assert fate.layout.backend == "fsdp2"


def test_a_plan_whose_backend_cannot_run_the_new_job_is_out_and_says_why() -> None:
    spec, lora = spec_of(DENSE), spec_of(DENSE, finetuning="lora")
    fate = fate_of(lora, predict(spec, {"tp": 2}), None)
    assert fate.rule == "job"
    assert "finetuning 'lora'" in fate.reason
    assert "deepspeed" in fate.fix


STEPS_OF_JOB = 1000
"""Enough steps that start-up and checkpoints, 76 and 246 s, are negligible."""

# Seconds per step by number of nodes; None: nothing fits. Three nodes are slower than two.
STEPS: dict[int, float | None] = {1: None, 2: 4.0, 3: 5.0, 4: 2.0, 5: 3.0, 6: 1.0}


def nodes_spec(nodes: int) -> Spec:
    return make_spec(nodes=nodes)


def search(spec: Spec) -> Ranking:
    step_s = STEPS[spec.cluster.nodes]
    plans = [] if step_s is None else [make_plan(tp=2, step_s=step_s)]
    return replace(make_ranking(*plans), spec=spec)


def sized(limit_s: float, *, max_nodes: int = 6, is_sure: bool = False) -> Sizing:
    return size(nodes_spec, search, steps=STEPS_OF_JOB, limit_s=limit_s, max_nodes=max_nodes, is_sure=is_sure)


def test_the_answer_is_the_first_number_of_nodes_in_time() -> None:
    sizing = sized(2500.0)
    assert sizing.answer.nodes == 4
    assert [row.nodes for row in sizing.rows] == [1, 2, 3, 4]


def test_none_is_skipped_though_more_nodes_may_be_slower() -> None:
    assert [row.nodes for row in sized(1500.0).rows] == [1, 2, 3, 4, 5, 6]


def test_the_fewest_on_which_it_fits_are_known_too() -> None:
    smallest = sized(2500.0).smallest
    assert smallest.nodes == 2


def test_to_be_sure_the_upper_end_of_the_band_counts() -> None:
    likely = sized(2400.0)
    assert likely.answer is likely.rows[3]
    sure = sized(2400.0, is_sure=True)
    assert sure.answer.nodes == 6  # four nodes take 2,322 s, but 2,562 s at the upper end


def test_exactly_in_time_is_in_time() -> None:
    effort = sized(9000.0).rows[1].effort
    sizing = sized(effort.hours * 3600)
    assert sizing.answer.nodes == 2


def test_there_may_be_no_answer() -> None:
    sizing = sized(1.0, max_nodes=3)
    assert sizing.answer is None
    assert len(sizing.rows) == 3


def test_a_pin_that_a_number_of_nodes_cannot_meet_is_a_reason() -> None:
    def picky(nodes: int) -> Spec:
        if nodes < 4:
            raise LayoutError("pin: dp 16")
        return nodes_spec(nodes)

    sizing = size(picky, search, steps=STEPS_OF_JOB, limit_s=2500.0, max_nodes=6, is_sure=False)
    assert sizing.rows[0].found.reason == "pin: dp 16"
    assert sizing.answer.nodes == 4


@pytest.mark.parametrize("most", [1, 2, 5, 13, 39, 40])
def test_the_longest_sequences_that_fit_are_found_to_the_grain(most: int) -> None:
    tried: list[int] = []

    def search(spec: Spec) -> Ranking:
        tried.append(spec.job.seq_len)
        plans = (make_plan(),) if spec.job.seq_len <= most * GRAIN else ()
        return replace(make_ranking(*plans), spec=spec)

    def spec_of_tokens(tokens: int) -> Spec:
        return spec_of(DENSE, seq_len=tokens)

    own = spec_of(DENSE).model.max_position_embeddings
    assert longest(spec_of_tokens, search) == most * GRAIN
    assert max(tried) <= own == 40 * GRAIN
    assert len(tried) <= 12


def test_where_no_sequences_fit_the_shortest_are_asked_about() -> None:
    assert longest(lambda tokens: spec_of(DENSE, seq_len=tokens), lambda spec: make_ranking(spec=spec)) == GRAIN
