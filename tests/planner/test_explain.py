"""Sentences: why a layout is rejected and what would make it fit, and what the alternatives to the best plan cost."""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, layout_of, spec_of
from tests.samples import FULL, make_plan
from topoplan.layout.forms import layout_from_dict
from topoplan.planner.explain import alternatives, liger_note, memory_rejection, speed_words
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.predict import memory_of, predict
from topoplan.planner.rank import ranked
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.registry import TRAINERS

GIB = 2**30


def rejection(spec: Spec, **form: object) -> tuple[str, str]:
    found = memory_rejection(spec, layout_of(spec, **form))
    assert found.rule == "memory"
    return found.reason, found.fix


def test_a_rejection_names_the_stage_and_the_gib_by_which_it_is_over() -> None:
    spec = spec_of(DENSE, nodes=1, seq_len=16_384)
    layout = layout_of(spec, pp=2, micro_batch_size=2)
    memory = memory_of(case_of(spec, layout.backend), layout)
    reason, _ = rejection(spec, pp=2, micro_batch_size=2)
    numbers = re.match(
        r"stage (\d) needs ([\d.]+) GiB and a margin of ([\d.]+), the card has ([\d.]+): ([\d.]+) GiB too much;"
        r" the largest part is activations",
        reason,
    )
    stage, needed, margin, card, over = (float(text) for text in numbers.groups())
    assert stage == 0
    assert needed == pytest.approx(memory.device_bytes / GIB, abs=0.06)
    assert needed + margin - card == pytest.approx(over, abs=0.16)


@pytest.mark.parametrize(
    ("form", "seq_len", "fix"),
    [
        ({"micro_batch_size": 8, "tp": 4}, 4096, "micro_batch_size 4"),
        ({"tp": 2}, 16_384, "recompute full"),
        ({"recompute": "full", "cp": 1}, 4096, "tp 2"),
    ],
)
def test_the_mildest_change_that_fits_is_told(form: dict[str, object], seq_len: int, fix: str) -> None:
    spec = spec_of(DENSE, nodes=1, seq_len=seq_len)
    assert rejection(spec, **form)[1].startswith(f"{fix} would fit (")


@pytest.mark.parametrize(
    ("model", "form"),
    [(DENSE, {"tp": 4, "micro_batch_size": 2}), (DENSE, {"recompute": "full"}), (MIXED, {"tp": 2, "ep": 8})],
)
def test_what_is_said_to_fit_does_fit(model: str, form: dict[str, object]) -> None:
    spec = spec_of(model, nodes=2, seq_len=32_768)
    layout = layout_of(spec, **form)
    assert not memory_of(case_of(spec, layout.backend), layout).fits
    fix = memory_rejection(spec, layout).fix
    changes = re.findall(
        r"(tp|pp|cp|micro_batch_size|optimizer_offload_fraction) ([\d.]+)(?= |$)", fix.split(" would fit")[0]
    )
    assert changes or "recompute full" in fix
    changed = dict(form) | {key: float(value) if "." in value else int(value) for key, value in changes}
    if "recompute full" in fix:
        changed["recompute"] = "full"
    plan = predict(spec, {"backend": "megatron", **changed})
    assert plan.fits
    assert f"{plan.memory.device_bytes / GIB:.1f} GiB" in fix


def test_offload_is_the_last_resort_and_says_what_the_host_needs() -> None:
    spec = spec_of("Qwen/Qwen3-4B", nodes=1, gpus_per_node=1, global_batch_size=8)
    _, fix = rejection(spec, recompute="full")
    assert "optimizer_offload_fraction 1.0 would fit" in fix
    host = memory_of(
        case_of(spec, "megatron"), layout_of(spec, recompute="full", optimizer_offload_fraction=1.0)
    ).host_bytes
    assert host == pytest.approx(20 * 4.02e9, rel=0.01)
    assert f"{host / GIB:.0f} GiB of host memory per node" in fix


def test_offload_beyond_the_hosts_memory_is_not_told() -> None:
    spec = spec_of("Qwen/Qwen3-4B", nodes=1, gpus_per_node=1, global_batch_size=8, cluster={"host_memory": "32GiB"})
    assert rejection(spec, recompute="full")[1] == ""


def test_a_model_far_too_large_has_no_fix() -> None:
    spec = spec_of("Qwen/Qwen2.5-72B", nodes=1, gpu="rtx4090-24gb")
    assert rejection(spec)[1] == ""


def plan(speed: float, gib: float, **degrees: object) -> Plan:
    return replace(make_plan(device_gib=gib, **degrees), tokens_per_s_per_gpu=speed)  # type: ignore[arg-type]


def told(order: list[Plan]) -> list[str]:
    return alternatives(order, lambda layout: TRAINERS[layout.ulysses > 1])


def test_an_alternative_says_what_it_gains_and_loses() -> None:
    best = plan(1000.0, 60.0, tp=2)
    notes = told([best, plan(950.0, 50.0, tp=4), plan(900.0, 65.0, tp=2, pp=2)])
    assert notes == [
        "tp 4 instead of 2: 5% slower, 10.0 GiB less (tp4-pp1-dp8-mbs1)",
        "pp 2 instead of 1: 11% slower, 5.0 GiB more (tp2-pp2-dp8-mbs1)",
    ]


def test_alternatives_are_told_once_each_and_the_fastest_first() -> None:
    best = plan(1000.0, 60.0, tp=2)
    both = plan(900.0, 40.0, tp=2, pp=2, micro_batch_size=2)
    assert len(told([best, both])) == 1
    notes = told([best, both, plan(800.0, 70.0, tp=4)])
    assert [note.partition(":")[0] for note in notes] == [
        "pp 2 instead of 1, with micro batch 2",
        "tp 4 instead of 2",
    ]


def test_recomputation_is_a_choice_only_where_the_best_plan_has_it() -> None:
    without, full = plan(1000.0, 60.04, tp=2), plan(990.0, 60.0, tp=2, recompute=FULL)
    assert told([without, full]) == []
    assert told([full, without]) == ["recompute none instead of full: 1% faster, as much memory (tp2-pp1-dp16-mbs1)"]


def test_an_alternative_names_every_choice_that_differs_its_trainer_and_offload() -> None:
    zero: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 3}
    best = plan(1000.0, 60.0, **zero, micro_batch_size=2, recompute=FULL)
    other = plan(860.0, 66.5, **zero, ulysses=4, offload_optimizer=True)
    (note,) = told([best, replace(other, memory=replace(other.memory, host_bytes=GIB))])
    change, rest = note.split(": ")
    assert change == f"ulysses 4 instead of 1, with micro batch 1, recompute none, offload and {TRAINERS[1].title}"
    assert rest.startswith("16% slower, 6.5 GiB more (")


def test_a_faster_and_smaller_alternative_says_why_it_is_not_the_best() -> None:
    best = plan(1000.0, 60.0, tp=1)
    risky = replace(plan(1030.0, 50.0, tp=2), caveats=("vpp > 1: wrong loss",))
    slower = replace(plan(900.0, 50.0, pp=2), caveats=("vpp > 1: wrong loss",))
    assert told(ranked([risky, best, slower])) == [
        "tp 2 instead of 1: 3% faster, 10.0 GiB less (tp2-pp1-dp16-mbs1); caveat, ranked as if 3% slower: vpp > 1:"
        " wrong loss",
        "pp 2 instead of 1: 11% slower, 10.0 GiB less (tp1-pp2-dp16-mbs1); caveat",
    ]
    (note,) = told(ranked([plan(1006.0, 60.1, tp=2), plan(1000.0, 60.6, tp=1)]))
    assert note.endswith("(tp2-pp1-dp16-mbs1); within 1% of plan 1, which is simpler")


def test_the_only_plan_has_no_alternatives() -> None:
    assert told([]) == told([plan(1.0, 1.0)]) == []


def sharded_rejection(spec: Spec, **form: Any) -> tuple[str, str]:
    layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
    assert not memory_of(case_of(spec, layout.backend), layout).fits
    found = memory_rejection(spec, layout)
    return found.reason, found.fix


DDP: dict[str, Any] = {"backend": "ddp"}
ZERO1: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 1}
FSDP2: dict[str, Any] = {"backend": "fsdp2"}
HOST: dict[str, Any] = {"cluster": {"host_memory": "2TiB"}}
LONG: dict[str, Any] = {"seq_len": 49_152, "global_batch_size": 8, "pin": {"fused_linear_cross_entropy": False}}


def test_offload_is_named_where_the_spec_does_not_say_what_there_is_to_offload_to() -> None:
    spec = spec_of("Qwen/Qwen2.5-72B", nodes=1, global_batch_size=32)
    assert spec.cluster.host_memory_bytes is None
    _, fix = sharded_rejection(spec, backend="deepspeed", zero_stage=3, recompute="full")
    assert fix.startswith("offload_optimizer would fit (")
    assert fix.endswith(" GiB of host memory per node): set host_memory in the spec")
    stated = spec_of("Qwen/Qwen2.5-72B", nodes=1, global_batch_size=32, cluster={"host_memory": "256GiB"})
    _, fix = sharded_rejection(stated, backend="deepspeed", zero_stage=3, recompute="full")
    assert fix == ""


@pytest.mark.parametrize(
    ("form", "keys", "change"),
    [
        (FSDP2 | {"micro_batch_size": 4}, {}, {"recompute": "full"}),
        (DDP | {"recompute": "full"}, {}, {"backend": "deepspeed", "zero_stage": 3}),
        (ZERO1 | {"recompute": "full"}, {"model": "Qwen/Qwen3-14B"}, {"zero_stage": 2}),
        (
            ZERO1 | {"recompute": "full"},
            {"model": "Qwen/Qwen3-32B", **HOST},
            {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
        ),
        (FSDP2 | {"recompute": "full"}, {"model": "Qwen/Qwen3-32B", **HOST}, {"fused_linear_cross_entropy": True}),
        (FSDP2 | {"recompute": "full"}, {"model": "meta-llama/Meta-Llama-3-70B", **HOST}, {"offload": True}),
        (FSDP2 | {"recompute": "full"}, LONG, {"ulysses": 2}),
    ],
)
def test_the_change_that_is_named_for_data_parallel_layouts_makes_them_fit(
    form: dict[str, Any], keys: dict[str, Any], change: dict[str, Any]
) -> None:
    options = {"nodes": 1, "global_batch_size": 32} | keys
    # An explicit margin, because the error band changes with the measurements.
    options["cluster"] = options.get("cluster", {}) | {"margin": "6%"}
    spec = spec_of(options.pop("model", DENSE), **options)
    reason, fix = sharded_rejection(spec, **form)
    assert reason.startswith("a GPU needs ")
    for key, value in change.items():
        assert (key if value is True else f"{key} {value}") in fix
    together = {"recompute": "full", "expandable_segments": True} if "expandable_segments" in fix else {}
    changed = layout_from_dict(
        {key: value for key, value in form.items() if "backend" not in change or key != "backend"} | change | together,
        spec.cluster,
        spec.model,
        spec.job,
    )
    memory = memory_of(case_of(spec, changed.backend), changed)
    assert memory.fits
    assert f"({memory.device_bytes / GIB:.1f} GiB" in fix


def test_what_the_pin_forbids_is_not_named() -> None:
    free, pinned = (
        sharded_rejection(spec_of(DENSE, nodes=1, global_batch_size=32, pin=pin), **DDP, recompute="full")[1]
        for pin in ({}, {"backend": "ddp"})
    )
    assert "deepspeed" in free
    assert "deepspeed" not in pinned


def test_a_node_without_enough_host_memory_is_told_so() -> None:
    spec = spec_of("Qwen/Qwen3-32B", nodes=1, global_batch_size=32, cluster={"host_memory": "64GiB"})
    reason, _ = sharded_rejection(spec, **FSDP2, recompute="full", offload=True)
    assert re.match(r"a node needs \d+ GiB of host memory and has 64", reason)


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


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (1.004, "as fast"),
        (0.996, "as fast"),
        (1.25, "25% slower"),
        (0.8, "25% faster"),
        (1.9, "90% slower"),
        (2.0, "2.0 times slower"),
        (10.5, "10.5 times slower"),
        (0.1, "10.0 times faster"),
    ],
)
def test_speed_is_told_by_the_time_and_from_twice_as_long_on_as_a_factor(time: float, words: str) -> None:
    assert speed_words(time) == words


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
                assert abs(100.0 * (ratio - 1.0) - float(percent)) <= 0.5
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
