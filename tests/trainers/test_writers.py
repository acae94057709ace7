"""The table of writers."""

from __future__ import annotations

import pytest

from tests.bundle.samples import QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.errors import InputError, LayoutError
from topoplan.trainers.registry import TRAINER_NAMES, trainer_name
from topoplan.trainers.writers import WRITERS, default_trainer, writer_for


def test_llamafactory_is_the_default_wherever_it_can_be_written() -> None:
    for backend in ("mca", "ddp", "deepspeed", "fsdp2"):
        assert default_trainer(backend) == "llamafactory"
        assert backend in writer_for(backend).backends


def test_no_trainer_has_two_writers_for_a_backend() -> None:
    pairs = [(writer.trainer, backend) for writer in WRITERS for backend in writer.backends]
    assert len(set(pairs)) == len(pairs)
    assert {trainer for trainer, _ in pairs} <= set(TRAINER_NAMES)


def test_the_trainer_by_its_name_writes_what_the_default_writes() -> None:
    spec, plan = make_spec_and_plan(model=QWEN3_8B, backend="ddp")
    assert generate(spec, plan, None, "llamafactory") == generate(spec, plan)


def test_what_has_no_writer_is_refused_with_what_has() -> None:
    with pytest.raises(LayoutError, match="no bundle can be written for the backend 'nothing'; expected ddp or"):
        writer_for("nothing")
    with pytest.raises(LayoutError, match=r"no trinity bundle .* 'mca'; it takes --trainer llamafactory"):
        writer_for("mca", "trinity")
    with pytest.raises(InputError, match="'lamafactory' is not a trainer; expected llamafactory, swift or trinity"):
        writer_for("ddp", "lamafactory")


def test_a_name_is_a_trainers_or_none() -> None:
    assert trainer_name(None) is None
    assert trainer_name("swift") == "swift"
    with pytest.raises(InputError, match="--trainer: 7 is not a trainer"):
        trainer_name(7, "--trainer")
