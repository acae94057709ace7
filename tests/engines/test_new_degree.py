"""A degree that the data-parallel engine does not search, added in one place: an engine of its own in the registry.

The degree is ring attention over FSDP2's ranks. Layouts have a key for it (`cp`) and the formulas cover it, but no
trainer that files are written for supports it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, cli
from topoplan.engines import registry
from topoplan.engines.data_parallel.engine import DataParallel
from topoplan.engines.engine import Engine, Family
from topoplan.engines.rule import Broken, Rule
from topoplan.layout.layout import Layout, changed
from topoplan.planner import explain, search
from topoplan.planner.predict import predict
from topoplan.specs.case import Case
from topoplan.specs.load import load_spec
from topoplan.trainers import registry as trainers
from topoplan.trainers.case import case_of

__all__ = ["cli"]

SPEC = """\
nodes: 1
gpus_per_node: 4
nvlink_bandwidth: 900GB/s
gpu: h100-sxm-80gb
model: Qwen/Qwen3-1.7B
job: {seq_len: 32768, global_batch_size: 8, template: qwen3}
"""


def _ring(case: Case, layout: Layout) -> str | None:
    parts = 2 * layout.cp if layout.cp > 1 else 1
    left = case.job.seq_len % parts
    return f"seq_len {case.job.seq_len} % (2 * cp {layout.cp}) = {left}" if left else None


class Rings(DataParallel):
    """FSDP2 whose ranks share a sequence by ring attention."""

    backends = ("fsdp2",)
    rules = search_rules = (*DataParallel.rules, Rule("ring", "a paper", _ring, "choose another cp"))
    choices = (("cp", "cp"), *DataParallel.choices)

    def families(self, case: Case, backend: str) -> Iterator[tuple[Family, Broken | None]]:
        """Yield every family of the data-parallel engine, with rings of one rank and of more."""
        for family, broken in super().families(case, backend):
            yield family, broken
            for cp in (2, 4, 8) if not broken else ():
                ring = tuple(_with_ring(layout, cp) for layout in family)
                if ring[0].world_size == case.cluster.world_size:
                    yield ring, self.verdict(case, ring[0], searched=True)

    def changes(self, layout: Layout) -> list[tuple[str, Layout]]:
        """Yield the changes of the data-parallel engine, and a ring twice as large."""
        found = super().changes(layout)
        return found if layout.dp % 2 else [*found, (f"cp {layout.cp * 2}", _with_ring(layout, layout.cp * 2))]


def _with_ring(layout: Layout, cp: int) -> Layout:
    """Return the layout with a ring; each rank accumulates more micro-batches, so that the batch stays equal."""
    times = cp // layout.cp
    steps = layout.gradient_accumulation_steps * times
    return changed(layout, cp=cp, dp=layout.dp // times, gradient_accumulation_steps=steps)


@pytest.fixture(autouse=True)
def new_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with the new engine, and trainers that accept it."""
    rings: Engine = Rings()
    monkeypatch.setitem(registry._ENGINE_OF, "fsdp2", rings)
    for module in (trainers, search):
        monkeypatch.setattr(module, "is_for_others", lambda spec, backend: True)


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    file = tmp_path / "cluster.yaml"
    file.write_text(SPEC)
    return str(file)


def test_a_new_degree_is_searched_ranked_and_weighed_up(spec_file: str) -> None:
    spec = replace(load_spec(spec_file), backends=("fsdp2",))
    ranking = search.rank(spec, keep_rejected=True)
    assert {plan.layout.cp for plan in ranking.plans} >= {1, 2, 4}
    best = ranking.plans[0]
    assert any(note.startswith("cp ") for note in ranking.notes)
    assert predict(spec, best.layout).time.step_s == best.time.step_s
    assert all(plan.layout.world_size == 4 for plan in ranking.plans)


def test_a_new_degree_is_held_to_its_own_rule(spec_file: str) -> None:
    spec = load_spec(spec_file)
    odd = replace(spec, job=replace(spec.job, seq_len=32_770), backends=("fsdp2",))
    out = search.rank(odd, keep_rejected=True).rejected
    assert {one.reason for one in out if one.rule == "ring"} >= {"seq_len 32770 % (2 * cp 2) = 2"}
    layout = next(one.layout for one in out if one.rule == "ring")
    broken = registry.engine_of("fsdp2").verdict(case_of(odd, "fsdp2"), layout)
    assert broken.fix == "choose another cp"


def test_rank_and_explain_show_a_plan_with_a_new_degree(cli: Cli, spec_file: str) -> None:
    table = cli("rank", spec_file, "--backend", "fsdp2", "--json", "--top", "100")
    plans = json.loads(table.out)["plans"]
    ring = next(plan for plan in plans if plan["layout"]["cp"] == 4)
    assert "-cp4-" in ring["id"]
    told = cli("explain", spec_file, "--backend", "fsdp2", "--plan", ring["id"])
    assert told.code == 0, told.err
    assert "cp4" in told.out


def test_what_does_not_fit_is_told_that_the_new_degree_would_help(spec_file: str) -> None:
    spec = load_spec(spec_file)
    keys = {"recompute": "none", "ulysses": 1, "expandable_segments": False, "fused_linear_cross_entropy": False}
    needs = [predict(spec, {"backend": "fsdp2", "cp": cp, **keys}).memory.device_bytes for cp in (1, 2)]
    card = replace(spec.cluster.gpu, memory_bytes=int(sum(needs) / 2))
    small = replace(spec, cluster=replace(spec.cluster, gpu=card), job=replace(spec.job, pin=keys))
    out = explain.memory_rejection(small, predict(small, {"backend": "fsdp2", **keys}).layout)
    assert out.fix.startswith("cp 2 would fit")
