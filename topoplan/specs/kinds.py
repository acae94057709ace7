"""The kinds of value that a spec may hold: what each accepts, and how it words a refusal.

A kind is part of a field's annotation, `Annotated[int, Count(1, 8)]`, where pydantic finds it. Pydantic does the
checks it can, as a core schema; the kind adds the messages. Pydantic itself is imported only when a value is read, so
that the classes of a job or a model are cheap to import where no file is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from topoplan import units
from topoplan.catalog import architectures
from topoplan.errors import InputError, SpecError, UnitError, listed, nearest
from topoplan.specs.scalars import NOT_DECIMAL, as_fraction, as_number, as_switch, as_whole
from topoplan.units import quote, shown

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from pydantic_core.core_schema import ValidationInfo

_Value = TypeVar("_Value")
_BEYOND = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "multiple_of"}
"""Pydantic's error types for a value of the right type that is out of range."""
KEEP_INTEGERS = "keep integers"
"""Validation context that keeps a whole number an int even where the field is a float."""


Unit = tuple[Callable[[object], float], str]
"""The parser of a quantity, and its pattern for JSON Schema."""
BYTES: Unit = (units.parse_bytes, units.AMOUNT_PATTERN)
RATE: Unit = (units.parse_rate, units.RATE_PATTERN)
FLOPS: Unit = (units.parse_flops, units.FLOPS_PATTERN)
SECONDS: Unit = (units.parse_seconds, units.SECONDS_PATTERN)


class KeyedError(SpecError):
    """A mistake at one key of a block that is validated as a single value."""

    def __init__(self, key: object, what: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(what, expected=expected, remedy=remedy)
        self.key = quote(key)


def not_among(value: object, words: Mapping[str, Any] | tuple[str, ...]) -> SpecError:
    """Return the error for a value that is not one of the allowed words."""
    return SpecError(
        f"{shown(value)} is not a choice",
        expected=f"expected {listed(tuple(words), 'or')}",
        remedy=nearest(value, words) if isinstance(value, str) else "",
    )


class Kind:
    """What a value may be: a pydantic core schema, and the messages for values that it refuses."""

    def __init__(
        self,
        core: Mapping[str, Any],
        noun: str,
        expected: str,
        *,
        tidy: Callable[[Any], Any] | None = None,
        described: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`noun` completes the message for a value of another type ("is not ..."); `expected` is what should be there.

        `tidy` normalizes a value before pydantic sees it, and may raise an InputError without a location.
        `described` is the JSON Schema, if it differs from that of the core schema.
        """
        self._core, self._noun, self.expected = core, noun, f"expected {expected}"
        self._tidy, self._described = tidy, described

    def _check(self, value: Any, validate: Callable[[Any], Any]) -> Any:
        """Return the value in base units. `validate` is pydantic's part. Raises an InputError without a location."""
        from pydantic_core import ValidationError

        try:
            return validate(self._tidy(value) if self._tidy else value)
        except ValidationError as report:
            mistake = report.errors(include_url=False)[0]
            raise self._refusal(value, mistake["type"], mistake["input"]) from None

    def _refusal(self, value: Any, problem: str, part: Any) -> SpecError:
        """Return the error for a value that pydantic refused as a `problem`; `part` is the bad item of a list."""
        what = "out of range" if problem in _BEYOND else f"not {self._noun}"
        is_odd = isinstance(value, str) and NOT_DECIMAL.fullmatch(value.strip())
        remedy = "write it in decimal digits, without a leading zero" if is_odd else ""
        return SpecError(f"{shown(value)} is {what}", expected=self.expected, remedy=remedy)

    def _validate(self, value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
        from pydantic_core import PydanticCustomError

        try:
            found = self._check(value, validate)
        except InputError as error:
            kind = "unit" if isinstance(error, UnitError) else "value"
            key = error.key if isinstance(error, KeyedError) else ""
            parts = {"what": error.what, "expected": error.expected, "remedy": error.remedy, "key": key}
            raise PydanticCustomError(kind, "{what}", parts) from None
        is_kept = info.context == KEEP_INTEGERS and type(value) is int and found == value
        return value if is_kept else found

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        function = {"type": "with-info", "function": self._validate}
        checked = {"type": "function-wrap", "function": function, "schema": self._core}
        is_optional = NoneType in get_args(source)
        return {"type": "nullable", "schema": checked} if is_optional else checked

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if self._described is None:
            return handler(schema)
        return dict(self._described() if callable(self._described) else self._described)


class Checked(Kind):
    """A value checked by a function of this package, with its JSON Schema."""

    def __init__(
        self, function: Callable[[Any], Any], described: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    ) -> None:
        super().__init__({"type": "any"}, "", "", tidy=function, described=described)


class Count(Kind):
    """A whole number in a range, `1e5` included."""

    def __init__(self, lowest: int, highest: int) -> None:
        core = {"type": "int", "strict": True, "ge": lowest, "le": highest}
        super().__init__(core, "a whole number", f"a whole number from {lowest} to {highest}", tidy=as_whole)


class Tokens(Count):
    """A number of tokens. `32k` means 32 x 1024 and `1M` means 1024 x 1024, as context lengths are named."""

    def __init__(self, lowest: int, highest: int) -> None:
        super().__init__(lowest, highest)
        self._tidy = in_thousands

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": r"^[0-9]+[kKmM]$"}]}


def in_thousands(value: Any) -> Any:
    """Parse a number of tokens, with suffixes such as `32k`; other values go to `as_whole`."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,9})([kKmM])", value.strip())):
        return int(match[1]) * (1024 if match[2] in "kK" else 1024**2)
    return as_whole(value)


class Number(Kind):
    """A number in a range. The default range has ample room for real figures and keeps their products finite."""

    def __init__(self, lowest: float = 1e-12, highest: float = 1e18) -> None:
        core = {"type": "float", "strict": True, "ge": lowest, "le": highest, "allow_inf_nan": False}
        super().__init__(core, "a number", f"a number from {lowest:g} to {highest:g}", tidy=as_number)


class Fraction(Kind):
    """A fraction: `0.7` or `70%`."""

    def __init__(self, *, is_zero_allowed: bool = False, is_below_half: bool = False) -> None:
        above, below = {"ge" if is_zero_allowed else "gt": 0}, {"lt": 0.5} if is_below_half else {"le": 1}
        least = "from 0" if is_zero_allowed else "above 0"
        expected = "below one half, such as 8% or 0.08" if is_below_half else f"{least} up to 1, such as 0.7 or 70%"
        core = {"type": "float", "strict": True, **above, **below, "allow_inf_nan": False}
        super().__init__(core, "a fraction", f"a fraction {expected}", tidy=as_fraction)
        self._percentages = (1, 50) if is_below_half else (5, 100)
        """The range of bare numbers that were probably meant as percentages."""

    def _refusal(self, value: Any, problem: str, part: Any) -> SpecError:
        error, number = super()._refusal(value, problem, part), as_number(value)
        low, high = self._percentages
        if problem in _BEYOND and isinstance(number, int | float) and low <= number <= high:
            return SpecError(error.what, expected=error.expected, remedy=f"did you mean {quote(value)}%?")
        return error

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": r"^[0-9.]+ *%$"}]}


class Switch(Kind):
    """true or false, or a YAML 1.1 word for one of them."""

    def __init__(self) -> None:
        super().__init__({"type": "bool", "strict": True}, "a switch", "true or false", tidy=as_switch)


class Choice(Checked):
    """One of a few words, where `Literal` cannot be used because the words come from elsewhere."""

    def __init__(self, words: tuple[str, ...] | Callable[[], tuple[str, ...]]) -> None:
        def known() -> tuple[str, ...]:
            return words() if callable(words) else words

        def chosen(value: Any) -> Any:
            if not isinstance(value, str) or value not in known():
                raise not_among(value, known())
            return value

        super().__init__(chosen, lambda: {"type": "string", "enum": list(known())})


class Text(Kind):
    """Text on one line. A pattern may restrict it, with its meaning in words."""

    def __init__(self, *, pattern: str = "", meaning: str = "text on one line", longest: int = 1024) -> None:
        core: dict[str, Any] = {"type": "str", "strict": True, "min_length": 1, "max_length": longest}
        if pattern:
            core["pattern"] = f"^(?:{pattern})$"
        super().__init__(core, "usable", meaning, tidy=self._usable)
        self._longest = longest

    def _usable(self, value: Any) -> Any:
        """Refuse what YAML parsed as another type, and what no file name or script line can hold."""
        if isinstance(value, bool) or value is None:
            remedy = "YAML may read a bare yes, no, on or off as true or false: put it in quotes"
            raise SpecError(f"{quote(value)} is not text", expected=self.expected, remedy=remedy)
        if isinstance(value, int | float):
            raise SpecError(f"{quote(value)} is a number", expected=self.expected, remedy="put it in quotes")
        if not isinstance(value, str):
            raise SpecError(f"{quote(value)} is not text", expected=self.expected)
        if not value.isprintable() or not value.strip():
            raise SpecError(f"{shown(value)} is not usable" if value else "is empty", expected=self.expected)
        if len(value) > self._longest:
            expected = f"{self.expected}, at most {self._longest}"
            raise SpecError(f"{len(value)} characters are too many", expected=expected)
        return value


class Words(Kind):
    """A list of words, or a single text separated by commas (for options, also by plus signs)."""

    def __init__(self, *, pattern: str, meaning: str, is_tuple: bool = False, least: int = 1) -> None:
        word = {"type": "str", "strict": True, "pattern": f"^(?:{pattern})$"}
        core = {"type": "list", "items_schema": word, "min_length": least}
        strings = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        described = {"anyOf": [strings, {"type": "string"}]}
        super().__init__(core, "a list", f"a list of {meaning}", tidy=_split, described=described)
        self._is_tuple = is_tuple

    def _check(self, value: Any, validate: Callable[[Any], Any]) -> Any:
        words = super()._check(value, validate)
        return tuple(words) if self._is_tuple else words

    def _refusal(self, value: Any, problem: str, part: Any) -> SpecError:
        if problem == "too_short":
            return SpecError("is an empty list", expected=self.expected)
        if not problem.startswith("string"):
            return super()._refusal(value, problem, part)
        return SpecError(f"{shown(part)} is not usable", expected=self.expected)


def _split(value: Any) -> Any:
    return re.split(r"\s*[,+]\s*", value.strip()) if isinstance(value, str) else value


NONE = "none"
"""The spec's word for hardware that is absent."""
_NOTHING = ("0", "no", "none", "off", "false")
"""Words that people write instead of `none`."""


class Quantity(Checked):
    """A number with its unit, in a range that covers all real hardware with room to spare."""

    def __init__(
        self,
        unit: Unit,
        lowest: float,
        highest: float,
        range_words: str,
        *,
        bare_unit: float | None = None,
        may_be_none: bool = False,
    ) -> None:
        """`bare_unit` is the value of a bare 1 in base units, for keys named after their unit (`bf16_tflops: 989`).

        With `may_be_none`, the word `none` is accepted for absent hardware and becomes 0.
        """
        parse, pattern = unit
        text, bare = {"type": "string", "pattern": pattern}, {"type": "number", "exclusiveMinimum": 0}

        def in_base_units(value: Any) -> float:
            if may_be_none and value == NONE:
                return 0.0
            is_bare = isinstance(value, int | float) and not isinstance(value, bool)
            try:
                amount = as_number(value) * bare_unit if is_bare and bare_unit else parse(value)
            except UnitError as error:
                if not may_be_none or str(value).strip().lower() not in _NOTHING:
                    raise
                raise UnitError(error.what, expected=error.expected, remedy=f"did you mean {NONE}?") from None
            if not lowest <= amount <= highest:
                relation = "above" if amount > highest else "below"
                meant = units.probably_meant(quote(value), parse, lowest, highest)
                raise UnitError(
                    f"{quote(value)} is far {relation} what exists",
                    expected=f"expected {range_words}",
                    remedy=f"did you mean {meant}?" if meant else "",
                )
            return amount

        forms = [text, *([bare] if bare_unit else ()), *([{"const": NONE}] if may_be_none else ())]
        super().__init__(in_base_units, {"anyOf": forms} if len(forms) > 1 else text)


SPEED = Quantity(FLOPS, 1e12, 1e17, "1TFLOPS to 100PFLOPS", bare_unit=1e12)
LATENCY = Quantity((partial(units.parse_seconds, longest_s=0.1), units.SECONDS_PATTERN), 1e-7, 0.1, "100ns to 100ms")
PATH = Text(pattern=r"/.*", meaning="an absolute path")
GPU_NAME = Text(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", meaning="a GPU's name", longest=64)
ARCHITECTURE = Choice(architectures)
DEGREE = Count(1, 1_000_000)
"""A degree of parallelism, or another count in a layout."""
SIZE = Count(1, 10**18)
