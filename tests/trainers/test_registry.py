"""Which trainer can run a layout."""

from dataclasses import replace

import pytest

from tests.bundle.samples import QWEN3_8B, make_spec_and_plan
from tests.engines.samples import DENSE, spec_of
from topoplan.bundle.bundle import generate
from topoplan.errors import InputError, LayoutError
from topoplan.layout.layout import BACKENDS, Layout, changed
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import (
    TRAINER_RULE,
    TRAINERS,
    backend_names,
    backends_of,
    choose_trainer,
    has_backend,
    trainer_name,
    trainer_names,
    trainer_refusal,
    written_by,
)

SPEC = spec_of(DENSE, nodes=1)
WHOLE = Layout.of(backend="fsdp2", dp=8, gradient_accumulation_steps=8, distributed_optimizer=False)
SPLIT = changed(WHOLE, dp=4, ulysses=2, gradient_accumulation_steps=16)
MEGATRON = Layout.of(backend="megatron", tp=2, dp=4, gradient_accumulation_steps=16, sequence_parallel=True)


def trainer_of(spec: Spec, layout: Layout, name: str | None = None) -> str | None:
    return choose_trainer(spec, layout, name).name


def test_no_trainer_has_two_ways_for_a_backend() -> None:
    for trainer in TRAINERS:
        taken = [backend for way in trainer.training_paths for backend in way.traits]
        assert len(set(taken)) == len(taken)
        assert set(trainer.backends) <= set(taken)
        assert all(way.packages.keys() == way.traits.keys() for way in trainer.training_paths)
    assert len({trainer.name for trainer in TRAINERS}) == len(TRAINERS)


def test_every_backend_has_a_trainer() -> None:
    assert {backend for backend in BACKENDS if has_backend(backend, None)} == set(BACKENDS)


def test_files_are_written_for_the_cluster_of_the_layout_alone() -> None:
    larger = spec_of(DENSE, nodes=4)
    for way in {id(way): way for trainer in TRAINERS for way in trainer.training_paths}.values():
        layout = changed(WHOLE, backend=next(iter(way.traits)))
        with pytest.raises(LayoutError, match="the layout is for 8 GPUs, and the cluster has 32"):
            way.written(larger, layout)


def test_the_first_that_can_run_a_layout_is_the_default() -> None:
    assert trainer_of(SPEC, WHOLE) == "llamafactory"
    assert trainer_of(SPEC, SPLIT) == "swift"  # LLaMA-Factory does not split sequences
    assert trainer_of(SPEC, SPLIT, "trinity") == "trinity"
    assert trainer_of(SPEC, SPLIT, "llamafactory") is None
    assert trainer_of(SPEC, changed(WHOLE, backend="ddp"), "trinity") is None


def test_the_rule_of_the_trainer_says_what_the_first_one_says() -> None:
    assert trainer_refusal(SPEC, SPLIT) is None
    theirs = replace(SPEC, trainer="llamafactory")
    assert trainer_refusal(theirs, WHOLE) is None
    broken = trainer_refusal(theirs, SPLIT)
    assert broken.equation == "LLaMA-Factory: ulysses 2: LLaMA-Factory's trainer splits no sequences"
    broken = trainer_refusal(replace(SPEC, trainer="trinity"), changed(WHOLE, backend="ddp"))
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
    # A layout that no trainer can run is not ranked, unlike in full fine-tuning.
    short = replace(lora, job=replace(lora.job, samples=5))
    assert trainer_of(short, MEGATRON) is None
    assert trainer_refusal(short, MEGATRON) is not None
    assert backends_of(None, "lora") == backend_names("all", None, finetuning="lora") == backends_of("swift", "lora")
    assert backends_of("llamafactory", "lora")[0] == "mca"


@pytest.mark.parametrize("name", [None, *trainer_names()])
def test_all_is_what_the_trainer_has(name: str | None) -> None:
    assert backend_names("all", name) == backends_of(name)
    assert all(has_backend(backend, name) for backend in backends_of(name))


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
    assert (refusal.rule, refusal.fix) == (TRAINER_RULE, "set finetuning: qlora, or leave it out")
    assert refusal.equation.startswith("LLaMA-Factory: quantization_bit 8 with finetuning lora")
    assert trainer_refusal(spec_of(DENSE, nodes=1, finetuning="lora"), layout) is None


def test_llamafactory_is_the_default_wherever_it_can_be_written() -> None:
    for backend in ("mca", "ddp", "deepspeed", "fsdp2"):
        trainer, way = written_by(backend)
        assert trainer.name == "llamafactory"
        assert backend in way.backends


def test_the_trainer_by_its_name_writes_what_the_default_writes() -> None:
    spec, plan = make_spec_and_plan(model=QWEN3_8B, backend="ddp")
    assert generate(spec, plan, None, "llamafactory") == generate(spec, plan)


def test_what_cannot_be_written_is_refused_with_what_can() -> None:
    with pytest.raises(LayoutError, match="no bundle can be written for the backend 'nothing'; expected ddp or"):
        written_by("nothing")
    with pytest.raises(LayoutError, match=r"no trinity bundle .* 'mca'; it takes --trainer llamafactory"):
        written_by("mca", "trinity")
    with pytest.raises(InputError, match="'lamafactory' is not a trainer; expected llamafactory, swift or trinity"):
        written_by("ddp", "lamafactory")


def test_a_name_is_a_trainers_or_none() -> None:
    assert trainer_name(None) is None
    assert trainer_name("swift") == "swift"
    with pytest.raises(InputError, match="--trainer: 7 is not a trainer"):
        trainer_name(7, "--trainer")
