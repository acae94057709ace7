"""The trainers that files can be written for, and which of them can run a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from topoplan.engines.rule import Broken
from topoplan.errors import InputError, LayoutError, SpecError, listed, nearest
from topoplan.layout.layout import Layout
from topoplan.on_demand import OnDemand
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.specs.traits import Traits
from topoplan.trainers.refusal import Refusal, missing_precision
from topoplan.trainers.requirements import environment_warnings, stopping_faults
from topoplan.trainers.trainer import Trainer, TrainingPath
from topoplan.trainers.traits import MEGATRON

TRAINERS: Sequence[Trainer] = OnDemand(
    "topoplan.trainers.llamafactory.trainer:LLAMA_FACTORY",
    "topoplan.trainers.swift.trainer:MS_SWIFT",
    "topoplan.trainers.trinity.trainer:TRINITY_RFT",
)
"""In order of preference: if the user names no trainer, a layout is written for the first one that can run it."""

TRAINER_RULE = "trainer"
"""Name of the rule that some trainer, or the one that the spec names, must be able to run the layout."""
_OTHERS = "take another layout, or another trainer"


# Names ---------------------------------------------------------------------------------------------------------------


def trainer_names() -> tuple[str, ...]:
    """Return the names that `--trainer` takes."""
    return tuple(trainer.name for trainer in TRAINERS)


def trainer_named(name: str) -> Trainer:
    """Return the trainer of that name."""
    return next(trainer for trainer in TRAINERS if trainer.name == name)


def trainer_name(name: Any, where: str = "") -> str | None:
    """Return `name` if it is None or the name of a trainer; raise InputError otherwise."""
    if name is None or any(name == trainer.name for trainer in TRAINERS):
        return name  # type: ignore[no-any-return]
    raise InputError(
        f"{name!r} is not a trainer",
        where=where,
        expected=f"expected {listed(trainer_names(), 'or')}",
        remedy=nearest(name, trainer_names()) if isinstance(name, str) else "",
    )


def backend_names(text: str, trainer: str | None, where: str = "", *, finetuning: str = "full") -> tuple[str, ...]:
    """Parse `all` or comma-separated backends. Raises LayoutError for one that is unknown or that the trainer lacks."""
    if text.strip() == "all":
        return backends_of(trainer, finetuning)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    known = _known_backends(trainer)
    for name in names:
        if name not in known:
            whose = f" of {trainer}" if trainer else ""
            raise LayoutError(
                f"{name!r} is not a backend{whose}",
                where=where,
                expected=f"expected all, or some of {', '.join(known)}",
                remedy=nearest(name, known),
            )
    return names


def _known_backends(trainer: str | None = None) -> list[str]:
    return sorted({backend for _, path in _training_paths(trainer) for backend in path.traits})


def backends_of(name: str | None, finetuning: str = "full") -> tuple[str, ...]:
    """Return the backends to search for a trainer, Megatron first; for None, those of the default trainer.

    Raises InputError for an unknown trainer.
    """
    trainer_name(name, "trained_by")
    return next(one for one in TRAINERS if one.name == name or (name is None and finetuning in one.usual_for)).backends


# Who can run what ----------------------------------------------------------------------------------------------------


def _training_paths(name: str | None) -> Iterator[tuple[Trainer, TrainingPath]]:
    yield from (
        (trainer, path) for trainer in TRAINERS if name in (None, trainer.name) for path in trainer.training_paths
    )


def _training_paths_of(backend: str, name: str | None = None) -> Iterator[tuple[Trainer, TrainingPath]]:
    """Yield the trainers with a backend and their training paths for it; only the named trainer if one is named."""
    return ((trainer, path) for trainer, path in _training_paths(name) if backend in path.traits)


def has_backend(backend: str, name: str | None) -> bool:
    """Whether the named trainer, or any trainer for None, has a backend."""
    return any(True for _ in _training_paths_of(backend, name))


def training_path_of(backend: str, name: str | None = None) -> TrainingPath:
    """Return the training path for a backend: the named trainer's if it has one, else that of the first trainer."""
    _, path = next(_training_paths_of(backend, name), None) or next(_training_paths_of(backend))
    return path


def traits_of(spec: Spec, backend: str) -> Traits:
    """Return how the trainer of a spec computes under a backend; without one, the trainer that `is_for_others` says."""
    if is_for_others(spec, backend):
        return MEGATRON
    return training_path_of(backend, spec.trainer).traits[backend]


def steps_of(job: Job, backend: str, name: str | None) -> int | None:
    """Return the optimizer steps of a job as its trainer counts them; None if the number of samples is unknown."""
    return training_path_of(backend, name).steps(job, job.trainer)


def job_refusals(spec: Spec, backend: str) -> Iterator[Refusal]:
    """Yield the reasons why no layout of a backend can run a job."""
    yield from training_path_of(backend).job_refusals(spec)
    yield from missing_precision(spec)
    yield from _foreign_profile(spec, backend)


def versions_of(spec: Spec, backend: str, trainer: str | None) -> dict[str, str]:
    """Return package -> version as far as known: the versions the trainer's files are for, then those of the hosts."""
    written = training_path_of(backend, trainer).versions() if trainer else {}
    words = {name: " or ".join(found) if isinstance(found, list) else str(found) for name, found in written.items()}
    return {**words, **spec.cluster.software}


def _foreign_profile(spec: Spec, backend: str) -> Iterator[Refusal]:
    """Refuse constants that were measured with another trainer, or with other versions of its packages."""
    own = spec.profile
    if own is None or own.calibrated is None or not own.calibrated.trainer:
        return
    with_it, trainer = own.calibrated, spec.trainer or own.calibrated.trainer
    again = "calibrate with a log of this one, or leave the profile out"
    if trainer != with_it.trainer:
        what = f"the profile was calibrated with {with_it.trainer}, and the trainer is {trainer}"
        yield Refusal("profile", what, where=own.path, remedy=again)
        return
    known = versions_of(spec, backend, trainer)
    for package, version in with_it.versions.items():
        if known.get(package, version) != version:
            what = f"the profile was calibrated with {package} {version}, and this is {known[package]}"
            yield Refusal("profile", what, where=own.path, remedy=again)


def unpredicted(spec: Spec, backend: str, *, is_of_file: bool = False) -> Iterator[Refusal]:
    """Yield the reasons not to predict a job under a backend.

    A job read from a trainer's file already has a trainer that runs it, so only its profile can be a reason.
    """
    if not is_of_file:
        yield from (one for one in training_path_of(backend).job_refusals(spec) if not one.is_predicted)
    yield from _foreign_profile(spec, backend)


class TrainerChoice(NamedTuple):
    """Which trainer runs a layout."""

    trainer: Trainer | None
    """The first trainer that can run the layout; None if there is none."""
    refused: tuple[Trainer, Refusal] | None
    """The first trainer that cannot run the layout, with its refusal."""

    @property
    def name(self) -> str | None:
        """The name of the trainer, if there is one."""
        return self.trainer.name if self.trainer else None


def choose_trainer(spec: Spec, layout: Layout, name: str | None = None) -> TrainerChoice:
    """Ask the trainers in order whether they can run a layout, until one can."""
    said = None
    for trainer, path in _training_paths_of(layout.backend, name):
        refusal = next(path.refusals(spec, layout), None)
        if refusal is None:
            return TrainerChoice(trainer, said)
        said = said or (trainer, refusal)
    return TrainerChoice(None, said)


def caveats_of(spec: Spec, layout: Layout, trainer: Trainer | None) -> tuple[str, ...]:
    """Return the known problems of a layout with its trainer, caused by packages or by the files written for it."""
    if trainer is None or (path := trainer.training_path_for(layout.backend)) is None:
        return ("none of the trainers that files are written for can run it",)
    return (
        *path.model_warnings(spec.model),
        *environment_warnings(spec, layout, trainer.versions),
        *path.caveats(spec, layout),
    )


def is_for_others(spec: Spec, backend: str) -> bool:
    """Whether layouts of a backend may be predicted for a trainer that no files are written for.

    This holds for full fine-tuning with Megatron-LM's layouts, which are then predicted for its own training loop;
    adapters are predicted as in ms-swift.
    """
    return spec.trainer is None and backend == MEGATRON.name and spec.job.finetuning == "full"


def broken_by(spec: Spec, layout: Layout, said: TrainerChoice) -> Broken | None:
    """Return a verdict as a broken rule that some trainer must run the layout; None if one can."""
    if said.trainer is not None:
        return None
    if said.refused is None:
        return Broken(TRAINER_RULE, f"{spec.trainer} has no backend {layout.backend}", _OTHERS)
    trainer, refusal = said.refused
    return Broken(TRAINER_RULE, f"{trainer.title}: {refusal.what}", refusal.remedy or _OTHERS)


def stopped_by(spec: Spec, layout: Layout, name: str | None) -> Broken | None:
    """Return the first fault that stops a layout on the stated versions, with a trainer if any is named, as a broken
    rule, or None."""
    faults = stopping_faults(spec, layout, trainer_named(name).versions if name else None)
    return next((Broken(TRAINER_RULE, f"{fault.when}: {fault.text}", fault.remedy) for fault in faults), None)


def trainer_refusal(spec: Spec, layout: Layout) -> Broken | None:
    """Return why no trainer can run a layout and what would help; None if one can."""
    if is_for_others(spec, layout.backend):
        return None
    return broken_by(spec, layout, choose_trainer(spec, layout, spec.trainer))


# Who writes what -----------------------------------------------------------------------------------------------------


def written_by(backend: str, name: str | None = None) -> tuple[Trainer, TrainingPath]:
    """Return the trainer that writes files for a backend; without a name, the first one that has it.

    Raises InputError for an unknown trainer, and LayoutError for a backend that the trainer lacks.
    """
    name = trainer_name(name)
    if able := next(_training_paths_of(backend, name), None):
        return able
    others = list(_training_paths_of(backend))
    if not others:
        expected = f"expected {' or '.join(_known_backends())}"
        raise LayoutError(f"no bundle can be written for the backend {backend!r}", expected=expected)
    whom = [f"--trainer {trainer.name}" for trainer, _ in others]
    raise LayoutError(
        f"no {name} bundle can be written for the backend {backend!r}", remedy=f"it takes {' or '.join(whom)}"
    )


def writer_of(spec: Spec, layout: Layout, name: str | None = None) -> tuple[Trainer, TrainingPath]:
    """Return the trainer that writes files for a layout: the one named, or that of the spec, or else the first one
    that can run it, if any.

    Raises SpecError for a job that can be predicted but that no files are written for yet, and otherwise as
    `written_by`.
    """
    job = spec.job
    for key, is_written in (
        ("reference_forwards", job.forwards_beside == int(job.stage == "dpo")),
        ("num_labels", not job.num_labels),
    ):
        if not is_written:
            what = f"{key} {getattr(job, key)} is predicted, and no trainer's files are written for it yet"
            raise SpecError(what, where=f"{spec.path}: job.{key}" if spec.path else f"job.{key}", remedy="leave it out")
    return written_by(layout.backend, name or spec.trainer or choose_trainer(spec, layout).name)
