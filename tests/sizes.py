"""How many examples a property is tried on: all of them in CI, fewer where somebody waits."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100


def examples(number: int) -> int:
    """`number` in CI, elsewhere the share of it that the profile in conftest.py has of hypothesis' usual number."""
    return max(1, number * settings.default.max_examples // _USUAL)
