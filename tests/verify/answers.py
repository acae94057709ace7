"""Run a Python program against a real trainer, in a separate process, and return what it prints."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def answers(
    code: str, wanted: Mapping[str, Any], folder: Path, *words: str, environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the JSON object that a program prints as its last line.

    The program's first argument is a file that holds `wanted`; `folder` is its working directory.
    """
    file = folder / "wanted.json"
    file.write_text(json.dumps(wanted))
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), *words],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found
