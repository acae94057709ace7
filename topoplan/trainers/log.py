"""How a trainer tells how far it is: patterns of the lines that it prints, whose named groups are read."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"""["']?(?P<loss>[-+]?(?:[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][-+]?[0-9]{1,3})?|nan|inf|NaN|Infinity))["']?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Of one trainer. A line that is worth reading has a bar of tqdm, or the word `loss`."""

    loss: re.Pattern[str]
    """Finds `loss`, a number."""
    bar: re.Pattern[str] | None = None
    """Matches the bar of the training from its beginning: `step`, `total` and `clock` ([H:]MM:SS)."""
    steps: re.Pattern[str] | None = None
    """Finds `step`, and perhaps `total`, beside a loss. Without it losses are counted where there is no bar."""
    elapsed: re.Pattern[str] | None = None
    """Finds the time since the first step beside a loss: `days`, `hours`, `minutes` and `seconds`, each perhaps."""


def loss_key(name: str) -> re.Pattern[str]:
    """A key of a printed dict or of a line of JSON; transformers 4 prints numbers, 5 quotes them."""
    return re.compile(rf"""["']{name}["']: {_NUMBER}""")


def tqdm_bar(title: str = "") -> re.Pattern[str]:
    """The bar with this description: those of the data, the weights and the checkpoints begin with another."""
    return re.compile(
        rf"{title}\s*[0-9]{{1,3}}%\|[^|]{{0,400}}\|\s*(?P<step>[0-9]{{1,12}})/(?P<total>[0-9]{{1,12}})"
        r" \[(?P<clock>(?:[0-9]{1,6}:)?[0-9]{1,2}:[0-9]{2})<"
    )
