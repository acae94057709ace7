"""Tables of cases that tests read from YAML."""

from pathlib import Path
from typing import Any

import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where there is one: it is ten times as fast, and each worker reads every table."""


def table(path: Path) -> Any:
    """Return the document of a file."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
