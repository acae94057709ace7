"""The table of writers: which trainer can be written files for, and for which backends."""

from __future__ import annotations

from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory import mca, plain
from topoplan.trainers.registry import TrainerName, trainer_name, trainer_of
from topoplan.trainers.swift import writer as swift
from topoplan.trainers.trainer import Writer
from topoplan.trainers.trinity import writer as trinity

WRITERS: tuple[Writer, ...] = (mca.WRITER, plain.WRITER, *swift.WRITERS, trinity.WRITER)
"""The first one that takes a backend is its default."""


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


def writer_of(spec: Spec, layout: Layout, trainer: str | None = None) -> Writer:
    """The same; without a trainer that of the first one that can run the layout, if there is one."""
    return writer_for(layout.backend, trainer or trainer_of(spec, layout))


def default_trainer(backend: str) -> TrainerName:
    """The trainer that is taken where none is asked for. Raises what `writer_for` raises."""
    return writer_for(backend).trainer
