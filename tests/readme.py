"""Keeps the output in README.md what the program prints: `make readme`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
COMMAND = ["rank", "cluster_specs/h100-4x8.yaml", "--top", "5"]
_BLOCK = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- /table -->)", re.DOTALL)


def present_output() -> str:
    """What the README's example command prints now, as a block of Markdown."""
    done = subprocess.run(
        [sys.executable, "-m", "topoplan", *COMMAND], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(["```console", f"$ topoplan {' '.join(COMMAND)}", *lines, "```", ""])


def refreshed(text: str) -> str:
    """README.md with that output in its place."""
    output = present_output()
    return _BLOCK.sub(lambda _: output, text)


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
