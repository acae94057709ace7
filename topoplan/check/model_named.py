"""Which model a configuration means: one of the catalog, or a directory that may be on another machine."""

from __future__ import annotations

import re
from pathlib import Path

from topoplan import catalog
from topoplan.specs.model import Model
from topoplan.specs.model_source import load_model
from topoplan.specs.source import below

_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)")
"""A directory of the Hugging Face hub's cache."""


def named_model(reference: str, *, base: Path, default_positions: int | None = None) -> tuple[Model, str]:
    """The model, and a sentence on what was assumed to find it; empty where nothing was.

    In this order: a name of the catalog, a directory or file on this machine (a relative one below the working
    directory or `base`), a path whose end is a name of the catalog, a model of the Hugging Face hub. Raises ModelError.
    """
    if catalog.knows_model(reference):
        return catalog.model(reference), ""
    if (cached := _HUB_CACHE.search(reference)) and catalog.knows_model(name := "/".join(cached.groups())):
        return catalog.model(name), ""
    for directory in (Path.cwd(), base):
        if _holds_model(below(directory, reference)):
            return load_model(reference, base=directory, default_positions=default_positions), ""
    parts = [part for part in reference.split("/") if part]
    for name in ("/".join(parts[-2:]), parts[-1] if parts else ""):
        if len(parts) > 1 and catalog.knows_model(name):
            model = catalog.model(name)
            return model, f"{reference} is taken for {model.name}, by the end of its path"
    return load_model(reference, base=Path.cwd(), default_positions=default_positions), ""


def _holds_model(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file())
    except (OSError, ValueError):
        return False
