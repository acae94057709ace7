"""Engines behind one interface: every backend has one, and all of them answer."""

from dataclasses import replace

import pytest

from tests.engines.samples import spec_of
from topoplan.engines.registry import ENGINES, engine_of
from topoplan.layout.forms import layout_from_dict
from topoplan.layout.layout import BACKENDS, DEFAULTS
from topoplan.specs.constants import BANDS
from topoplan.trainers.case import case_of


def test_every_backend_is_of_one_engine() -> None:
    assert sorted(backend for engine in ENGINES for backend in engine.backends) == sorted(BACKENDS)
    assert all(backend in engine_of(backend).backends for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_answers_for_its_layouts(backend: str) -> None:
    spec = spec_of(nodes=1)
    engine, case = engine_of(backend), case_of(spec, backend)
    form = {"backend": backend, "recompute": "full", **({"zero_stage": 2} if backend == "deepspeed" else {})}
    layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
    assert engine.verdict(case, layout) is None
    memory = engine.memory(case, layout, all_stages=True)
    assert memory.by_stage[0].moments
    assert engine.time(case, layout).step_s > 0
    assert engine.place(memory.by_stage[0]) in ("stage 0", "a GPU")
    assert set(engine.bands(case)) <= set(BANDS)
    assert {key for _, key in engine.choices} - {"recompute.granularity"} <= set(DEFAULTS)
    assert set(engine.miss_keys) <= set(DEFAULTS)
    assert [name for name, other in engine.changes(layout) if other != layout]


def test_what_a_search_keeps_holds_for_a_given_layout_too() -> None:
    for engine in ENGINES:
        assert {rule.name for rule in engine.rules} <= {rule.name for rule in engine.search_rules}
        assert engine.last_rules <= {rule.name for rule in engine.search_rules}


def test_adapters_on_megatron_grade_memory_alone() -> None:
    spec = spec_of(nodes=1, finetuning="lora")
    assert engine_of("megatron").graded_bands(case_of(spec, "megatron")) == ("adapter_memory_band", "")
    full = replace(spec, job=replace(spec.job, finetuning="full"))
    assert engine_of("megatron").graded_bands(case_of(full, "megatron")) == ("memory_band", "time_band")
