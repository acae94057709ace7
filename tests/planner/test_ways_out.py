from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.samples import make_plan, make_ranking, make_rejection
from topoplan.planner.plan import STOPPED, Change, Ranking, WayOut
from topoplan.planner.rank import needs_ways_out
from topoplan.planner.ways_out import KINDS, ways_out
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import TRAINER_RULE

PLAN = make_plan(tp=2, device_gib=60.0)
TIGHT = make_plan(tp=4, device_gib=78.0)


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., dict[str, WayOut]]:
    """Return the ways out of a spec by kind; `fits` says whether a search finds something."""
    path = tmp_path / "spec.yaml"

    def work(fits: Callable[[Spec], bool], *plans: object, searched: float = 1.0, **job: object) -> dict[str, WayOut]:
        keys = {"seq_len": 4096, "global_batch_size": 64, "finetuning": "full"} | job
        path.write_text(f"nodes: 1\ngpus_per_node: 8\ngpu: a100-sxm-40gb\nmodel: Qwen/Qwen3-8B\njob: {keys}\n")

        def read(change: Change) -> Spec:
            spec = load_spec(path, overrides=change.sets, pins=change.pins)
            return replace(spec, backends=(change.backend,)) if change.backend else spec

        def search(spec: Spec) -> Ranking:
            return make_ranking(*([PLAN] if fits(spec) else []), spec=spec, searched=searched)

        rejected = (make_rejection(rule=TRAINER_RULE, tp=2),)
        ranking = make_ranking(*plans, spec=load_spec(path), searched_backends=("mca",), rejected=rejected)
        return {way.change.kind: way for way in ways_out(ranking, read, search)}

    return work


def never(spec: Spec) -> bool:
    return False


def test_a_ranking_needs_ways_out_where_no_plan_leaves_a_tenth_of_the_card() -> None:
    assert needs_ways_out(make_ranking())
    assert needs_ways_out(make_ranking(TIGHT))
    assert not needs_ways_out(make_ranking(TIGHT, PLAN))
    assert not needs_ways_out(make_ranking(searched=0.5))


def test_they_are_told_by_what_is_given_up_and_each_once(tried: Callable[..., dict[str, WayOut]]) -> None:
    ways = tried(lambda spec: True, pin={"tp": 2})
    # This plan offloads nothing, and no layout is refused for a key of the trainer.
    assert [*ways] == [kind for kind in KINDS if kind not in ("host_memory", "trainer_keys")]
    assert {kind: way.change.sets for kind, way in ways.items() if way.plan and way.change.sets} == {
        "pins": ("pin={}",),
        "nodes": ("nodes=2",),
        "gpu": ("gpu=a100-sxm-80gb",),
        "lora": ("finetuning=lora",),
        "qlora": ("finetuning=qlora",),
        "seq_len": ("seq_len=3072",),
    }


@pytest.mark.parametrize(
    ("kind", "fits", "change"),
    [
        ("engine", lambda spec: spec.backends == ("fsdp2",), "fsdp2"),
        ("liger", lambda spec: spec.job.pin.get("fused_linear_cross_entropy"), "fused_linear_cross_entropy=true"),
        ("nodes", lambda spec: spec.cluster.nodes >= 3, "nodes=3"),
        ("nodes", lambda spec: spec.cluster.nodes == 8, "nodes=8"),
        ("gpu", lambda spec: spec.cluster.gpu.memory_bytes > 90 * 2**30, "gpu=h200-sxm-141gb"),
        ("seq_len", lambda spec: spec.job.seq_len <= 2048, "seq_len=2048"),
        ("seq_len", lambda spec: spec.job.seq_len <= 700, "seq_len=512"),
    ],
)
def test_the_mildest_of_a_kind_is_taken(
    tried: Callable[..., dict[str, WayOut]], kind: str, fits: Callable[[Spec], bool], change: str
) -> None:
    ways = tried(fits)
    found = {name: way.change for name, way in ways.items() if way.plan}
    assert [*found] == [kind]
    assert change in (*found[kind].sets, *found[kind].pins, found[kind].backend)


def test_a_key_for_which_layouts_are_refused_is_left_out(tried: Callable[..., dict[str, WayOut]]) -> None:
    settings = {"logging_steps": 1, "additional_configs": {"overlap_moe_expert_parallel_comm": True}}
    key = "additional_configs.overlap_moe_expert_parallel_comm"

    def fits(spec: Spec) -> bool:
        return spec.job.trainer["additional_configs"]["overlap_moe_expert_parallel_comm"] is None

    ways = tried(fits, trainer=settings)
    assert {name: way.change.sets for name, way in ways.items() if way.plan} == {
        "trainer_keys": (f"trainer.{key}=null",)
    }
    assert ways["trainer_keys"].change.words == f"without trainer.{key}"


def test_what_leads_nowhere_says_why(tried: Callable[..., dict[str, WayOut]]) -> None:
    ways = tried(never)
    assert "pins" not in ways
    assert {way.plan for way in ways.values()} == {None}
    assert all(not way.unfinished and "no layout fits" in way.reason for way in ways.values())
    assert tried(never, finetuning="qlora").keys().isdisjoint({"lora", "qlora"})


def test_a_job_that_fits_stays_what_it_is(tried: Callable[..., dict[str, WayOut]]) -> None:
    ways = tried(lambda spec: True, TIGHT)
    assert [kind for kind, way in ways.items() if way.plan] == ["engine", "nodes", "gpu"]
    assert "lora" not in ways


def test_the_searches_have_an_end(tried: Callable[..., dict[str, WayOut]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topoplan.planner.ways_out.MOST_SEARCHES", 6)
    ways = tried(never)
    assert [kind for kind, way in ways.items() if not way.unfinished] == ["engine", "liger", "host_memory", "lora"]
    assert all("takes too long" in way.reason for way in ways.values() if way.unfinished)


def test_a_search_that_is_stopped_is_the_last(tried: Callable[..., dict[str, WayOut]]) -> None:
    ways = tried(lambda spec: True, searched=0.5)
    assert {way.unfinished for way in ways.values()} == {STOPPED}
    assert make_ranking(ways_out=tuple(ways.values())).is_interrupted
