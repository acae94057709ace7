"""An id names the plan that a search found, even if it leaves keys out."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.engines.samples import DENSE, spec_of
from topoplan.cli.plan_choice import plan_of_id
from topoplan.planner.search import rank


@pytest.mark.parametrize(
    ("backends", "trainer", "finetuning"),
    [
        (("mca", "fsdp2"), None, "full"),
        (("megatron", "fsdp2"), None, "lora"),
        (("megatron", "fsdp2", "deepspeed"), "swift", "full"),
        (("fsdp2",), "trinity", "full"),
    ],
)
def test_an_id_of_a_ranking_is_that_plan(backends: tuple[str, ...], trainer: str | None, finetuning: str) -> None:
    spec = spec_of(DENSE, nodes=2, finetuning=finetuning, pin={"micro_batch_size": 1})
    spec = replace(spec, backends=backends, trainer=trainer)
    plans = rank(spec).plans
    assert {plan.layout.backend for plan in plans} == set(backends)
    for plan in plans:
        named = plan_of_id(spec, plan.id)
        assert named.layout == plan.layout
        assert named.time.step_s == plan.time.step_s


def test_an_id_is_of_the_trainers_megatron_where_no_backend_is_named() -> None:
    spec = spec_of(DENSE, nodes=1, finetuning="lora")
    assert plan_of_id(spec, "tp2-pp1-dp4-mbs1").layout.backend == "megatron"
    assert plan_of_id(spec_of(DENSE, nodes=1), "tp2-pp1-dp4-mbs1").layout.backend == "mca"


@pytest.mark.parametrize("verb", ["explain", "timeline", "topology", "generate"])
@pytest.mark.parametrize("split", ["tp2-dp4", "ep2-dp8"])
def test_a_split_of_fsdp2_that_is_not_predicted_is_refused_with_that_reason(
    cli: Cli, spec_file: Path, verb: str, split: str
) -> None:
    assert cli(verb, spec_file, "--set", "nodes=1", "--plan", f"fsdp2-{split}-mbs1").is_refused(
        f"layout breaks rule degrees: {split[:2]} 2 with backend fsdp2"
    )
