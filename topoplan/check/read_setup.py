"""Stand-in until the reader is merged: one YAML file, or parts, as LLaMA-Factory configurations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from topoplan.check.parts import Part
from topoplan.check.setup import Configuration, Setup
from topoplan.specs.source import parse_source, read_text


def read_setup(paths: Sequence[str]) -> Setup:
    """What the files hold."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += [path / "train.yaml"] if path.is_dir() else [path]
    return setup_of(
        [
            Part(
                kind="shell" if path.suffix == ".sh" else "json" if path.suffix == ".json" else "yaml",
                name=str(path),
                text=read_text(path),
            )
            for path in files
        ]
    )


def setup_of(parts: Iterable[Part]) -> Setup:
    """What these parts hold."""
    parts = tuple(parts)
    return Setup(
        parts=parts,
        configurations=tuple(
            Configuration(trainer="llamafactory", part=part, source=parse_source(part.text, name=part.name))
            for part in parts
            if part.kind == "yaml"
        ),
    )
