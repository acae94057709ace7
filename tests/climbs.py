"""The way of a spec through the house during `topoplan rank SPEC`: how often it climbs back up.

    python tests/climbs.py cluster_specs/h100-4x8.yaml

The way is the order in which the calls of the run enter the files for the first time. It should go down the floors of
the hallway (`tests/test_architecture.py`): a spec is read, searched, computed, and shown. Each file that lies on a
higher floor than the one entered before it is a climb. What is looked up on the way is no place on it: floors 0 to 4,
which hold units and errors, the spec, layouts, the network and the operators, may be asked from anywhere above. What
runs while a module is imported is no call of the way either.
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
"""Rooms up to this floor hold what is known, not what is done with it."""


def way(*arguments: str) -> list[str]:
    """Files of the package in the order in which the calls of a command enter them, without those of imports."""
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
    """Whether a call is made by a module that is being imported, or is that of its body or of a class."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__", "").startswith("topoplan."):
            return True
        caller = caller.f_back
    return False


def floor(file: str) -> int:
    """The floor of the room that a file is in."""
    return FLOORS[Path(file).parts[0].removesuffix(".py")]


def climbs(files: Iterable[str]) -> list[tuple[str, str]]:
    """Steps of a way that lead up: (from, to)."""
    places = [file for file in files if floor(file) > LOOKED_UP]
    return [(one, other) for one, other in pairwise(places) if floor(other) > floor(one)]


def main() -> int:
    """Prints the way, a file a line, with its climbs."""
    files = way("rank", *sys.argv[1:])
    found = climbs(files)
    ups = {other for _, other in found}
    for file in files:
        sys.stdout.write(f"{floor(file):3}  {file}{'  UP' if file in ups else ''}\n")
    sys.stdout.write(f"{len(files)} files, {len(found)} climbs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
