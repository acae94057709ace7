"""What bash and shellcheck report about scripts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


def assert_sound(*scripts: str) -> None:
    """Check that bash can parse each text and that shellcheck has no findings; skip without shellcheck."""
    with TemporaryDirectory() as directory:
        paths = [Path(directory, f"{number}.sh") for number in range(len(scripts))]
        for path, script in zip(paths, scripts, strict=True):
            path.write_text(script, encoding="utf-8")
            subprocess.run(["bash", "-n", path], check=True)
        # The wheel in the dev extra installs the program next to Python.
        shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if shellcheck is None:
            pytest.skip("shellcheck is not installed (the dev extra has it)")
        checked = subprocess.run([shellcheck, *paths], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
