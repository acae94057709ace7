"""Keeps the output in README.md, its picture, and docs/checks.md what the program says: `make readme`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checks_page import checks_page
from tests.verbs_page import PAGE, verbs_page

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CHECKS = ROOT / "docs" / "checks.md"
PICTURE = ROOT / "docs" / "timeline.svg"
_BLOCK = re.compile(r"(?<=<!-- output -->\n)```console\n\$ (topoplan [^\n]*)\n.*?(?=<!-- /output -->)", re.DOTALL)
_PICTURE = re.compile(r"`(topoplan timeline [^`]*) -o docs/timeline\.svg`")


def _run(command: str) -> str:
    """What a command line that begins with `topoplan` prints, in the root of the repository."""
    script = f'topoplan() {{ "{sys.executable}" -m topoplan "$@"; }}; {command}'
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: `check` has found errors
        raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def refreshed(text: str) -> str:
    """README.md with the present output of each command between its marks."""

    def block(found: re.Match[str]) -> str:
        lines = [line.rstrip() for line in _run(found[1]).rstrip().splitlines()]
        return "\n".join(["```console", f"$ {found[1]}", *lines, "```", ""])

    return _BLOCK.sub(block, text)


def picture(text: str) -> str:
    """The picture, drawn by the command that README.md names below it."""
    commands = _PICTURE.findall(text)
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / PICTURE.name
        _run(f"{commands[0]} -o '{target}'")
        return target.read_text(encoding="utf-8")


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    README.write_text(refreshed(before), encoding="utf-8")
    PICTURE.write_text(picture(before), encoding="utf-8")
    CHECKS.write_text(checks_page(), encoding="utf-8")
    PAGE.write_text(verbs_page(), encoding="utf-8")
