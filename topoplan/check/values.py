"""Values of a configuration as the trainer takes them, whatever the file holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.check.setup import Configuration
from topoplan.specs.source import KeyPath, plain_scalar

_FALSE_WORDS = frozenset({"no", "off", "false", "f", "n", "0"})
_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}
"""Bare words that PyYAML and OmegaConf read as booleans; y and n stay text there."""

_MARKS_OF_A_JOB = ("model_name_or_path", "dataset", "stage", "do_train", "finetuning_type", "template", "output_dir")


def value_of(configuration: Configuration, key: str, default: Any = None) -> Any:
    """The value of a key at the top: bare yes and no as YAML 1.1 has them, text of a command as argparse takes it."""
    if key not in configuration.source.data:
        return default
    value = configuration.source.data[key]
    if isinstance(value, str):
        if (word := word_boolean(configuration, (key,))) is not None:
            return word
        if configuration.from_command:
            return plain_scalar(value)
    return value


def word_boolean(configuration: Configuration, path: KeyPath) -> bool | None:
    """What a bare yes, no, on or off at `path` is for a YAML 1.1 reader; None for anything else."""
    if configuration.from_command or path not in configuration.source.old_booleans:
        return None
    value = at(configuration.source.data, path)
    return _YAML_1_1.get(value.lower()) if isinstance(value, str) else None


def flag(configuration: Configuration, key: str, default: bool = False) -> bool:
    """Whether a switch counts as on. In a file any text does, `"false"` too."""
    value = value_of(configuration, key)
    if value is None:
        return default
    if configuration.from_command and isinstance(value, str):
        return value.lower() not in _FALSE_WORDS
    return bool(value)


def number(configuration: Configuration, key: str) -> float | None:
    """The value where it is a finite number."""
    return as_number(value_of(configuration, key))


def whole(configuration: Configuration, key: str, default: int | None = None) -> int | None:
    """The value where it is a whole number; `default` where the key is not there or null, None for anything else."""
    value = value_of(configuration, key)
    return default if value is None else as_whole(value)


def words(configuration: Configuration, key: str) -> str | None:
    """The value where it is text."""
    value = configuration.get(key)
    return value if isinstance(value, str) else None


def as_number(value: Any) -> float | None:
    """A finite number as it is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return float(value) if abs(value) < 10**300 else None
    return value if math.isfinite(value) else None


def as_whole(value: Any) -> int | None:
    """A whole number as it is, 4.0 as 4; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def at(data: Any, path: KeyPath) -> Any:
    """The value at a path, or None."""
    for part in path:
        held = range(len(data)) if isinstance(data, list) else data if isinstance(data, Mapping) else ()
        if part not in held:
            return None
        data = data[part]
    return data


def texts(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text in a document with its path."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from texts(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from texts(value, (*path, index))


def is_complete(configuration: Configuration) -> bool:
    """Whether a LLaMA-Factory configuration is a job of its own, not a few lines that show what to change in one."""
    return sum(key in configuration.source.data for key in _MARKS_OF_A_JOB) >= 2
