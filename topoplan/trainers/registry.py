"""The trainers that files are written for, and what they say of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from topoplan.engines.rule import Broken
from topoplan.errors import InputError, LayoutError, SpecError, listed, nearest
from topoplan.layout.layout import Layout
from topoplan.on_demand import OnDemand
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.specs.traits import Traits
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.requirements import environment_warnings
from topoplan.trainers.shared_refusals import missing_precision
from topoplan.trainers.trainer import Trainer, Way
from topoplan.trainers.traits import MEGATRON

TRAINERS: Sequence[Trainer] = OnDemand(
    "topoplan.trainers.llamafactory.trainer:LLAMA_FACTORY",
    "topoplan.trainers.swift.trainer:MS_SWIFT",
    "topoplan.trainers.trinity.trainer:TRINITY_RFT",
)
"""The first one that can run a layout is the one that it is written for, where nobody says."""

TRAINER_RULE = "trainer"
"""Name of the rule that some trainer, or the spec's where it names one, can run the layout."""
_OTHERS = "take another layout, or another trainer"


# Names ---------------------------------------------------------------------------------------------------------------


def trainer_names() -> tuple[str, ...]:
    """As `--trainer` takes them."""
    return tuple(trainer.name for trainer in TRAINERS)


def trainer_named(name: str) -> Trainer:
    """The trainer of that name."""
    return next(trainer for trainer in TRAINERS if trainer.name == name)


def trainer_name(name: Any, where: str = "") -> str | None:
    """`name`, where it is the name of a trainer or None; else raise InputError."""
    if name is None or any(name == trainer.name for trainer in TRAINERS):
        return name  # type: ignore[no-any-return]
    raise InputError(
        f"{name!r} is not a trainer",
        where=where,
        expected=f"expected {listed(trainer_names(), 'or')}",
        remedy=nearest(name, trainer_names()) if isinstance(name, str) else "",
    )


def backend_names(text: str, trainer: str | None, where: str = "", *, finetuning: str = "full") -> tuple[str, ...]:
    """`all`, or names with commas between them. Raises LayoutError for an unknown one, or one that a trainer lacks."""
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
    return sorted({backend for _, way in _ways(trainer) for backend in way.traits})


def backends_of(name: str | None, finetuning: str = "full") -> tuple[str, ...]:
    """What is searched for a trainer: Megatron first, where it has it; without a name that of the usual one."""
    return next(one for one in TRAINERS if one.name == name or (name is None and finetuning in one.usual_for)).backends


# Who can run what ----------------------------------------------------------------------------------------------------


def _ways(name: str | None) -> Iterator[tuple[Trainer, Way]]:
    yield from ((trainer, way) for trainer in TRAINERS if name in (None, trainer.name) for way in trainer.ways)


def _ways_of(backend: str, name: str | None = None) -> Iterator[tuple[Trainer, Way]]:
    """Those with a backend; of one trainer where it is named."""
    return ((trainer, way) for trainer, way in _ways(name) if backend in way.traits)


def has_way(backend: str, name: str | None) -> bool:
    """A trainer, or any where it is None, has a backend."""
    return any(True for _ in _ways_of(backend, name))


def way_of(backend: str, name: str | None = None) -> Way:
    """How a backend is run where nobody says otherwise: by the trainer of that name, if it has it, else the first."""
    _, way = next(_ways_of(backend, name), None) or next(_ways_of(backend))
    return way


def traits_of(backend: str, name: str | None) -> Traits:
    """How a backend's trainer computes; the one that was asked for, where several have the backend.

    A layout of backend megatron that no trainer is named for is one of Megatron-LM's own loop.
    """
    if name is None and backend == MEGATRON.name:
        return MEGATRON
    return way_of(backend, name).traits[backend]


def steps_of(job: Job, backend: str, name: str | None) -> int | None:
    """Optimizer steps of a job as the trainer counts them; None where the spec does not say how many samples."""
    return way_of(backend, name).steps(job, job.trainer)


def job_refusals(spec: Spec, backend: str) -> Iterator[Refusal]:
    """Why no layout of a backend would help a job."""
    yield from way_of(backend).job_refusals(spec)
    yield from missing_precision(spec)
    yield from _foreign_profile(spec, backend)


def versions_of(spec: Spec, backend: str, trainer: str | None) -> dict[str, str]:
    """Package -> version, as far as they are known: those that the trainer's files are for, and those of the hosts."""
    written = way_of(backend, trainer).versions() if trainer else {}
    words = {name: " or ".join(found) if isinstance(found, list) else str(found) for name, found in written.items()}
    return {**words, **spec.cluster.software}


def _foreign_profile(spec: Spec, backend: str) -> Iterator[Refusal]:
    """Constants that were measured with another trainer, or with other versions of its packages."""
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
    """Why a job is not even predicted under a backend: of a file, whose own trainer runs it, for its profile alone."""
    if not is_of_file:
        yield from (one for one in way_of(backend).job_refusals(spec) if not one.is_predicted)
    yield from _foreign_profile(spec, backend)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who runs a layout."""

    trainer: Trainer | None
    """The first one that can; None where there is none."""
    refused: tuple[Trainer, Refusal] | None
    """What the first one says that cannot."""

    @property
    def name(self) -> str | None:
        """Of the trainer."""
        return self.trainer.name if self.trainer else None


def verdict(spec: Spec, layout: Layout, name: str | None = None) -> Verdict:
    """What the trainers say of a layout; each is asked once, until one can run it."""
    said = None
    for trainer, way in _ways_of(layout.backend, name):
        refusal = next(way.refusals(spec, layout), None)
        if refusal is None:
            return Verdict(trainer, said)
        said = said or (trainer, refusal)
    return Verdict(None, said)


def caveats_of(spec: Spec, layout: Layout, trainer: Trainer | None) -> tuple[str, ...]:
    """Known trouble of a layout with the trainer that runs it: of its packages, and of what it writes."""
    if trainer is None or (way := trainer.way(layout.backend)) is None:
        return ("none of the trainers that files are written for can run it",)
    return (
        *way.model_warnings(spec.model),
        *environment_warnings(spec, layout, trainer.versions),
        *way.caveats(spec, layout),
    )


def is_for_others(spec: Spec, layout: Layout) -> bool:
    """Megatron-LM's own layouts are predicted for trainers that no files are written for, too.

    Adapters are predicted as ms-swift's are.
    """
    return spec.trainer is None and layout.backend == "megatron" and spec.job.finetuning == "full"


def broken_by(spec: Spec, layout: Layout, said: Verdict) -> Broken | None:
    """A verdict as the rule that some trainer can run a layout; None where one can."""
    if said.trainer is not None:
        return None
    if said.refused is None:
        return Broken(TRAINER_RULE, f"{spec.trainer} has no backend {layout.backend}", _OTHERS)
    trainer, refusal = said.refused
    return Broken(TRAINER_RULE, f"{trainer.title}: {refusal.what}", refusal.remedy or _OTHERS)


def trainer_refusal(spec: Spec, layout: Layout) -> Broken | None:
    """What the first trainer says against a layout, and what would help; None where one can run it."""
    if is_for_others(spec, layout):
        return None
    return broken_by(spec, layout, verdict(spec, layout, spec.trainer))


# Who writes what -----------------------------------------------------------------------------------------------------


def written_by(backend: str, name: str | None = None) -> tuple[Trainer, Way]:
    """The trainer that writes files for a backend; without a name the first one.

    Raises InputError for an unknown trainer, LayoutError for a backend that it cannot train with.
    """
    name = trainer_name(name)
    if able := next(_ways_of(backend, name), None):
        return able
    others = list(_ways_of(backend))
    if not others:
        expected = f"expected {' or '.join(_known_backends())}"
        raise LayoutError(f"no bundle can be written for the backend {backend!r}", expected=expected)
    whom = [f"--trainer {trainer.name}" for trainer, _ in others]
    raise LayoutError(
        f"no {name} bundle can be written for the backend {backend!r}", remedy=f"it takes {' or '.join(whom)}"
    )


def writer_of(spec: Spec, layout: Layout, name: str | None = None) -> tuple[Trainer, Way]:
    """The same; without a name the first one that can run the layout, if there is one.

    Raises SpecError for a job that is predicted, and that no files are written for.
    """
    job = spec.job
    for key, is_written in (
        ("reference_forwards", job.forwards_beside == int(job.stage == "dpo")),
        ("num_labels", not job.num_labels),
    ):
        if not is_written:
            what = f"{key} {getattr(job, key)} is predicted, and no trainer's files are written for it yet"
            raise SpecError(what, where=f"{spec.path}: job.{key}" if spec.path else f"job.{key}", remedy="leave it out")
    return written_by(layout.backend, name or verdict(spec, layout).name)
