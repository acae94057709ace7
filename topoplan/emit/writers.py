"""The table of writers: which trainer can be written files for, and for which backends."""

from __future__ import annotations

from typing import Any, get_args

from topoplan.emit.llamafactory import mca, plain
from topoplan.emit.swift import writer as swift
from topoplan.emit.trinity import writer as trinity
from topoplan.emit.writer import TrainerName, Writer
from topoplan.errors import InputError, LayoutError, nearest

WRITERS: tuple[Writer, ...] = (mca.WRITER, plain.WRITER, *swift.WRITERS, trinity.WRITER)
"""The first one that takes a backend is its default."""

TRAINERS: tuple[TrainerName, ...] = get_args(TrainerName)
"""What `--trainer` may be."""


def writer_for(backend: str, trainer: str | None = None) -> Writer:
    """The writer of a trainer for a backend; without a trainer the default one.

    Raises InputError for an unknown trainer, LayoutError for a backend that it cannot train with.
    """
    trainer = trainer_name(trainer)
    able = [writer for writer in WRITERS if backend in writer.backends]
    for writer in able:
        if trainer in (None, writer.trainer):
            return writer
    if not able:
        known = sorted({name for writer in WRITERS for name in writer.backends})
        raise LayoutError(
            f"no bundle can be written for the backend {backend!r}", expected=f"expected {' or '.join(known)}"
        )
    whom = [f"--trainer {writer.trainer}" for writer in able]
    raise LayoutError(
        f"no {trainer} bundle can be written for the backend {backend!r}", remedy=f"it takes {' or '.join(whom)}"
    )


def default_trainer(backend: str) -> TrainerName:
    """The trainer that is taken where none is asked for. Raises what `writer_for` raises."""
    return writer_for(backend).trainer


def trainer_name(name: Any, where: str = "") -> TrainerName | None:
    """`name`, where it is the name of a trainer or None; else raise InputError."""
    for trainer in TRAINERS:
        if name == trainer:
            return trainer
    if name is None:
        return None
    raise InputError(
        f"{name!r} is not a trainer",
        where=where,
        expected=f"expected {', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}",
        remedy=nearest(name, TRAINERS) if isinstance(name, str) else "",
    )
