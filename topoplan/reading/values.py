"""Values of a configuration as the trainer interprets them.

The functions accept whatever the file holds; `Keys` knows the trainer's defaults and refuses values of a wrong type.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan.errors import SpecError
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.specs.source import at as at
from topoplan.units import shown

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration

FALSE_WORDS = frozenset({"no", "off", "false", "f", "n", "0"})
_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}
"""Bare words that PyYAML and OmegaConf read as booleans; both read y and n as text."""

_MARKS_OF_A_JOB = ("model_name_or_path", "dataset", "stage", "do_train", "finetuning_type", "template", "output_dir")
MARKS_OF_TRAINING = frozenset(["dataset", "stage", "do_train", "do_eval", "do_predict", "eval_dataset", "output_dir"])


def value_of(configuration: Configuration, key: str, default: Any = None) -> Any:
    """Return the value of a top-level key, reading bare yes and no as YAML 1.1 does, and arguments as argparse does."""
    key = configuration.written(key)
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
    """Return the boolean that YAML 1.1 reads in a bare yes, no, on or off at `path`; None for anything else."""
    if configuration.from_command or path not in configuration.source.old_booleans:
        return None
    value = at(configuration.source.data, path)
    return _YAML_1_1.get(value.lower()) if isinstance(value, str) else None


def flag(configuration: Configuration, key: str, default: bool = False) -> bool:
    """Whether a switch counts as on. In a file any non-empty text counts, even `"false"`."""
    value = value_of(configuration, key)
    if value is None:
        return default
    if configuration.from_command and isinstance(value, str):
        return value.lower() not in FALSE_WORDS
    return bool(value)


def number(configuration: Configuration, key: str) -> float | None:
    """Return the value if it is a finite number."""
    return as_number(value_of(configuration, key))


def whole(configuration: Configuration, key: str, default: int | None = None) -> int | None:
    """Return the value if it is a whole number, `default` if the key is missing or null, None for anything else."""
    value = value_of(configuration, key)
    return default if value is None else as_whole(value)


def words(configuration: Configuration, key: str) -> str | None:
    """Return the value if it is text."""
    value = configuration.get(key)
    return value if isinstance(value, str) else None


def as_number(value: Any) -> float | None:
    """Return a finite number unchanged; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return float(value) if abs(value) < 10**300 else None
    return value if math.isfinite(value) else None


def as_whole(value: Any) -> int | None:
    """Return a whole number as int, 4.0 as 4; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def texts(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in a document with its path."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from texts(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from texts(value, (*path, index))


def is_for_training(configuration: Configuration) -> bool:
    """Whether a LLaMA-Factory configuration is for `train` rather than `export`, `chat` or `api`."""
    keys = configuration.source.data.keys()
    return bool(keys & MARKS_OF_TRAINING) or not keys & {"export_dir", "infer_backend", "adapter_name_or_path"}


def is_complete(configuration: Configuration) -> bool:
    """Whether a LLaMA-Factory configuration is a complete job rather than a few lines to change in one."""
    return not configuration.over_file and sum(key in configuration.source.data for key in _MARKS_OF_A_JOB) >= 2


class NotPredictedError(SpecError):
    """A valid key that changes memory or speed in a way that no formula covers."""

    def __init__(self, key: str, what: str, *, where: str, expected: str = "", remedy: str) -> None:
        """Create the error; `key` locates the finding."""
        super().__init__(what, where=where, expected=expected, remedy=remedy)
        self.key = key


class Keys:
    """Typed access to a configuration. A value of a wrong type raises SpecError with file and line."""

    def __init__(self, configuration: Configuration, defaults: Mapping[str, Any]) -> None:
        """Wrap a configuration, with the trainer's `defaults` for missing keys."""
        self.configuration, self._defaults = configuration, defaults
        self.read: set[str] = set()
        """Keys whose value has been requested."""
        self._additional = self._additional_configs()

    def _additional_configs(self) -> Mapping[str, Any]:
        """Return settings for megatron-core itself, which the adapter uses for keys that are null.

        Source: MCA `models/model_config.py::PretrainedConfig.update_with_args`.
        """
        found = self.configuration.get("additional_configs")
        return found if isinstance(found, Mapping) else {}

    def place(self, key: str) -> str:
        """Return `file:line` of a key."""
        return self.configuration.part.place(self.configuration.line(key))

    def fail(self, key: str, what: str, *, expected: str = "") -> NoReturn:
        """Raise a SpecError at a key."""
        raise SpecError(what, where=self.place(key), expected=expected)

    def not_predicted(self, keys: Sequence[str], what: str = "", *, remedy: str) -> NoReturn:
        """Raise a NotPredictedError for `what`, or for the keys with their values; `remedy` says what is predicted."""
        words = what or " and ".join(f"{key} {shown(self.given(key))}" for key in keys)
        raise NotPredictedError(keys[0], f"{words} is not predicted", where=self.place(keys[0]), remedy=remedy)

    def given(self, key: str) -> Any:
        """Return the value as written; None if it is missing or null."""
        self.read.add(key)
        return value_of(self.configuration, key)

    def value(self, key: str) -> Any:
        """Return the value that the trainer uses."""
        for value in (self.given(key), self._defaults.get(key)):
            if value is not None:
                return value
        return self._additional.get(key)

    def count(self, key: str) -> int | None:
        """Return a whole number above zero; None if neither the file nor the trainer's defaults have one."""
        value = self.value(key)
        if value is None:
            return None
        count = as_whole(value)
        if count is None or not 0 < count < 10**8:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a whole number above zero")
        return count

    def number(self, key: str) -> float | None:
        """Return a number, including notations that YAML 1.1 reads as text, such as 2e-5; None if there is none."""
        value = self.value(key)
        found = as_number(plain_scalar(value) if isinstance(value, str) else value)
        if value is not None and found is None:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a number")
        return found

    def degree(self, key: str) -> int:
        """Return a parallel degree: 1 if the key is absent."""
        return self.count(key) or 1

    def flag(self, key: str) -> bool:
        """Return a boolean. Text counts as true, because the trainers' parsers do not check the type."""
        return bool(self.value(key))

    def fraction(self, key: str) -> float:
        """Return a number from 0 to 1."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a number from 0 to 1")
        return float(value)

    def positive(self, key: str) -> float | None:
        """Return a number above 0; None if there is none."""
        found = self.number(key)
        if found is not None and not 0 < found < float("inf"):
            self.fail(key, f"{key} is {shown(found)}", expected="expected a number above 0")
        return found

    def text(self, key: str) -> str | None:
        """Return text; None if there is none."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"{key} is {shown(value)}", expected="expected text")
        return value


_BOUNDS = {"least": "of at least", "most": "at most", "above": "above", "below": "below"}


def range_missed(bounds: Mapping[str, float] | None, value: Any) -> str:
    """Describe the range that a number misses; empty if it is within its bounds."""
    if bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    missed = {"least": operator.lt, "most": operator.gt, "above": operator.le, "below": operator.ge}
    if not any(missed[word](value, bound) for word, bound in bounds.items()):
        return ""
    return " and ".join(f"{_BOUNDS[word]} {bound}" for word, bound in bounds.items())
