"""`topoplan version`: what is installed."""

from __future__ import annotations

import sys

from topoplan import __version__


def version() -> None:
    """The same as `topoplan --version`."""
    sys.stdout.write(f"topoplan {__version__}\n")
