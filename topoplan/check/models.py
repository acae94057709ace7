"""Which model a configuration names, as far as that can be told without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from topoplan import catalog
from topoplan.check.parts import Part
from topoplan.errors import InputError
from topoplan.specs.model import Model
from topoplan.specs.model_source import load_model

_LONGEST_NAME = 500


def known_model(reference: Any, part: Part) -> Model | None:
    """The model of that name: of the catalog, a directory on this machine, or a path whose last part the catalog knows.

    Relative paths start at the working directory, as they do for the trainers, or beside the file.
    """
    if not isinstance(reference, str) or not 0 < len(reference) <= _LONGEST_NAME:
        return None
    try:
        if catalog.knows_model(reference):
            return catalog.model(reference)
        for base in (Path(), Path(part.name).parent):
            if (base / reference / "config.json").is_file():
                return load_model(reference, base=base)
        last = reference.rstrip("/").rpartition("/")[2]
        return catalog.model(last) if catalog.knows_model(last) else None
    except (InputError, OSError, ValueError):
        return None


def is_directory(reference: str, part: Part) -> bool:
    """Whether it is a directory on this machine."""
    try:
        return any((base / reference).is_dir() for base in (Path(), Path(part.name).parent))
    except (OSError, ValueError):
        return False
