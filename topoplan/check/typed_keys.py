"""The keys of one configuration as its trainer reads them: with types, and defaults where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from topoplan.check.setup import Configuration
from topoplan.errors import SpecError
from topoplan.specs.source import plain_scalar
from topoplan.units import shown

_TRUE_WORDS = ("yes", "on")


class Keys:
    """Typed access to a configuration. A value of a wrong type raises SpecError, with file and line."""

    def __init__(self, configuration: Configuration, defaults: Mapping[str, Any]) -> None:
        """`defaults` are the trainer's own."""
        self.configuration, self._defaults = configuration, defaults
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

    def given(self, key: str) -> Any:
        """The value that is written; None where it is missing or null."""
        value = self.configuration.get(key)
        if isinstance(value, str):
            if (key,) in self.configuration.source.old_booleans and value.lower() not in ("y", "n"):
                return value.lower() in _TRUE_WORDS  # PyYAML and OmegaConf read these words as booleans
            if self.configuration.from_command:
                return plain_scalar(value)
        return value

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
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**8:
            self.fail(key, f"{key} is {shown(value)}", expected="expected a whole number above zero")
        return value

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

    def text(self, key: str) -> str | None:
        """Text; None where there is none."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"{key} is {shown(value)}", expected="expected text")
        return value
