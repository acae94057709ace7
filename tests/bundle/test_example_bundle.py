"""The bundle in generated/ is up to date."""

from pathlib import Path

import pytest

from topoplan.bundle.bundle import generate
from topoplan.bundle.write import MANIFEST
from topoplan.planner.search import rank
from topoplan.specs.load import load_spec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "generated" / "h100-4x8"


def test_the_committed_example_is_what_generate_writes() -> None:
    spec = load_spec(ROOT / "cluster_specs" / "h100-4x8.yaml")
    files = generate(spec, rank(spec).plans[0])
    committed = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.iterdir() if path.name != MANIFEST}
    assert committed == files, "make readme writes it again"


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLE.glob("node-*.sh")))
def test_its_scripts_are_executable(script: str) -> None:
    assert (EXAMPLE / script).stat().st_mode & 0o111
