"""`topoplan check`: what is wrong with configurations and commands that people have."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from topoplan.cli.completion import models
from topoplan.cli.options import AsJson, Margin, NoCache, ProfilePath

if TYPE_CHECKING:
    from topoplan.lint.against import Against
    from topoplan.lint.choice import Choice

Format = Literal["text", "json", "github", "sarif"]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="IDS", help="These rules alone, with commas: ids, or how ids begin (launch)."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="IDS", help="Not these; in a file: # topoplan: ignore[IDS], or ignore-file[IDS]."),
]
Form = Annotated[
    Format,
    typer.Option("--format", help="json is --json; github marks lines of a change, sarif is for code scanning."),
]


def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="YAML, DeepSpeed JSON, scripts, Markdown, a bundle's directory, or - for standard input.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="SPEC",
            help="Predict the configurations on this cluster, and compare with the best plan.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the cluster; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="What the configurations' model is, where its path says nothing (`topoplan show models`).",
            show_default=False,
            autocompletion=models,
        ),
    ] = None,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len", metavar="TOKENS", min=1, help="How long sequences are, where the configurations do not say it."
        ),
    ] = 2048,
    margin: Margin = None,
    profile: ProfilePath = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write corrected copies beside the originals: train.fixed.yaml.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --fix, write over a file that is not ours.")] = False,
    select: Select = None,
    ignore: Ignore = None,
    form: Form = "text",
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Exit code 1: an error was found (with --fix, one is left); 2: bad input."""
    from topoplan.errors import InputError
    from topoplan.lint.choice import Choice, chosen

    if as_json and form not in ("text", "json"):
        raise InputError(f"is not for --json, which has a form of its own: {form}", where="--format")
    against = _against(cluster, overrides, margin, profile, model, seq_len, fresh=no_cache)
    choice = Choice(select=chosen(select or (), "--select"), ignore=chosen(ignore or (), "--ignore"))
    _check(files, against, choice, fix=fix, force=force, form="json" if as_json else form)


def _check(files: list[str], against: Against, choice: Choice, *, fix: bool, force: bool, form: Format) -> None:
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.lint.check import check as check_files
    from topoplan.lint.check import corrections
    from topoplan.lint.check import fix as fix_files
    from topoplan.lint.fix import write_copies
    from topoplan.report.annotations import github_lines, sarif
    from topoplan.report.check import checked_to_dict, print_checked, print_fixed

    checked = check_files(files, against, choice)
    fixed = fix_files(checked, against) if fix else None
    if fixed is not None:
        write_copies(fixed.copies, force=force)
    if form == "json":
        print_json(checked_to_dict(checked, fixed))
    elif form == "sarif":
        print_json(sarif(checked.findings))
    elif form == "github":
        sys.stdout.writelines(f"{line}\n" for line in github_lines(checked.findings))
    else:
        print_checked(stdout_console(), checked, correctable=0 if fix else corrections(checked))
        if fixed is not None:
            print_fixed(stdout_console(), checked, fixed)
    if (fixed.after if fixed else checked).count("error"):
        raise typer.Exit(1)


def _against(
    cluster: str | None,
    overrides: list[str] | None,
    margin: str | None,
    profile: str | None,
    model: str | None,
    seq_len: int,
    *,
    fresh: bool,
) -> Against:
    from functools import partial

    from topoplan.cli.search import search
    from topoplan.errors import InputError
    from topoplan.lint.against import Against

    if cluster is None:
        for option, value in (("--set", overrides), ("--margin", margin), ("--profile", profile)):
            if value:
                raise InputError("is about a cluster, and none is given", where=option, remedy="add --cluster SPEC")
        return Against(model=model, seq_len=seq_len)

    from topoplan.specs.load import load_cluster
    from topoplan.specs.profile import read_profile

    keys = [*(overrides or ()), *([f"margin={margin}"] if margin is not None else [])]
    return Against(
        cluster=load_cluster(cluster, overrides=keys),
        model=model,
        seq_len=seq_len,
        profile=None if profile is None else read_profile(profile),
        search=partial(search, fresh=fresh),
    )
