"""Text from the templates of this package. jinja2 is imported when the first one is filled in."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, context: dict[str, Any]) -> str:
    """A template of bundle/, of report/ or of a wing (`swift/start.sh.j2`); an unknown name in it is an error."""
    return _environment().get_template(template).render(context)


def code_span(text: str) -> str:
    """`text` as inline code in Markdown, whatever backticks it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def plain_markdown(text: str) -> str:
    """`text` with the characters escaped that Markdown would read as markup."""
    return re.sub(r"([\\`*<>|\[\]])", r"\\\1", text)


def digits(value: float) -> str:
    """Three significant digits, and whole numbers with separators from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gigabytes(amount_bytes: float) -> str:
    """As disks are sold: GB of 10^9 bytes, TB from a thousand on."""
    return f"{digits(amount_bytes / 1e9)} GB" if amount_bytes < 1e12 else f"{digits(amount_bytes / 1e12)} TB"


def shell_word(text: str) -> str:
    """`text` as one word of a shell command, whatever it holds."""
    quoted = shlex.quote(text)
    # `NAME==value` is right, and reads like a comparison: shellcheck warns (SC1097).
    return f"'{text}'" if quoted == text and text.startswith("=") else quoted


def python_text(text: str) -> str:
    """`text` as a string of a Python program; what JSON writes is one."""
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
