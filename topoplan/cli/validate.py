"""`topoplan validate`: grade predictions against measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, ProfilePath, argument, not_both, option
from topoplan.cli.output import print_json, show, stdout_console, write_and_tell
from topoplan.errors import SpecError

if TYPE_CHECKING:
    from topoplan.planner.validate import Validation


def validate(
    runs: Annotated[
        str | None,
        argument(
            "RUNS", "A .jsonl file with one measured run a line, or - for standard input; by default the shipped ones."
        ),
    ] = None,
    rows: Annotated[bool, option("--rows", "Also print every figure beside its prediction.")] = False,
    bands: Annotated[
        bool, option("--bands", "Print the error bands that the runs give, beside those of the catalog.")
    ] = False,
    profile: ProfilePath = None,
    output: Annotated[
        str | None,
        option("--output -o FILE", "Write a page (Markdown) to a file; with --bands, profiles.json with these bands."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Errors are predicted over measured, less one. Exit code 2: bad input, or nothing could be predicted."""
    from topoplan.report.validation import print_validation, validation_to_dict

    not_both("--output", output is not None, "--json", as_json)
    graded = _graded(runs, profile)
    if bands:
        _show_bands(graded, output, as_json=as_json)
    elif output is not None:
        from topoplan.report.validation import MARK, accuracy_page

        write_and_tell(output, accuracy_page(graded), mark=MARK, writer="topoplan validate")
    elif as_json:
        print_json(validation_to_dict(graded))
    else:
        print_validation(stdout_console(), graded, rows=rows)
    if not graded.runs:
        raise typer.Exit(2)


def _graded(runs: str | None, profile: str | None) -> Validation:
    from topoplan.cli.run_documents import source_text
    from topoplan.planner.measured import parse_runs, shipped_runs
    from topoplan.planner.validate import validate as grade
    from topoplan.specs.profile import read_profile

    own = None if profile is None else read_profile(profile)
    if runs is None:
        return grade(shipped_runs(), profile=own)
    text, name = source_text(runs)
    found = list(parse_runs(text, name=name))
    if not found:
        raise SpecError("nothing in it", where=name, expected="expected at least one measured run")
    return grade(found, base=Path.cwd() if runs == "-" else Path(runs).parent, profile=own)


def _show_bands(graded: Validation, output: str | None, *, as_json: bool) -> None:
    from topoplan.planner.bands import earned_bands, profiles_text
    from topoplan.report.profile import bands_to_dict, print_bands

    earned = earned_bands(graded.figures)
    if output is not None:
        text = profiles_text(earned)
        write_and_tell(output, text, mark='{\n  "volta"', writer="topoplan validate --bands")
    else:
        show(as_json, bands_to_dict, print_bands, earned)
