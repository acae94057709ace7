"""Values of a Trinity-RFT configuration with what the environment puts into them."""

from __future__ import annotations

from typing import Any

from topoplan.reading import interpolation
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_whole, at
from topoplan.specs.source import KeyPath


def filled(setup: Setup, configuration: Configuration, path: KeyPath) -> Any:
    """A value, filled in from what the scripts set; None where that is not known."""
    data = configuration.source.data
    return interpolation.filled(at(data, path), data, setup.environment)


def filled_count(setup: Setup, configuration: Configuration, path: KeyPath, default: int | None = None) -> int | None:
    """The same where it is a whole number; `default` where nothing is written, None for what is not known."""
    if at(configuration.source.data, path) is None:
        return default
    return as_whole(filled(setup, configuration, path))
