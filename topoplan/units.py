"""Parse and format quantities (bytes, bytes per second, FLOP/s, seconds), with base units on the inside.

Parsing is strict. A quantity must have a unit, `b` means bits and `B` means bytes, and an ambiguous spelling
(`400gb/s`) is refused: a factor of eight in a link rate is a wrong plan, not a rounding error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from topoplan.errors import UnitError

GIB = 2**30

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIX = _DECIMAL | _BINARY
# (multiplier, divisor): 30 / 10**6 is the float nearest to 30us, 30 * 1e-6 is not.
_SECONDS = {
    "ns": (1, 10**9),
    "us": (1, 10**6),
    "µs": (1, 10**6),  # U+00B5, micro sign
    "μs": (1, 10**6),  # U+03BC, Greek mu
    "ms": (1, 10**3),
    "s": (1, 1),
    "min": (60, 1),
    "h": (3600, 1),
    "d": (86400, 1),
}

# The number takes no `e` without digits after it, so that `1EFLOPS` is one exa-FLOP/s.
_NUMBER = r"[+-]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*(.*)", re.DOTALL)
_AMOUNT_UNIT = re.compile(r"([kKMGTP]i?)?(?:B|[Bb]ytes?)")
_RATE_UNIT = re.compile(r"([kKMGTP]i?)?(?:(B|[Bb]ytes?)|(b|[Bb]its?))(?:/s|/sec|ps)")
_FLOPS_UNIT = re.compile(r"([kKMGTPEmgtpe])?[Ff][Ll][Oo][Pp](?:[Ss]|/s|s/s)")

# The number and unit patterns above, combined into whole patterns for JSON Schema.
AMOUNT_PATTERN, RATE_PATTERN, FLOPS_PATTERN, SECONDS_PATTERN = (
    f"^{_NUMBER} *{unit}$" for unit in (_AMOUNT_UNIT.pattern, _RATE_UNIT.pattern, _FLOPS_UNIT.pattern, "(?:ns|us|ms|s)")
)
_LONGEST_QUOTE = 60


def quote(value: object) -> str:
    """Return `value` formatted for a message: on one line, and short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list | tuple):
        return "a block" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 10**300:
        return "a number of hundreds of digits"
    text = value if isinstance(value, str) else repr(value)
    end = "..."
    if not text.isprintable():
        text = repr(text)
        end += text[-1]  # its quotation mark
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - len(end)] + end


def shown(value: object) -> str:
    """Return `quote(value)`, with quotation marks around text, for use inside a sentence."""
    return f"{quote(value)!r}" if isinstance(value, str) and value.isprintable() else quote(value)


def multiples_around(value: int, divisor: int) -> str:
    """Return the multiples of `divisor` just below and above `value`, as `12 or 16`."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def file_name(name: str, otherwise: str = "") -> str:
    """Return `name` as a safe file name: ASCII, no separators, no leading dots. `otherwise` if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or otherwise


def named(words: Iterable[str], most: int = 3) -> str:
    """Return the first `most` words and a count of the rest: `a, b, c and 5 more`."""
    listed = list(words)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def in_seconds(seconds: float) -> str:
    """Return a duration rounded for a person who waited: `2.3 s`, `15 s`, `0.05 s`."""
    return f"{seconds:.1g} s" if seconds < 1 else f"{round(seconds, 1):g} s"


def _split(text: object, kind: str, examples: str, remedy: Callable[[str], str]) -> tuple[float, str, str]:
    """Split a quantity into value, number as written and unit; `remedy` is for a number without one."""
    expected = f"expected {kind} such as {examples}"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UnitError(f"{quote(text)} is not {kind}", expected=expected)
    written = (text if isinstance(text, str) else quote(text)).strip()
    match = _QUANTITY.fullmatch(written)
    if match is None:
        raise UnitError(f"{quote(text)!r} is not {kind}", expected=expected)
    number, unit = match.group(1), match.group(2)
    value = float(number.replace("_", ""))
    if not math.isfinite(value):
        raise UnitError(f"{quote(written)} is not a finite number", expected=expected)
    if value <= 0:
        raise UnitError(f"{quote(written)} is not above zero", expected=expected)
    if not unit:
        raise UnitError(f"{quote(number)} has no unit", remedy=remedy(quote(number)))
    return value, quote(number), unit


def _checked(value: float, text: object) -> float:
    if not 0 < value < math.inf:
        raise UnitError(f"{quote(text)} is too {'large' if value else 'small'} to be meant")
    return value


def _begun(unit: str) -> str:
    """Return the prefix that an invalid unit starts with (T for `2T`), or G if it starts with none."""
    letter = unit[0].upper() if unit[0] not in "kK" else "k"
    return letter if letter in _DECIMAL else "G"


def parse_bytes(text: object) -> int:
    """Return the bytes in an amount such as `80GB` (10^9) or `79.6GiB` (2^30). Raises UnitError."""

    def remedy(number: str, prefix: str = "G") -> str:
        return f"write {number}{prefix}B (powers of 1000) or {number}{prefix}iB (powers of 1024)"

    value, number, unit = _split(text, "an amount of memory", "80GB or 81559MiB", remedy)
    match = _AMOUNT_UNIT.fullmatch(unit)
    if match is None:
        raise UnitError(
            f"{quote(text)} is not an amount of memory: no unit {quote(unit)!r}", remedy=remedy(number, _begun(unit))
        )
    amount = round(_checked(value * _PREFIX[match.group(1) or ""], text))
    return int(_checked(amount, text))


def parse_rate(text: object) -> float:
    """Return the bytes per second in a rate such as `900GB/s` (bytes) or `400Gb/s` (bits). Raises UnitError."""

    examples = "900GB/s (bytes) or 400Gb/s (bits)"

    def remedy(number: str, prefix: str = "G") -> str:
        return f"write {number}{prefix}B/s (bytes) or {number}{prefix}b/s (bits)"

    value, number, unit = _split(text, "a rate", examples, remedy)
    match = _RATE_UNIT.fullmatch(unit)
    if match is None:
        if re.fullmatch(r"[kmgtp]i?b(?:/s|/sec|ps)", unit, re.IGNORECASE):
            what = f"{quote(text)} is ambiguous: it could be bits or bytes"
            raise UnitError(what, remedy=remedy(number, _begun(unit)))
        if _AMOUNT_UNIT.fullmatch(unit):
            raise UnitError(f"{quote(text)} is an amount, not a rate", remedy=f"write {number}{unit}/s")
        what = f"{quote(text)} is not a rate: no unit {quote(unit)!r}"
        if any(map(str.isdigit, unit)):  # in `8x400Gb/s` the first number is not the rate
            raise UnitError(what, expected=f"expected a rate such as {examples}")
        raise UnitError(what, remedy=remedy(number, _begun(unit)))
    bits = 8 if match.group(3) else 1
    return _checked(value * _PREFIX[match.group(1) or ""] / bits, text)


def parse_flops(text: object) -> float:
    """Return the FLOP/s in a speed such as `989TFLOPS`, `989 TFLOP/s` or `1.9PFLOPS`. Raises UnitError."""

    def remedy(number: str) -> str:
        return f"write {number}TFLOPS"

    value, number, unit = _split(text, "a speed", "989TFLOPS", remedy)
    match = _FLOPS_UNIT.fullmatch(unit)
    if match is None:
        raise UnitError(f"{quote(text)} is not a speed: no unit {quote(unit)!r}", remedy=remedy(number))
    return _checked(value * _DECIMAL[(match.group(1) or "").upper()], text)


def parse_seconds(text: object, *, longest_s: float = math.inf) -> float:
    """Return the seconds in a time such as `5us` or `24h`. Raises UnitError, which suggests none above `longest_s`."""

    def remedy(number: str) -> str:
        times = [f"{number}{unit}" for unit in ("us", "ms", "s", "h") if _in_seconds(float(number), unit) <= longest_s]
        return f"write {', '.join(times[:-1])} or {times[-1]}" if times[1:] else ""

    value, number, unit = _split(text, "a time", "5us or 1.5ms", remedy)
    if unit not in _SECONDS:
        raise UnitError(f"{quote(text)} is not a time: no unit {quote(unit)!r}", remedy=remedy(number))
    return _checked(_in_seconds(value, unit), text)


def _in_seconds(value: float, unit: str) -> float:
    times, divided_by = _SECONDS[unit]
    return value * times / divided_by


def parse_count(text: str) -> int:
    """Return the count in a text such as `2B` (10^9), `500M` (10^6), `2e9` or `2000000`. Raises UnitError."""
    match = re.fullmatch(rf"({_NUMBER})\s*([kKMGBT]?)", text.strip())
    value = float(match[1].replace("_", "")) * (_DECIMAL | {"B": 10**9})[match[2]] if match else 0.0
    if not 1 <= value < math.inf:
        raise UnitError(f"{quote(text)!r} is not a count", expected="expected one such as 2B, 500M or 2000000")
    return round(value)


def probably_meant(text: str, parse: Callable[[object], float], lowest: float, highest: float) -> str:
    """Return the likely intended spelling of an out-of-range quantity, or '' if none is in range.

    Tries bits and bytes exchanged, and the prefix one step (a factor of 1000) up or down.
    """
    exchanged = [text.replace("B/s", "b/s"), text.replace("b/s", "B/s"), text.replace("Bps", "bps")]
    ladder = "kMGTPE"
    scaled = [
        text.replace(old, ladder[index + step], 1)
        for step in (-1, 1)
        for index, old in enumerate(ladder)
        if 0 <= index + step < len(ladder) and old in text
    ]
    for candidate in exchanged + scaled:
        try:
            # A value slightly out of range was not meant to be a thousand times larger or smaller.
            is_slip = candidate in exchanged or not lowest / 10 < parse(text) < highest * 10
            if candidate != text and is_slip and lowest <= parse(candidate) <= highest:
                return candidate
        except UnitError:
            continue
    return ""


def gib(amount_bytes: float) -> float:
    """Convert bytes to GiB."""
    return amount_bytes / GIB


def _number(value: float) -> str:
    """Format with up to four significant digits, no exponent and no trailing zeros."""
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"


def _scaled(value: float, unit: str) -> str:
    for prefix in ("P", "T", "G", "M", "k"):
        if value >= _DECIMAL[prefix]:
            return f"{_number(value / _DECIMAL[prefix])}{prefix}{unit}"
    return f"{_number(value)}{unit}"


def format_gib(amount_bytes: float) -> str:
    """Format bytes as `79.6GiB`."""
    return f"{gib(amount_bytes):.1f}GiB"


def format_byte_rate(rate_bytes_per_s: float) -> str:
    """Format a rate as `900GB/s`, the way vendors quote NVLink and memory."""
    return _scaled(rate_bytes_per_s, "B/s")


def format_bit_rate(rate_bytes_per_s: float) -> str:
    """Format a rate as `400Gb/s`, the way vendors quote networks; 1 Tb/s becomes 1000Gb/s."""
    rate = rate_bytes_per_s * 8
    return f"{_number(rate / 1e9)}Gb/s" if rate >= 1e9 else _scaled(rate, "b/s")


def format_seconds(time_s: float) -> str:
    """Format a time as `5us`, `1.5ms`, `12s`, `4min` or `2.5h`, in the unit that reads best."""
    for unit, least in (("h", 3600.0), ("min", 120.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time_s >= least:
            times, divided_by = _SECONDS[unit]
            return f"{_number(time_s * divided_by / times)}{unit}"
    return f"{_number(time_s * 1e9)}ns"
