"""`topoplan profile`: the calibration constants of a GPU, with their sources and error bands."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.options import AsJson, ProfilePath


def profile(
    gpu: Annotated[
        str | None, typer.Argument(metavar="[GPU]", help="A name of `topoplan gpus`.", show_default=False)
    ] = None,
    profile: ProfilePath = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the constants as a YAML file to change, which --profile takes.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the measured constants behind the predictions for a GPU, and where they come from.

    Without a GPU: all profiles. Exit code 2: bad input.
    """
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.errors import InputError
    from topoplan.report.profile import (
        print_profile,
        print_profiles,
        profile_text,
        profile_to_dict,
        profiles_to_dict,
    )
    from topoplan.specs.gpu_profile import profile_of
    from topoplan.specs.known import gpu as gpu_named
    from topoplan.specs.profile import read_profile

    if output is not None and as_json:
        raise InputError("--output and --json cannot be used together", remedy="leave one out")
    if gpu is None:
        if output is not None or profile is not None:
            raise InputError("no GPU is named", remedy="`topoplan gpus` lists the names")
        if as_json:
            print_json(profiles_to_dict())
        else:
            print_profiles(stdout_console())
        return
    card = gpu_named(gpu)
    own = None if profile is None else read_profile(profile)
    if own is not None:
        own.check_gpu(card)
    found = profile_of(card, own)
    if output is not None:
        _write_new(output, profile_text(card, found))
        stdout_console().print(f"Wrote {output}", soft_wrap=True)
    elif as_json:
        print_json(profile_to_dict(card, found))
    else:
        print_profile(stdout_console(), card, found)


def _write_new(output: str, text: str) -> None:
    """Write a file that is not there yet: a person may have changed the one that is."""
    from pathlib import Path

    from topoplan.errors import OutputError

    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise OutputError("exists", where=output, remedy="name another, or remove it first") from error
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=output) from error
