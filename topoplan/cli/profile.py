"""`topoplan show profile`: the calibration constants of a GPU, with their sources and error bands."""

from __future__ import annotations

from typing import Annotated

from topoplan.cli.completion import gpus
from topoplan.cli.options import AsJson, ProfilePath, argument, not_both, option


def profile(
    gpu: Annotated[str | None, argument("GPU", "A name of `topoplan show gpus`.", gpus)] = None,
    profile: ProfilePath = None,
    output: Annotated[
        str | None, option("--output -o FILE", "Write the constants as a YAML file to change, which --profile takes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Each constant is shown with its source. Without a GPU, lists all profiles. Exit code 2: bad input."""
    from topoplan.cli.output import print_written, show
    from topoplan.errors import InputError
    from topoplan.report import profile as report
    from topoplan.specs.gpu_profile import profile_of
    from topoplan.specs.known import gpu as gpu_named
    from topoplan.specs.profile import read_profile

    not_both("--output", output is not None, "--json", as_json)
    if gpu is None:
        if output is not None or profile is not None:
            raise InputError("no GPU is named", remedy="`topoplan show gpus` lists the names")
        show(as_json, report.profiles_to_dict, report.print_profiles)
        return
    card = gpu_named(gpu)
    own = None if profile is None else read_profile(profile)
    if own is not None:
        own.check_gpu(card)
    found = profile_of(card, own)
    if output is None:
        show(as_json, report.profile_to_dict, report.print_profile, card, found)
    else:
        write_new(output, report.profile_text(card, found))
        print_written(output)


def write_new(output: str, text: str) -> None:
    """Write a new file; an existing one is never overwritten, because it may have been edited."""
    from pathlib import Path

    from topoplan.errors import OutputError

    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise OutputError("exists", where=output, remedy="name another, or remove it first") from error
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=output) from error
