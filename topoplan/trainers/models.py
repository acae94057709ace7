"""Finds the model that a configuration names: a catalog entry, or a directory; and where the nodes have a model."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from topoplan import catalog
from topoplan.errors import InputError
from topoplan.reading.named_files import beside
from topoplan.specs import known
from topoplan.specs.model import Model
from topoplan.specs.model_source import load_model
from topoplan.specs.source import below

if TYPE_CHECKING:
    from topoplan.reading.parts import Part
    from topoplan.reading.setup import Configuration

_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)")
"""A directory of the Hugging Face hub's cache."""
_LONGEST_NAME = 500


def model_of(configuration: Configuration, reference: str, default_positions: int | None = None) -> tuple[Model, str]:
    """Return the model that a configuration refers to, and what was assumed to find it. Raises ModelError."""
    bases = beside(configuration.part)
    return _at_hand(reference, bases, default_positions) or (
        load_model(reference, base=bases[0], default_positions=default_positions),
        "",
    )


def model_at_hand(reference: Any, part: Part) -> Model | None:
    """Return the model that a part names; None if it is not available on this machine."""
    if not isinstance(reference, str) or not 0 < len(reference) <= _LONGEST_NAME:
        return None
    try:
        found = _at_hand(reference, beside(part), None)
    except (InputError, OSError, ValueError):
        return None
    return found[0] if found else None


def is_directory(reference: str, part: Part) -> bool:
    """Whether a reference is a directory on this machine."""
    try:
        return any((base / reference).is_dir() for base in beside(part))
    except (OSError, ValueError):
        return False


def _at_hand(reference: str, bases: tuple[Path, ...], default_positions: int | None) -> tuple[Model, str] | None:
    """Return the model, and a sentence on assumptions, empty if there are none; None if the model is not available.

    Tried in this order: a catalog name, a directory or file on this machine, a path that ends in a catalog name. Raises
    ModelError for a directory that holds something else.
    """
    if catalog.knows_model(reference):
        return known.model(reference), ""
    if (cached := _HUB_CACHE.search(reference)) and catalog.knows_model(name := "/".join(cached.groups())):
        return known.model(name), ""
    for directory in bases:
        if _holds_model(below(directory, reference)):
            return load_model(reference, base=directory, default_positions=default_positions), ""
    parts = [part for part in reference.split("/") if part]
    for name in ("/".join(parts[-2:]), parts[-1] if parts else ""):
        if len(parts) > 1 and catalog.knows_model(name):
            model = known.model(name)
            return model, f"{reference} is taken for {model.name}, by the end of its path"
    return None


def _holds_model(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file())
    except (OSError, ValueError):
        return False


_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def model_directory(model: Model) -> str:
    """Return the model's directory on every node: its own path, or for a hub id one below the working directory."""
    if model.config_path is not None:
        path = PurePosixPath(model.config_path)
        return str(path.parent if path.name == "config.json" else path)
    return str(PurePosixPath("models", model.name))


def is_hub_id(name: str) -> bool:
    """Whether a name is a hub id `org/name`, which no Megatron trainer loads by itself."""
    return _HUB_ID.fullmatch(name) is not None
