"""Values of a configuration as the trainer takes them.

The functions are calm about whatever the file holds; `Keys` has the trainer's defaults, and refuses a wrong type.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from topoplan.errors import SpecError
from topoplan.reading.setup import Configuration
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.specs.source import at as at
from topoplan.units import shown

FALSE_WORDS = frozenset({"no", "off", "false", "f", "n", "0"})
_YAML_1_1 = {"yes": True, "on": True, "no": False, "off": False}
"""Bare words that PyYAML and OmegaConf read as booleans; y and n stay text there."""

_MARKS_OF_A_JOB = ("model_name_or_path", "dataset", "stage", "do_train", "finetuning_type", "template", "output_dir")
_MARKS_OF_TRAINING = frozenset(["dataset", "stage", "do_train", "do_eval", "do_predict", "eval_dataset", "output_dir"])


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
        return value.lower() not in FALSE_WORDS
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


def is_for_training(configuration: Configuration) -> bool:
    """Whether a LLaMA-Factory configuration is for `train`, and not for `export`, `chat` or `api`."""
    keys = configuration.source.data.keys()
    return bool(keys & _MARKS_OF_TRAINING) or not keys & {"export_dir", "infer_backend", "adapter_name_or_path"}


def is_complete(configuration: Configuration) -> bool:
    """Whether a LLaMA-Factory configuration is a job of its own, not a few lines that show what to change in one."""
    return sum(key in configuration.source.data for key in _MARKS_OF_A_JOB) >= 2


class NotPredictedError(SpecError):
    """A key that changes memory or speed in a way that no formula here has: nothing is wrong with the file."""

    def __init__(self, key: str, what: str, *, where: str) -> None:
        """`key` is where it is said, for the line of the finding."""
        super().__init__(what, where=where)
        self.key = key


class Keys:
    """Typed access to a configuration. A value of a wrong type raises SpecError, with file and line."""

    def __init__(self, configuration: Configuration, defaults: Mapping[str, Any]) -> None:
        """`defaults` are the trainer's own."""
        self.configuration, self._defaults = configuration, defaults
        self.read: set[str] = set()
        """Keys whose value was asked for."""
        self._additional = self._additional_configs()

    def _additional_configs(self) -> Mapping[str, Any]:
        """Settings for megatron-core itself, which the adapter lays under the keys that are left at null.

        Source: MCA `models/model_config.py::PretrainedConfig.update_with_args`.
        """
        found = self.configuration.get("additional_configs")
        return found if isinstance(found, Mapping) else {}

    def place(self, key: str) -> str:
        """`file:line` of a key."""
        return self.configuration.part.place(self.configuration.line(key))

    def fail(self, key: str, what: str, *, expected: str = "") -> NoReturn:
        """Raise a SpecError at a key."""
        raise SpecError(what, where=self.place(key), expected=expected)

    def not_predicted(self, keys: Sequence[str], what: str = "") -> NoReturn:
        """Raise a NotPredictedError: for `what`, or for the keys as they are written."""
        words = what or " and ".join(f"{key} {shown(self.given(key))}" for key in keys)
        raise NotPredictedError(keys[0], f"{words} is not predicted", where=self.place(keys[0]))

    def given(self, key: str) -> Any:
        """The value that is written; None where it is missing or null."""
        self.read.add(key)
        return value_of(self.configuration, key)

    def value(self, key: str) -> Any:
        """The value that the trainer works with."""
        for value in (self.given(key), self._defaults.get(key)):
            if value is not None:
                return value
        return self._additional.get(key)

    def count(self, key: str) -> int | None:
        """A whole number above zero; None where neither the file nor the trainer has one."""
        value = self.value(key)
        if value is None:
            return None
        count = as_whole(value)
        if count is None or not 0 < count < 10**8:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a whole number above zero")
        return count

    def number(self, key: str) -> float | None:
        """A number, also one that YAML 1.1 takes for text, as 2e-5; None where there is none."""
        value = self.value(key)
        found = as_number(plain_scalar(value) if isinstance(value, str) else value)
        if value is not None and found is None:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a number")
        return found

    def degree(self, key: str) -> int:
        """A parallel degree: 1 where it is not given."""
        return self.count(key) or 1

    def flag(self, key: str) -> bool:
        """A switch. Text counts as true, as it does for the trainers' parsers, which do not look at the type."""
        return bool(self.value(key))

    def fraction(self, key: str) -> float:
        """A number from 0 to 1."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a number from 0 to 1")
        return float(value)

    def positive(self, key: str) -> float | None:
        """A number above 0; None where there is none."""
        found = self.number(key)
        if found is not None and not 0 < found < float("inf"):
            self.fail(key, f"{key} is {shown(found)}", expected="expected a number above 0")
        return found

    def text(self, key: str) -> str | None:
        """Text; None where there is none."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"{key} is {shown(value)}", expected="expected text")
        return value


_BOUNDS = {"least": "of at least", "most": "at most", "above": "above", "below": "below"}


def range_missed(bounds: Mapping[str, float] | None, value: Any) -> str:
    """The range that a number is not in, in words; empty where it is."""
    if bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    missed = {"least": operator.lt, "most": operator.gt, "above": operator.le, "below": operator.ge}
    if not any(missed[word](value, bound) for word, bound in bounds.items()):
        return ""
    return " and ".join(f"{_BOUNDS[word]} {bound}" for word, bound in bounds.items())
