"""What a change of trainer costs and gains is said once for each, and agrees with the plans."""

import re
from dataclasses import replace
from functools import lru_cache

from tests.engines.samples import DENSE, spec_of
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec

ALL = ("mca", "ddp", "deepspeed", "fsdp2")


def full(**job: object) -> Spec:
    return replace(spec_of(DENSE, nodes=1, **job), backends=ALL)


@lru_cache
def searched() -> Ranking:
    return rank(full(pin={"micro_batch_size": 1}))


def test_every_other_backend_and_trainer_has_one_sentence() -> None:
    ranking = searched()
    heads = [sentence.partition(":")[0] for sentence in ranking.crossings]
    assert len(set(heads)) == len(heads)
    groups = {(plan.layout.backend, plan.trainer) for plan in ranking.plans}
    assert ("fsdp2", "swift") in groups
    assert len(heads) == len(groups) - 1 + len(set(ALL) - {backend for backend, _ in groups})
    assert {"deepspeed (LLaMA-Factory)", "fsdp2 (LLaMA-Factory)", "fsdp2 (ms-swift)"} <= set(heads)


def test_a_sentence_is_about_the_fastest_plan_of_its_kind() -> None:
    ranking = searched()
    best = ranking.plans[0]
    for sentence in ranking.crossings:
        if named := re.search(r"^(\w+) .*?(?:(\d+)% slower|(\d\.\d) times slower).*\(([a-z0-9-]+)\)", sentence):
            backend, percent, times, name = named.groups()
            plan = next(plan for plan in ranking.plans if plan.id == name)
            assert plan.layout.backend == backend
            ratio = best.tokens_per_s_per_gpu / plan.tokens_per_s_per_gpu
            if percent:
                assert abs(100.0 * (1.0 - 1.0 / ratio) - float(percent)) <= 0.5
                assert ratio < 2.0
            else:
                assert abs(ratio - float(times)) <= 0.05
            overlap = plan.time.band_s[0] < best.time.band_s[1]
            assert ("the error bands overlap" in sentence) == overlap
    assert any("% slower" in sentence for sentence in ranking.crossings)


def test_a_backend_without_a_legal_layout_is_not_said_to_need_memory() -> None:
    ranking = rank(full(global_batch_size=4))
    (sentence,) = [one for one in ranking.crossings if one.startswith("ddp")]
    assert sentence == (
        "ddp: no layout is legal; ddp-dp8-mbs1 breaks rule batch: global_batch_size 4 % (micro_batch_size 1 * dp 8)"
        " = 4; set global_batch_size to 8"
    )
    # two GPUs share a sequence in this plan
    assert any("deepspeed (ms-swift)" in one or "fsdp2 (ms-swift)" in one for one in ranking.crossings)
    assert "ddp: nothing fits" in searched().crossings


def test_what_has_to_be_installed_is_named() -> None:
    (sentence,) = [one for one in searched().crossings if one.startswith("deepspeed (LLaMA-Factory)")]
    assert "needs DeepSpeed instead of megatron-core, mcore_adapter and Transformer Engine" in sentence


def test_a_backend_that_cannot_run_the_job_says_why() -> None:
    ranking = rank(full(finetuning="lora"))
    assert {plan.layout.backend for plan in ranking.plans} == {"ddp", "deepspeed", "fsdp2"}
    assert any(sentence.startswith("mca is ruled out: finetuning 'lora'") for sentence in ranking.crossings)


def test_a_backend_in_which_nothing_fits_is_named() -> None:
    assert "ddp: nothing fits" in rank(full(pin={"micro_batch_size": 1})).crossings


def test_one_backend_and_one_trainer_have_nothing_to_cross_to() -> None:
    assert rank(spec_of(DENSE, nodes=1)).crossings == ()
