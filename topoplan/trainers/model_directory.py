"""Where the model lies on the nodes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from topoplan.specs.model import Model

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def model_directory(model: Model) -> str:
    """Where the model lies on every node: its own directory, or below the working directory for a hub id."""
    if model.config_path is not None:
        path = PurePosixPath(model.config_path)
        return str(path.parent if path.name == "config.json" else path)
    return str(PurePosixPath("models", model.name))


def is_hub_id(name: str) -> bool:
    """True for `org/name`, an id of the hub, which no trainer on Megatron loads by itself."""
    return _HUB_ID.fullmatch(name) is not None
