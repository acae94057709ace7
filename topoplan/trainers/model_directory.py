"""The location of the model on the nodes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from topoplan.specs.model import Model

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
