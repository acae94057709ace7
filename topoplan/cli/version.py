"""`topoplan version`: print the installed version."""

from __future__ import annotations

import sys

from topoplan import __version__
from topoplan.cli.options import AsJson

SCHEMA = "topoplan.version/1"


def version(as_json: AsJson = False) -> None:
    """The same as `topoplan --version`."""
    from topoplan.cli.output import print_json

    if as_json:
        print_json({"schema": SCHEMA, "version": __version__})
    else:
        sys.stdout.write(f"topoplan {__version__}\n")
