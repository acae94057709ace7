from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, spec_of
from tests.samples import make_plan
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.versus import Comparison, compare, comparison
from topoplan.terms import Term, sum_of

SPEC = spec_of(DENSE)


def plan_of(**form: Any) -> Plan:
    return predict(SPEC, {"backend": "megatron", **form})


def tree(name: str, parts: Mapping[str, float]) -> Term:
    rows = [Term(part, value, "s", "") for part, value in parts.items()]
    return sum_of(name, rows, "", "s")


def compared(first: Plan, second: Plan) -> Comparison:
    """Compare made-up plans, whose figures no account adds up to."""
    devices = []
    for memory in (first.memory, second.memory):
        reserved = replace(tree("reserved", {}), children=(tree("allocated", memory.by_stage[0].parts_bytes),))
        devices.append(replace(tree("device", {}), value=memory.device_bytes, children=(reserved,)))
    return comparison(first, second, [tree("step", plan.time.parts_s) for plan in (first, second)], devices)


def test_differences_add_up_to_those_of_the_plans() -> None:
    first, second = plan_of(tp=2), plan_of(tp=1, pp=4)
    found = compare(SPEC, first, second)
    assert sum(row.more for row in found.time) == pytest.approx(second.time.step_s - first.time.step_s)
    assert sum(row.first for row in found.time) == pytest.approx(first.time.step_s)
    assert sum(row.second for row in found.memory) == pytest.approx(second.memory.device_bytes)


def test_the_largest_difference_is_first() -> None:
    found = compare(SPEC, plan_of(tp=2), plan_of(tp=1, pp=4))
    for rows in (found.time, found.memory):
        sizes = [abs(row.more) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 0


def test_only_layout_keys_that_differ_are_listed() -> None:
    found = compare(SPEC, plan_of(tp=2), plan_of(tp=4))
    assert found.layout == {"tp": (2, 4), "dp": (16, 8), "gradient_accumulation_steps": (4, 8)}


def test_the_faster_plan_wins_whichever_is_first() -> None:
    fast, slow = make_plan(tp=2, step_s=3.0), make_plan(tp=4, step_s=4.0)
    for found in (compared(fast, slow), compared(slow, fast)):
        assert found.winner is fast
        assert found.loser is slow
        assert not found.is_tie


def test_a_plan_that_fits_wins_over_a_faster_one_that_does_not() -> None:
    fast, slow = make_plan(tp=2, step_s=3.0, device_gib=99.0), make_plan(tp=4, step_s=4.0)
    assert compared(fast, slow).winner is slow


def test_within_one_percent_memory_decides() -> None:
    full, spare = make_plan(tp=2, step_s=3.0, device_gib=70.0), make_plan(tp=4, step_s=3.01, device_gib=40.0)
    found = compared(full, spare)
    assert found.is_tie
    assert found.winner is spare


def test_plans_of_two_kinds_of_backends_are_compared_in_what_both_have_or_is_not_as_usual() -> None:
    sharded = predict(SPEC, {"backend": "deepspeed", "zero_stage": 3})
    found = compare(SPEC, plan_of(tp=2), sharded)
    assert found.layout == {
        "backend": ("megatron", "deepspeed"),
        "tp": (2, 1),
        "dp": (16, 32),
        "gradient_accumulation_steps": (4, 2),
        "sequence_parallel": (True, None),
        "zero_stage": (None, 3),
        "cross_entropy_fusion": (True, None),
        "cross_entropy_fusion_impl": ("native", None),
    }
    assert not found.share_a_model
    assert sum(row.second for row in found.time) == pytest.approx(sharded.time.step_s)
    assert sum(row.second for row in found.memory) == pytest.approx(sharded.memory.device_bytes)


def test_plans_of_deepspeed_and_fsdp2_share_a_cost_model() -> None:
    one, two = (
        predict(spec_of(DENSE), {"backend": name, **more})
        for name, more in (("fsdp2", {}), ("deepspeed", {"zero_stage": 3}))
    )
    found = compare(SPEC, one, two)
    assert found.share_a_model
    assert found.layout == {"backend": ("fsdp2", "deepspeed"), "zero_stage": (None, 3)}
