"""A new user gets from an empty directory to a bundle in three commands, and sees the next command on an 80 x 24
terminal."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.journeys import COLUMNS, DIRECTORY, LINES, MOST_COMMANDS, next_command, read, rows, run, session, written

JOURNEYS = sorted(path.stem for path in DIRECTORY.glob("*.txt"))
LONG = {"a100-roce", "h100-alone", "h20-moe", "h800-deepseek"}
SPECS = Path("cluster_specs")
SMALL_SPECS = {"a100-1x8"}


def some(names: list[str], quick: set[str]) -> list[object]:
    """Return the names as parameters; those that take more than a few seconds are left to `make readme-check`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.readme) for name in names]


@pytest.mark.parametrize("name", some(JOURNEYS, set(JOURNEYS) - LONG))
def test_a_journey_shows_what_is_recorded(name: str) -> None:
    path = DIRECTORY / f"{name}.txt"
    title, commands = read(path)
    shown = written(title, session(commands[0][0]))
    assert shown == path.read_text(encoding="utf-8"), "the output has changed: run `make readme`, and look at it"


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_ends_with_a_bundle_after_commands_that_were_pasted(name: str) -> None:
    _, commands = read(DIRECTORY / f"{name}.txt")
    assert len(commands) <= MOST_COMMANDS
    for (_, shown), (command, _) in pairwise(commands):
        assert command == next_command(shown)
    last, shown = commands[-1]
    assert last.startswith("topoplan generate ")
    assert "/train.yaml\n" in shown.partition("\nWrote ")[2]
    for command, shown in commands:
        if command.startswith("topoplan rank "):
            says_what_to_do(shown)


@pytest.mark.parametrize("name", some([path.stem for path in sorted(SPECS.glob("*.yaml"))], SMALL_SPECS))
def test_a_shipped_spec_shows_what_to_type_on_one_screen(name: str) -> None:
    says_what_to_do(run(f"topoplan rank {SPECS / name}.yaml"))


def says_what_to_do(shown: str) -> None:
    """Check that the last screen shows the best and a safe plan, or ways out, and then the complete next command."""
    screen = rows(shown)[-(LINES - 1) :]  # the last row holds the shell's next prompt
    assert all(len(row) <= COLUMNS for row in screen)
    starts = [row[:4] for row in screen]
    assert "Next" in starts
    if shown.startswith("topoplan: no layout fits"):
        assert any(row.startswith("      topoplan rank ") for row in screen)
    else:
        assert starts.index("Best") < starts.index("Safe") < starts.index("Next")
    command = next_command(shown)
    assert command is not None
    assert f"Next  {command}" in "".join(screen)
