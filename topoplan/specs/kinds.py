"""The kinds of value that a spec file holds: what each accepts, in which words it refuses, and its JSON Schema.

A kind stands in the annotation of a form's field, `Annotated[int, Count(1, 8)]`, where pydantic finds and calls it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from topoplan import catalog, units
from topoplan.catalog.packages import PYTHON, is_version, packages
from topoplan.errors import InputError, SpecError, UnitError, nearest
from topoplan.specs.batch_options import NAME_PATTERN, check_option
from topoplan.specs.length_file import EXPECTED, pairs_of
from topoplan.specs.secrets import NEVER_WRITTEN, REMEDY, is_secret, secrets_in
from topoplan.specs.source import plain_scalar
from topoplan.units import quote, shown

# What LLaMA-Factory's YAML calls the things that a spec has a key for. Under `trainer:` they would be written
# twice, with two values; anywhere else they tell what the user was looking for.
TRAINER_KEYS_OF_JOB: Mapping[str, str] = {
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "stage": "stage",
    "bf16": "precision",
    "fp16": "precision",
    "dataset": "dataset",
    "dataset_dir": "dataset_dir",
    "template": "template",
    "packing": "packing",
    "num_train_epochs": "epochs",
    "learning_rate": "learning_rate",
    "lora_rank": "lora_rank",
    "lora_target": "lora_target",
    "quantization_bit": "quantization_bit",
    "freeze_trainable_layers": "freeze_trainable_layers",
    "pure_bf16": "pure_bf16",
    "freeze_vision_tower": "freeze_vision_tower",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_language_model": "freeze_language_model",
    "image_max_pixels": "image_max_pixels",
}
TRAINER_KEYS_OF_LAYOUT: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "recompute_granularity": "recompute",
    "recompute_method": "recompute",
    "recompute_num_layers": "recompute",
    "recompute_modules": "recompute",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "optimizer_offload_fraction": "optimizer_offload_fraction",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
}


class _KeyError(SpecError):
    """A mistake at one key of a block that is a value of its own."""

    def __init__(self, key: object, what: str, *, expected: str = "", remedy: str = "") -> None:
        super().__init__(what, expected=expected, remedy=remedy)
        self.key = quote(key)


@dataclass(frozen=True, slots=True)
class Kind:
    """What one value may be. Subclasses check it, and describe it to JSON Schema."""

    def check(self, value: Any) -> Any:
        """The value in base units. Raises UnitError or SpecError without a place."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """JSON Schema of what `check` accepts."""
        raise NotImplementedError

    def _validate(self, value: Any) -> Any:
        try:
            return self.check(value)
        except InputError as error:
            kind = "unit" if isinstance(error, UnitError) else "value"
            key = error.key if isinstance(error, _KeyError) else ""
            parts = {"what": error.what, "expected": error.expected, "remedy": error.remedy, "key": key}
            raise PydanticCustomError(kind, "{what}", parts) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.schema()


def _as_number(value: Any) -> Any:
    """A number that was written as text, such as YAML 1.1's `2e-5`, as a number; anything else as it is."""
    number = plain_scalar(value.strip()) if isinstance(value, str) else value
    # Beyond a float's range every kind refuses it; as infinity it overflows nowhere on the way.
    return math.inf if isinstance(number, int) and abs(number) > 10**300 else number


@dataclass(frozen=True, slots=True)
class Count(Kind):
    """A whole number in a range. `1e5` is one too."""

    lowest: int
    highest: int

    def check(self, value: Any) -> int:
        """Raises SpecError."""
        number = _as_number(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        expected = f"expected a whole number from {self.lowest} to {self.highest}"
        if isinstance(number, bool) or not isinstance(number, int):
            raise SpecError(f"{shown(value)} is not a whole number", expected=expected)
        if not self.lowest <= number <= self.highest:
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return number

    def schema(self) -> dict[str, Any]:
        """An integer in the range."""
        return {"type": "integer", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number in a range."""

    lowest: float
    highest: float

    def check(self, value: Any) -> float:
        """Raises SpecError."""
        number = _as_number(value)
        expected = f"expected a number from {self.lowest:g} to {self.highest:g}"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise SpecError(f"{shown(value)} is not a number", expected=expected)
        if not self.lowest <= number <= self.highest:
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return float(number)

    def schema(self) -> dict[str, Any]:
        """A number in the range."""
        return {"type": "number", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Fraction(Kind):
    """A part of a whole, below one half: `8%` or `0.08`."""

    def check(self, value: Any) -> float:
        """Raises SpecError."""
        percent = isinstance(value, str) and value.strip().endswith("%")
        number = _as_number(value.strip()[:-1] if percent else value)
        expected = "expected a fraction below one half, such as 8% or 0.08"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise SpecError(f"{shown(value)} is not a fraction", expected=expected)
        fraction = number / 100 if percent else float(number)
        if not 0 <= fraction < 0.5:
            remedy = f"did you mean {quote(value)}%?" if not percent and 1 <= fraction < 50 else ""
            raise SpecError(f"{shown(value)} is out of range", expected=expected, remedy=remedy)
        return fraction

    def schema(self) -> dict[str, Any]:
        """A number, or a percentage as text."""
        percentage = {"type": "string", "pattern": r"^[0-9.]+ *%$"}
        return {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 0.5}, percentage]}


@dataclass(frozen=True, slots=True)
class Share(Kind):
    """A part of a peak or of a whole, up to all of it: `0.7` or `70%`."""

    is_zero_allowed: bool = False

    def check(self, value: Any) -> float:
        """Raises SpecError."""
        percent = isinstance(value, str) and value.strip().endswith("%")
        number = _as_number(value.strip()[:-1] if percent else value)
        above = "from 0" if self.is_zero_allowed else "above 0"
        expected = f"expected a fraction {above} up to 1, such as 0.7 or 70%"
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise SpecError(f"{shown(value)} is not a fraction", expected=expected)
        share = number / 100 if percent else float(number)
        if not (0 < share <= 1 or (share == 0 and self.is_zero_allowed)):
            remedy = f"did you mean {quote(value)}%?" if not percent and 5 <= share <= 100 else ""
            raise SpecError(f"{shown(value)} is out of range", expected=expected, remedy=remedy)
        return share

    def schema(self) -> dict[str, Any]:
        """A number, or a percentage as text."""
        lowest = {"minimum": 0} if self.is_zero_allowed else {"exclusiveMinimum": 0}
        return {"anyOf": [{"type": "number", **lowest, "maximum": 1}, {"type": "string", "pattern": r"^[0-9.]+ *%$"}]}


@dataclass(frozen=True, slots=True)
class Tile(Kind):
    """Rows and columns of a GEMM's tile: `[128, 256]`."""

    def check(self, value: Any) -> tuple[int, int]:
        """Raises SpecError."""
        expected = "expected two even whole numbers from 16 to 1024, such as [128, 256]"
        sides = value if isinstance(value, list | tuple) else ()
        if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
            raise SpecError(f"{shown(value)} is not a tile", expected=expected)
        if not all(16 <= side <= 1024 and side % 2 == 0 for side in sides):
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return (sides[0], sides[1])

    def schema(self) -> dict[str, Any]:
        """Two integers."""
        side = {"type": "integer", "minimum": 16, "maximum": 1024, "multipleOf": 2}
        return {"type": "array", "items": side, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class Rates(Kind):
    """Falling rates in GB/s: `[40, 30, 20]`."""

    def check(self, value: Any) -> tuple[float, ...]:
        """Raises SpecError."""
        expected = "expected up to 64 falling rates above 0, in GB/s, such as [40, 30, 20]"
        given = value if isinstance(value, list | tuple) else ()
        rates = tuple(_as_number(item) for item in given)
        if not rates or any(isinstance(item, bool) or not isinstance(item, int | float) for item in rates):
            raise SpecError(f"{shown(value)} is not a list of rates", expected=expected)
        # Written so that a NaN, which compares as false, is refused too.
        falling = all(ahead > behind for ahead, behind in itertools.pairwise(rates))
        if not (len(rates) <= 64 and falling and rates[-1] > 0 and rates[0] <= 10_000):
            raise SpecError(f"{shown(value)} is out of range", expected=expected)
        return tuple(map(float, rates))

    def schema(self) -> dict[str, Any]:
        """Numbers."""
        rate = {"type": "number", "exclusiveMinimum": 0, "maximum": 10_000}
        return {"type": "array", "items": rate, "minItems": 1, "maxItems": 64}


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """true or false."""

    def check(self, value: Any) -> bool:
        """Raises SpecError."""
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        answer = words.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(answer, bool):
            raise SpecError(f"{shown(value)} is not a switch", expected="expected true or false")
        return answer

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def check(self, value: Any) -> str:
        """Raises SpecError."""
        if isinstance(value, str) and value in self.words:
            return value
        meant = nearest(value, self.words) if isinstance(value, str) else ""
        raise SpecError(
            f"{shown(value)} is not a choice",
            expected=f"expected {', '.join(self.words[:-1])} or {self.words[-1]}",
            remedy=meant,
        )

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Architecture(Kind):
    """An architecture that the catalog has a profile of."""

    def check(self, value: Any) -> str:
        """Raises SpecError."""
        return Choice(catalog.architectures()).check(value)

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return Choice(catalog.architectures()).schema()


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text on one line. What it may look like is a pattern with its meaning in words."""

    pattern: str = ""
    meaning: str = "text on one line"
    longest: int = 1024

    def check(self, value: Any) -> str:
        """Raises SpecError."""
        expected = f"expected {self.meaning}"
        if isinstance(value, bool) or value is None:
            remedy = "YAML may read a bare yes, no, on or off as true or false: put it in quotes"
            raise SpecError(f"{quote(value)} is not text", expected=expected, remedy=remedy)
        if isinstance(value, int | float):
            raise SpecError(f"{quote(value)} is a number", expected=expected, remedy="put it in quotes")
        if not isinstance(value, str):
            raise SpecError(f"{quote(value)} is not text", expected=expected)
        # Control characters and line breaks have no place in what becomes a file name or a line of a script.
        if not value.isprintable() or not value.strip():
            raise SpecError(f"{shown(value)} is not usable" if value else "is empty", expected=expected)
        if len(value) > self.longest:
            raise SpecError(f"{len(value)} characters are too many", expected=f"{expected}, at most {self.longest}")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise SpecError(f"{shown(value)} is not usable", expected=expected)
        return value

    def schema(self) -> dict[str, Any]:
        """A string with its pattern."""
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", "minLength": 1, "maxLength": self.longest, **pattern}


@dataclass(frozen=True, slots=True)
class Words(Kind):
    """A list of words, or one text with commas (or, for options, plus signs) between them."""

    pattern: str
    meaning: str

    def check(self, value: Any) -> list[str]:
        """Raises SpecError."""
        items = re.split(r"\s*[,+]\s*", value.strip()) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not items:
            raise SpecError(f"{shown(value)} is not a list", expected=f"expected a list of {self.meaning}")
        for item in items:
            if not isinstance(item, str) or not re.fullmatch(self.pattern, item):
                raise SpecError(f"{shown(item)} is not usable", expected=f"expected a list of {self.meaning}")
        return list(items)

    def schema(self) -> dict[str, Any]:
        """A list of strings, or a string."""
        return {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string"}]}


@dataclass(frozen=True, slots=True)
class Quantity(Kind):
    """A number with its unit, in a range that holds all real hardware with room to spare."""

    parse: Callable[[object], float]
    lowest: float
    highest: float
    range_words: str
    pattern: str
    bare_unit: float | None = None
    """Base units that one stands for where the key itself names the unit (`bf16_tflops: 989`)."""

    def check(self, value: Any) -> float:
        """Raises UnitError."""
        is_bare = isinstance(value, int | float) and not isinstance(value, bool)
        amount = _as_number(value) * self.bare_unit if is_bare and self.bare_unit else self.parse(value)
        if not self.lowest <= amount <= self.highest:
            relation = "above" if amount > self.highest else "below"
            meant = units.probably_meant(quote(value), self.parse, self.lowest, self.highest)
            raise UnitError(
                f"{quote(value)} is far {relation} what exists",
                expected=f"expected {self.range_words}",
                remedy=f"did you mean {meant}?" if meant else "",
            )
        return amount

    def schema(self) -> dict[str, Any]:
        """Text with its unit; a number too where the key names the unit."""
        text = {"type": "string", "pattern": self.pattern}
        return {"anyOf": [text, {"type": "number", "exclusiveMinimum": 0}]} if self.bare_unit else text


@dataclass(frozen=True, slots=True)
class PassedThrough(Kind):
    """Keys that go into the trainer's YAML as they are, but for those that topoplan writes itself."""

    def check(self, value: Any) -> dict[str, Any]:
        """Raises SpecError."""
        if not isinstance(value, Mapping):
            raise SpecError(f"{shown(value)} is not a block of keys", expected="expected keys of the trainer's YAML")
        for key, content in value.items():
            if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", key):
                raise _KeyError(key, "is not a key of the trainer")
            if key == "model_name_or_path":
                raise _KeyError(key, "is the spec's `model`", remedy="set `model` instead")
            if own := TRAINER_KEYS_OF_JOB.get(key):
                raise _KeyError(key, f"is the job's `{own}`", remedy=f"set `{own}` in `job` instead")
            if own := TRAINER_KEYS_OF_LAYOUT.get(key):
                raise _KeyError(key, "is part of the layout", remedy=f"hold it with `pin: {{{own}: ...}}` in `job`")
            if (found := next(secrets_in({key: content}), None)) is not None:
                at = f"{quote('.'.join(map(str, found[1:])))} in it " if found[1:] else ""
                raise _KeyError(key, f"{at}looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
            if not _is_finite(content):
                raise _KeyError(
                    key, "is not a finite number" if isinstance(content, float) else "holds an infinite number or a NaN"
                )
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """Any keys."""
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class LengthHistogram(Kind):
    """How many samples have how many tokens, or the path of a file that says it."""

    def check(self, value: Any) -> tuple[tuple[int, int], ...] | str:
        """Pairs of tokens and count, or the path. Raises SpecError."""
        if isinstance(value, str) and value.strip() and value.isprintable():
            return value
        if not isinstance(value, list | Mapping):
            raise SpecError(f"{shown(value)} is not a length histogram", expected=f"{EXPECTED}, or a file of either")
        return pairs_of(value)

    def schema(self) -> dict[str, Any]:
        """A path, a list or a mapping."""
        number = {"type": "integer", "minimum": 1}
        pair = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
        mapping = {"type": "object", "patternProperties": {"^[0-9]+$": number}, "additionalProperties": False}
        several = {"type": "array", "items": {"anyOf": [number, pair]}, "minItems": 1}
        return {"anyOf": [{"type": "string"}, several, mapping | {"minProperties": 1}]}


@dataclass(frozen=True, slots=True)
class Environment(Kind):
    """Environment variables."""

    def check(self, value: Any) -> dict[str, str]:
        """Raises SpecError."""
        if not isinstance(value, Mapping):
            raise SpecError(f"{shown(value)} is not a block of keys", expected="expected NAME: value, one a line")
        variables: dict[str, str] = {}
        for name, content in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name):
                raise _KeyError(name, "is not a variable's name", expected="expected letters, digits and _")
            if is_secret(name, content):
                raise _KeyError(name, f"looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
            if isinstance(content, bool | float) or not isinstance(content, str | int):
                raise _KeyError(name, f"{shown(content)} is not text", remedy="put it in quotes")
            text = str(content)
            if not text.isprintable() or len(text) > 4096:
                raise _KeyError(name, f"{shown(text)} is not usable", expected="expected text on one line")
            variables[name] = text
        return variables

    def schema(self) -> dict[str, Any]:
        """Names with text or integers."""
        value = {"type": ["string", "integer"]}
        return {
            "type": "object",
            "patternProperties": {"^[A-Za-z_][A-Za-z0-9_]*$": value},
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class SecretNames(Kind):
    """Names of environment variables, without their values. What is none is not quoted: it may be a value."""

    def check(self, value: Any) -> list[str]:
        """Raises SpecError."""
        expected = "expected names of variables alone, such as [HF_TOKEN, WANDB_API_KEY]"
        names = re.split(r"\s*,\s*", value.strip()) if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise SpecError("is not a list", expected=expected)
        for index, name in enumerate(names):
            usable = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name)
            if not usable or is_secret("", name):
                raise SpecError(f"item {index + 1} is not the name of a variable", expected=expected)
            if name.startswith("TOPOPLAN_"):
                raise SpecError(f"{name} is topoplan's own", expected=expected)
        return list(dict.fromkeys(names))

    def schema(self) -> dict[str, Any]:
        """A list of names, or a text with commas."""
        names = {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}}
        return {"anyOf": [names, {"type": "string"}]}


@dataclass(frozen=True, slots=True)
class Versions(Kind):
    """Versions of Python and of the packages of trainers; text, as YAML reads 3.10 without quotes as 3.1."""

    def check(self, value: Any) -> dict[str, str]:
        """Raises SpecError."""
        known = (PYTHON, *packages())
        if not isinstance(value, Mapping):
            expected = f"expected packages and their versions, such as `{PYTHON}: '3.12'`"
            raise SpecError(f"{shown(value)} is not a block of keys", expected=expected)
        for name, version in value.items():
            if name not in known:
                expected = f"expected some of {', '.join(known)}"
                raise _KeyError(name, "is not a package that a trainer needs", expected=expected)
            if not is_version(version):
                expected = "expected a version in quotes, such as '3.12' or '2.11.0'"
                raise _KeyError(name, f"{shown(version)} is not a version", expected=expected)
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """A mapping from the known names."""
        names = {"enum": [PYTHON, *packages()]}
        return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class BatchOptions(Kind):
    """Options of sbatch by their long names, with text, a whole number, or true or false."""

    def check(self, value: Any) -> dict[str, str | bool]:
        """Raises SpecError."""
        if not isinstance(value, Mapping):
            expected = "expected options of sbatch, such as `partition: gpu`"
            raise SpecError(f"{shown(value)} is not a block of keys", expected=expected)
        options: dict[str, str | bool] = {}
        for name, content in value.items():
            if content is None:
                continue
            words = str(content).split(",")  # of `export: ALL,HF_TOKEN=...`
            if is_secret("", content) or any(is_secret(*word.partition("=")[::2]) for word in words):
                raise _KeyError(name, f"looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
            try:
                option, usable = check_option(name, content)
            except SpecError as error:
                raise _KeyError(name, error.what, expected=error.expected, remedy=error.remedy) from None
            if option in options:
                raise _KeyError(name, "is given twice", remedy="keep one of them")
            options[option] = usable
        return options

    def schema(self) -> dict[str, Any]:
        """Names with text, integers or booleans."""
        value = {"type": ["string", "integer", "boolean"]}
        return {"type": "object", "patternProperties": {f"^{NAME_PATTERN}$": value}, "additionalProperties": False}


def _is_finite(value: Any) -> bool:
    """Whether every number in a value is one that JSON can hold."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def rate(lowest: float, highest: float, range_words: str) -> Quantity:
    """A rate, in bytes per second."""
    return Quantity(units.parse_rate, lowest, highest, range_words, units.RATE_PATTERN)


def amount(lowest: float, highest: float, range_words: str) -> Quantity:
    """An amount of memory, in bytes."""
    return Quantity(units.parse_bytes, lowest, highest, range_words, units.AMOUNT_PATTERN)


SPEED = Quantity(units.parse_flops, 1e12, 1e17, "1TFLOPS to 100PFLOPS", units.FLOPS_PATTERN, bare_unit=1e12)
LATENCY = Quantity(units.parse_seconds, 1e-7, 0.1, "100ns to 100ms", units.SECONDS_PATTERN)
DELAY = Quantity(units.parse_seconds, 0, 1, "0s to 1s", units.SECONDS_PATTERN, bare_unit=1.0)
"""Of a kernel, a collective or a step; a bare number is in seconds."""
HELD = Quantity(units.parse_bytes, 0, 2**36, "0GiB to 64GiB", units.AMOUNT_PATTERN, bare_unit=1)
"""Device memory; a bare number is in bytes."""
MOVED = Quantity(units.parse_rate, 1e6, 1e14, "1MB/s to 100TB/s", units.RATE_PATTERN, bare_unit=1.0)
"""What software moves in a second; a bare number is in bytes per second."""
PATH = Text(pattern=r"/.*", meaning="an absolute path")
DEGREE = Count(1, 1_000_000)
"""Of parallelism, and anything else that a layout counts."""
