"""Which trainer can run a layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.samples import DENSE, spec_of
from topoplan.errors import LayoutError
from topoplan.layout.layout import BACKENDS, Layout, changed
from topoplan.trainers.registry import (
    TRAINER_NAMES,
    TRAINER_RULE,
    TRAINERS,
    backend_names,
    backends_of,
    trainer_of,
    trainer_refusal,
    trainers_of,
)
from topoplan.trainers.writers import WRITERS

SPEC = spec_of(DENSE, nodes=1)
WHOLE = Layout.of(backend="fsdp2", dp=8, gradient_accumulation_steps=8, distributed_optimizer=False)
SPLIT = changed(WHOLE, dp=4, ulysses=2, gradient_accumulation_steps=16)
MEGATRON = Layout.of(backend="megatron", tp=2, dp=4, gradient_accumulation_steps=16, sequence_parallel=True)


def test_there_is_a_writer_for_what_a_trainer_can_run_and_no_other() -> None:
    runs = {(trainer.name, backend) for trainer in TRAINERS for backend in trainer.backends}
    assert runs == {(writer.trainer, backend) for writer in WRITERS for backend in writer.backends}


def test_every_backend_has_a_trainer() -> None:
    assert {backend for backend in BACKENDS if trainers_of(backend)} == set(BACKENDS)


def test_the_first_that_can_run_a_layout_is_the_default() -> None:
    assert trainer_of(SPEC, WHOLE) == "llamafactory"
    assert trainer_of(SPEC, SPLIT) == "swift"  # LLaMA-Factory splits no sequences
    assert trainer_of(SPEC, SPLIT, "trinity") == "trinity"
    assert trainer_of(SPEC, SPLIT, "llamafactory") is None
    assert trainer_of(SPEC, changed(WHOLE, backend="ddp"), "trinity") is None


def test_the_rule_of_the_trainer_says_what_the_first_one_says() -> None:
    assert trainer_refusal(SPEC, SPLIT) is None
    theirs = replace(SPEC, trainer="llamafactory")
    assert trainer_refusal(theirs, WHOLE) is None
    broken = trainer_refusal(theirs, SPLIT)
    assert broken is not None
    assert broken.equation == "LLaMA-Factory: ulysses 2: LLaMA-Factory's trainer splits no sequences"
    broken = trainer_refusal(replace(SPEC, trainer="trinity"), changed(WHOLE, backend="ddp"))
    assert broken is not None
    assert broken.equation == "trinity has no backend ddp"


def test_megatron_without_a_trainer_is_predicted_for_those_that_have_no_writer() -> None:
    pure = replace(SPEC, job=replace(SPEC.job, stage="kto"))
    assert trainer_of(pure, MEGATRON) is None
    assert trainer_refusal(pure, MEGATRON) is None
    assert trainer_refusal(replace(pure, trainer="swift"), MEGATRON) is not None


def test_megatron_with_adapters_is_ms_swifts_and_nobody_elses() -> None:
    lora = replace(SPEC, job=replace(SPEC.job, finetuning="lora"))
    assert trainer_of(lora, MEGATRON) == "swift"
    assert trainer_refusal(lora, MEGATRON) is None
    # What no trainer can run is not ranked, as it is with all weights.
    short = replace(lora, job=replace(lora.job, samples=5))
    assert trainer_of(short, MEGATRON) is None
    assert trainer_refusal(short, MEGATRON) is not None
    assert backends_of(None, "lora") == backend_names("all", None, finetuning="lora") == backends_of("swift", "lora")
    assert backends_of("llamafactory", "lora")[0] == "mca"


@pytest.mark.parametrize("name", [None, *TRAINER_NAMES])
def test_all_is_what_the_trainer_has(name: str | None) -> None:
    assert backend_names("all", name) == backends_of(name)  # type: ignore[arg-type]
    assert all(trainers_of(backend, name) for backend in backends_of(name))


def test_backends_are_named_one_by_one_too() -> None:
    assert backend_names("fsdp2, mca,fsdp2", None) == ("fsdp2", "mca")
    with pytest.raises(LayoutError, match=r"^--backend: 'fsdp' is not a backend; expected all, or .*did you mean"):
        backend_names("fsdp", None, "--backend")
    with pytest.raises(LayoutError, match="'mca' is not a backend of trinity; expected all, or some of fsdp2"):
        backend_names("mca", "trinity")


def test_a_refusal_says_what_would_help_in_the_trainers_own_words() -> None:
    spec = spec_of(DENSE, nodes=1, finetuning="lora", quantization_bit=8)
    layout = changed(WHOLE, backend="ddp")
    refusal = trainer_refusal(spec, layout)
    assert refusal is not None
    assert (refusal.rule, refusal.fix) == (TRAINER_RULE, "set finetuning: qlora, or leave it out")
    assert refusal.equation.startswith("LLaMA-Factory: quantization_bit 8 with finetuning lora")
    assert trainer_refusal(spec_of(DENSE, nodes=1, finetuning="lora"), layout) is None
