"""Trace the path of a spec through the package during `topoplan rank SPEC`, and count how often it goes back up.

    python tests/climbs.py cluster_specs/h100-4x8.yaml

The path is the order in which the calls of the run first enter each file. It should go down the floors of the hallway
(`tests/test_architecture.py`): a spec is read, searched, computed, and shown. A file on a higher floor than the one
entered before it is a climb. Lookups do not count: floors 0 to 4, with units and errors, the spec, layouts, the network
and the operators, may be called from anywhere above. Calls during the import of a module do not count either.
"""

import contextlib
import io
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from topoplan.cli.main import main as topoplan_main

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.test_architecture import FLOORS  # noqa: E402

PACKAGE = ROOT / "topoplan"
LOOKED_UP = 4
"""Rooms up to this floor contain facts, and do not act on them."""


def way(*arguments: str) -> list[str]:
    """Return the package's files in the order in which a command's calls first enter them, without imports."""
    entered: dict[str, None] = {}
    start = str(PACKAGE) + "/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(start) and file not in entered and not _is_import(frame):
            entered[file] = None

    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            topoplan_main([*arguments])
    finally:
        sys.setprofile(None)
    return [file.removeprefix(start) for file in entered]


def _is_import(frame: FrameType) -> bool:
    """Return whether a call is made during an import, or is the body of a module or a class."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__", "").startswith("topoplan."):
            return True
        caller = caller.f_back
    return False


def floor(file: str) -> int:
    """Return the floor of a file's room."""
    return FLOORS[Path(file).parts[0].removesuffix(".py")]


def climbs(files: Iterable[str]) -> list[tuple[str, str]]:
    """Return the upward steps of a path: (from, to)."""
    places = [file for file in files if floor(file) > LOOKED_UP]
    return [(one, other) for one, other in pairwise(places) if floor(other) > floor(one)]


def main() -> int:
    """Print the path, a file per line, with its climbs."""
    files = way("rank", *sys.argv[1:])
    found = climbs(files)
    ups = {other for _, other in found}
    for file in files:
        sys.stdout.write(f"{floor(file):3}  {file}{'  UP' if file in ups else ''}\n")
    sys.stdout.write(f"{len(files)} files, {len(found)} climbs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
