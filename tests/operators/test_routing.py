"""How many tokens the busiest rank of an expert-parallel group receives."""

from typing import Any

import pytest

from tests.engines.samples import MIXED, spec_of
from topoplan.layout.forms import layout_from_dict
from topoplan.operators.routing import imbalance_of, natural_imbalance
from topoplan.planner.predict import predict
from topoplan.specs.model import Moe
from topoplan.trainers.case import case_of

FINE, COARSE = (
    Moe(experts=experts, experts_per_token=chosen, intermediate_size=768) for experts, chosen in ((128, 8), (8, 2))
)


def test_more_experts_on_a_rank_are_more_even() -> None:
    assert natural_imbalance(FINE, 8) == pytest.approx(1.5, abs=0.01)
    spread = [natural_imbalance(FINE, ep) for ep in (1, 2, 4, 8, 16, 32)]
    assert spread == sorted(set(spread))
    assert spread[0] == 1.0
    assert all(natural_imbalance(moe, 2) <= 2.0 for moe in (FINE, COARSE))


@pytest.mark.parametrize(
    ("backend", "job", "layout", "expected"),
    [
        ("mca", {}, {}, 1.5),
        ("megatron", {}, {}, 1.0),  # Megatron-LM's own loop, as benchmarks run it
        ("megatron", {}, {"moe_router_force_load_balancing": False}, 1.5),
        ("mca", {}, {"moe_router_force_load_balancing": True}, 1.0),
        ("mca", {}, {"moe_expert_capacity_factor": 1.2}, 1.2),
        ("mca", {}, {"moe_expert_capacity_factor": 2.0}, 1.5),
        ("mca", {"token_imbalance": 3.0}, {}, 3.0),
        ("mca", {"token_imbalance": 3.0}, {"ep": 1}, 1.0),
    ],
)
def test_what_is_said_comes_before_what_routers_do(
    backend: str, job: dict[str, Any], layout: dict[str, Any], expected: float
) -> None:
    spec = spec_of(MIXED, **job)
    form = {"backend": backend, "ep": 8} | layout
    case = case_of(spec, backend)
    found = imbalance_of(case, layout_from_dict(form, spec.cluster, spec.model, spec.job))
    assert found == pytest.approx(expected, abs=0.01)


def test_the_busiest_rank_sets_time_and_memory() -> None:
    spec, form = spec_of(MIXED), {"ep": 8, "micro_batch_size": 1}
    natural, forced = predict(spec, form), predict(spec, {**form, "moe_router_force_load_balancing": True})
    assert natural.time.step_s > forced.time.step_s
    assert natural.memory.allocated_bytes > forced.memory.allocated_bytes
    width = {plan.time.band_s[1] / plan.time.step_s for plan in (natural, forced)}
    assert max(width) == natural.time.band_s[1] / natural.time.step_s > min(width)
    assert any("1.50 times the average" in text for text in natural.warnings)
    assert not any("average" in text for text in forced.warnings)
