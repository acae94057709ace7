from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, spec_of
from topoplan.planner.liger import liger_note
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec


def of_one_node(**job: Any) -> Spec:
    spec = spec_of(DENSE, **{"finetuning": "lora", "global_batch_size": 16, **job})
    return replace(spec, cluster=replace(spec.cluster, nodes=1, gpus_per_node=1))


def never(spec: Spec) -> Ranking:
    raise AssertionError(f"searched with {spec.job.pin}")


def test_the_best_plan_with_ligers_kernels_is_held_against_the_best_without() -> None:
    ranking = rank(replace(of_one_node(), backends=("ddp", "deepspeed", "fsdp2")))
    pinned = rank(of_one_node(pin={"fused_linear_cross_entropy": True})).plans[0]
    assert not ranking.plans[0].layout.fused_linear_cross_entropy
    note = liger_note(ranking, rank)
    gain = pinned.tokens_per_s_per_gpu / ranking.plans[0].tokens_per_s_per_gpu - 1.0
    assert note.startswith(f"Liger kernels: {gain:.0%} faster, ")
    assert f"({pinned.id}); --pin fused_linear_cross_entropy=true" in note


def test_another_backend_that_is_slower_even_with_them_is_not_named() -> None:
    ranking = rank(of_one_node())
    assert ranking.plans[0].layout.backend == "megatron"
    assert liger_note(ranking, rank) is None


@pytest.mark.parametrize(
    "job", [{"pin": {"fused_linear_cross_entropy": False}}, {"pin": {"backend": "megatron"}, "finetuning": "full"}]
)
def test_who_has_decided_is_not_asked(job: dict[str, Any]) -> None:
    spec = of_one_node(**job)
    spec = replace(spec, cluster=replace(spec.cluster, nodes=4, gpus_per_node=8)) if "finetuning" in job else spec
    assert liger_note(rank(spec), never) is None


def test_a_search_that_was_stopped_says_nothing() -> None:
    ranking = rank(of_one_node())
    assert liger_note(replace(ranking, searched=0.5), never) is None
    assert liger_note(ranking, lambda spec: replace(rank(spec), searched=0.5)) is None


def test_a_trainer_without_its_kernels_is_not_named() -> None:
    assert liger_note(rank(of_one_node(stage="dpo")), rank) is None
