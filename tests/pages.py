"""The outputs in README.md and docs/, which `make readme` updates."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checks_page import checks_page
from tests.verbs_page import PAGE, verbs_page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
CHECKS = DOCS / "checks.md"
PICTURE = DOCS / "timeline.svg"
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), DOCS / "cost-model" / "index.md"]
}
_OUTPUT = re.compile(r"(?<=<!-- output -->\n)```text\n\$ (topoplan [^\n]*)\n.*?(?=<!-- /output -->)", re.DOTALL)
_PICTURE = re.compile(r"`(topoplan timeline [^`]*) -o docs/timeline\.svg`")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, except the outputs written by `make readme`."""
    return re.findall(rf"^```{language}\n(.*?)^```", _OUTPUT.sub("", text), re.DOTALL | re.MULTILINE)


def shown(text: str) -> list[tuple[str, str]]:
    """Return (command, output block) pairs of a page."""
    return [(found[1], found[0]) for found in _OUTPUT.finditer(text)]


def block(command: str) -> str:
    """Return a command with its current output."""
    lines = [line.rstrip() for line in _run(command).rstrip().splitlines()]
    return "\n".join(["```text", f"$ {command}", *lines, "```", ""])


def picture() -> str:
    """Return the drawing made by the command that a page names below it."""
    (command,) = {found for path in PAGES.values() for found in _PICTURE.findall(path.read_text(encoding="utf-8"))}
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / PICTURE.name
        _run(f"{command} -o '{target}'")
        return target.read_text(encoding="utf-8")


def _run(command: str) -> str:
    """Return the current output of a `topoplan` command line, run in the root of the repository."""
    script = f'topoplan() {{ "{sys.executable}" -m topoplan "$@"; }}; {command}'
    environment = {**os.environ, "XDG_CACHE_HOME": os.devnull}
    environment.pop("COLUMNS", None)
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode not in (0, 1):  # 1 means that `check` found errors
        raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for path in PAGES.values():
        before = path.read_text(encoding="utf-8")
        path.write_text(_OUTPUT.sub(lambda found: block(found[1]), before), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    CHECKS.write_text(checks_page(), encoding="utf-8")
    PAGE.write_text(verbs_page(), encoding="utf-8")
