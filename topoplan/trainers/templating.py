"""Text from this package's templates. jinja2 is imported when the first one is rendered."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, context: dict[str, Any]) -> str:
    """Render a template of bundle/, report/ or a trainer (`swift/start.sh.j2`); an undefined variable is an error."""
    return _environment().get_template(template).render(context)


def code_span(text: str) -> str:
    """Return `text` as inline code in Markdown, whatever backticks it contains."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def plain_markdown(text: str) -> str:
    """Return `text` with characters escaped that Markdown would read as markup."""
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", text)


def digits(value: float) -> str:
    """Format with three significant digits, or as a whole number with separators from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gigabytes(amount_bytes: float) -> str:
    """Format a size in decimal units: GB (10^9 bytes), or TB from 1,000 GB on."""
    return f"{digits(amount_bytes / 1e9)} GB" if amount_bytes < 1e12 else f"{digits(amount_bytes / 1e12)} TB"


def shell_word(text: str) -> str:
    """Return `text` as one word of a shell command, whatever it contains."""
    quoted = shlex.quote(text)
    # `NAME==value` is valid but looks like a comparison, for which shellcheck warns (SC1097).
    return f"'{text}'" if quoted == text and text.startswith("=") else quoted


def python_text(text: str) -> str:
    """Return `text` as a string literal in Python; JSON's notation is valid for both."""
    return json.dumps(text)


@cache
def _environment() -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader("topoplan.bundle"), PackageLoader("topoplan.report"), PackageLoader("topoplan.trainers", "")]
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["sh"] = shell_word
    environment.filters["python"] = python_text
    environment.filters["code"] = code_span
    environment.filters["md"] = plain_markdown
    environment.filters["digits"] = digits
    environment.filters["gigabytes"] = gigabytes
    return environment
