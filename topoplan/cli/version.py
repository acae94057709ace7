"""`topoplan version`: print the installed version."""

from __future__ import annotations

import sys

from topoplan import __version__
from topoplan.cli.options import AsJson
from topoplan.cli.output import print_json


def version(as_json: AsJson = False) -> None:
    """The same as `topoplan --version`."""
    if as_json:
        print_json({"schema": "topoplan.version/1", "version": __version__})
    else:
        sys.stdout.write(f"topoplan {__version__}\n")
