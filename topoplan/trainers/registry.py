"""The trainers that files are written for, and which of them can run a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from topoplan.engines.rule import Broken
from topoplan.errors import InputError, LayoutError, listed, nearest
from topoplan.layout.layout import SHARDED_BACKENDS, Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory import mca_refusals as mca
from topoplan.trainers.llamafactory import plain_refusals as llamafactory
from topoplan.trainers.swift import refusals as swift
from topoplan.trainers.trinity import refusals as trinity

TrainerName = Literal["llamafactory", "swift", "trinity"]
"""As `--trainer` takes them."""

TRAINER_NAMES: tuple[TrainerName, ...] = get_args(TrainerName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer, with some of its backends."""

    name: TrainerName
    title: str
    packages: Mapping[str, tuple[str, ...]]
    """Backend -> what it takes beside PyTorch and the trainer itself."""
    check: Callable[[Spec, Layout], None]
    """Raises InputError for what it refuses, silently ignores or trains otherwise than planned."""

    @property
    def backends(self) -> tuple[str, ...]:
        """What it can train with."""
        return tuple(self.packages)


_SHARDED = {"ddp": (), "deepspeed": ("DeepSpeed",), "fsdp2": ()}
_BRIDGE = ("megatron-core", "mcore-bridge", "Transformer Engine")

TRAINERS = (
    Trainer(
        name="llamafactory",
        title="LLaMA-Factory",
        packages={"mca": ("megatron-core", "mcore_adapter", "Transformer Engine")},
        check=mca.check_layout,
    ),
    Trainer(name="llamafactory", title="LLaMA-Factory", packages=_SHARDED, check=llamafactory.check_plain),
    Trainer(name="swift", title="ms-swift", packages=_SHARDED, check=swift.check_sharded),
    Trainer(name="swift", title="ms-swift", packages={"megatron": _BRIDGE, "mca": _BRIDGE}, check=swift.check_megatron),
    Trainer(name="trinity", title="Trinity-RFT", packages={"fsdp2": ("verl", "Ray")}, check=trinity.check_trinity),
)
"""The first one that can run a layout is the one that it is written for, where nobody says."""


def trainer_name(name: Any, where: str = "") -> TrainerName | None:
    """`name`, where it is the name of a trainer or None; else raise InputError."""
    for trainer in TRAINER_NAMES:
        if name == trainer:
            return trainer
    if name is None:
        return None
    raise InputError(
        f"{name!r} is not a trainer",
        where=where,
        expected=f"expected {listed(TRAINER_NAMES, 'or')}",
        remedy=nearest(name, TRAINER_NAMES) if isinstance(name, str) else "",
    )


def title_of(name: TrainerName) -> str:
    """The name as its makers write it."""
    return next(trainer.title for trainer in TRAINERS if trainer.name == name)


def backend_names(
    text: str, trainer: TrainerName | None, where: str = "", *, finetuning: str = "full"
) -> tuple[str, ...]:
    """`all`, or names with commas between them. Raises LayoutError for an unknown one, or one that a trainer lacks."""
    if text.strip() == "all":
        return backends_of(trainer, finetuning)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    known = sorted({backend for one in TRAINERS if trainer in (None, one.name) for backend in one.backends})
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


def trainers_of(backend: str, name: str | None = None) -> tuple[Trainer, ...]:
    """Those with a backend; of one name where it is given."""
    return tuple(one for one in TRAINERS if backend in one.backends and name in (None, one.name))


def backends_of(name: str | None, finetuning: str = "full") -> tuple[str, ...]:
    """What a trainer, or any of them, can be searched for: Megatron first, in the trainer's own form.

    Where nobody names one, Megatron is LLaMA-Factory's; of adapters ms-swift's, as only that has them.
    """
    if name == "llamafactory" or (name is None and finetuning != "lora"):
        return ("mca", *SHARDED_BACKENDS)
    if name in ("swift", None):
        return ("megatron", *SHARDED_BACKENDS)
    return tuple(backend for one in TRAINERS if one.name == name for backend in one.backends)


def refusals(spec: Spec, layout: Layout, name: str | None = None) -> Iterator[tuple[Trainer, InputError | None]]:
    """Every trainer with the layout's backend, and why it cannot run it; None where it can."""
    for trainer in trainers_of(layout.backend, name):
        try:
            trainer.check(spec, layout)
        except InputError as error:
            yield trainer, error
        else:
            yield trainer, None


def able_trainer(spec: Spec, layout: Layout, name: str | None = None) -> Trainer | None:
    """The first one that can run a layout; None where there is none."""
    return next((trainer for trainer, error in refusals(spec, layout, name) if error is None), None)


def trainer_of(spec: Spec, layout: Layout, name: str | None = None) -> TrainerName | None:
    """The trainer that a layout is written for; None where there is none."""
    trainer = able_trainer(spec, layout, name)
    return trainer.name if trainer else None


def trainer_refusal(spec: Spec, layout: Layout) -> Broken | None:
    """What the first trainer says against a layout, and what would help; None where one can run it."""
    # Layouts of the backend megatron are predicted for trainers that no files are written for, too. Adapters are
    # predicted as ms-swift's are.
    if spec.trainer is None and layout.backend == "megatron" and spec.job.finetuning == "full":
        return None
    said = list(refusals(spec, layout, spec.trainer))
    if any(error is None for _, error in said):
        return None
    for trainer, error in said:
        if error is not None:
            return Broken(TRAINER_RULE, f"{trainer.title}: {error.what}", error.remedy or _OTHERS)
    return Broken(TRAINER_RULE, f"{spec.trainer} has no backend {layout.backend}", _OTHERS)


TRAINER_RULE = "trainer"
"""Name of the rule that some trainer, or the spec's where it names one, can run the layout."""
_OTHERS = "take another layout, or another trainer"
