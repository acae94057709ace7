"""`python -m tests.playground DIRECTORY`: the page with the planner in it, as static files, which need no server behind
them: Pyodide from npm, pydantic's wheel for it from PyPI, and every other package as it is installed here."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from importlib.metadata import distributions
from importlib.metadata import files as files_of
from importlib.resources import files
from pathlib import Path

import topoplan
from topoplan.cli.page import asked_on
from topoplan.page.html import playground_html

ROOT = Path(__file__).resolve().parents[1]
PYODIDE = "314.0.7"
PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
"""These three belong together: a newer Pyodide has another Python and platform, and needs other wheels."""
INSTALLED = (
    *("annotated-doc", "click", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "networkx", "packaging", "pyyaml"),
    *("rich", "shellingham", "typer"),
)
"""The imports of planning, as far as installed (newer typers need no click). Compiled modules are replaced by their
pure Python versions."""
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")


def build(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    (target / "pyodide").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        runtime(Path(scratch), target / "pyodide")
        wheels = compiled(Path(scratch))
        with zipfile.ZipFile(target / "packages.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            pack(packed, wheels)
    (target / "index.html").write_text(playground_html(asked_on()), encoding="utf-8")
    worker = files("topoplan.page") / "static" / "worker.js"
    (target / "worker.js").write_text(worker.read_text(encoding="utf-8"), encoding="utf-8")


def runtime(scratch: Path, target: Path) -> None:
    subprocess.run(
        ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"], cwd=scratch, check=True, stdout=subprocess.DEVNULL
    )
    with tarfile.open(scratch / f"pyodide-{PYODIDE}.tgz") as packed:
        for name in RUNTIME:
            content = packed.extractfile(f"package/{name}")
            (target / name).write_bytes(content.read())


def compiled(scratch: Path) -> list[Path]:
    """Return wheels of the versions pinned in pyproject.toml with their dependencies; pip refuses mismatched pairs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    where = ["--dest", str(scratch), "--python-version", PYTHON, "--platform", PLATFORM, "--platform", "any"]
    subprocess.run([*command, *where, *project["optional-dependencies"]["playground"]], check=True)
    return sorted(scratch.glob("*.whl"))


def pack(packed: zipfile.ZipFile, wheels: list[Path]) -> None:
    """Write the files of all packages into one archive."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                packed.writestr(name, content.read(name))
    here = {one.name.lower().replace("_", "-") for one in distributions()}
    for package in sorted(here & set(INSTALLED)):
        for one in files_of(package) or ():
            left_out = {"..", "__pycache__", "tests"} & set(one.parts) or one.suffix in (".so", ".pyc", ".pyd")
            if not left_out:
                packed.write(str(one.locate()), str(one))
    root = Path(topoplan.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            packed.write(path, path.relative_to(root.parent))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
