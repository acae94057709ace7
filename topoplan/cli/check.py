"""`topoplan check`: find mistakes in existing configurations and commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from topoplan.cli.completion import models
from topoplan.cli.options import AsJson, NoCache, SpecOptions, argument, option
from topoplan.cli.output import print_json, stdout_console
from topoplan.errors import InputError

if TYPE_CHECKING:
    from topoplan.lint.check import Checked
    from topoplan.lint.finding_filter import FindingFilter
    from topoplan.lint.prediction_target import PredictionTarget
    from topoplan.specs.cluster import Cluster

Format = Literal["text", "json", "github", "sarif"]


def check(
    files: Annotated[
        list[str],
        argument("FILE...", "YAML, DeepSpeed JSON, scripts, Markdown, a bundle's directory, or - for standard input."),
    ],
    *,
    cluster: Annotated[
        str | None,
        option("--cluster SPEC", "Predict the configurations on this cluster, and compare with the best plan."),
    ] = None,
    of_cluster: Annotated[SpecOptions, ("gpu", "nodes", "gpus_per_node", "overrides", "margin", "profile")],
    model: Annotated[
        str | None,
        option(
            "--model NAME",
            "What the configurations' model is, where its path says nothing (`topoplan show models`).",
            models,
        ),
    ] = None,
    seq_len: Annotated[
        int, option("--seq-len TOKENS", "How long sequences are, where the configurations do not say it.", min=1)
    ] = 2048,
    fix: Annotated[bool, option("--fix", "Write corrected copies beside the originals: train.fixed.yaml.")] = False,
    force: Annotated[bool, option("--force", "With --fix, write over a file that is not ours.")] = False,
    select: Annotated[
        list[str] | None, option("--select IDS", "Only these rules: ids or their beginnings (launch), comma-separated.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        option("--ignore IDS", "Skip these rules; in a file: # topoplan: ignore[IDS], or ignore-file[IDS]."),
    ] = None,
    form: Annotated[
        Format, option("--format", "json is --json; github marks lines of a change, sarif is for code scanning.")
    ] = "text",
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Exit code 1: an error was found (with --fix, one is left); 2: bad input."""
    from topoplan.lint.finding_filter import FindingFilter, chosen

    if as_json and form not in ("text", "json"):
        raise InputError(f"is not for --json, which has a form of its own: {form}", where="--format")
    against = _against(cluster, of_cluster, model, seq_len, fresh=no_cache)
    choice = FindingFilter(select=chosen(select or (), "--select"), ignore=chosen(ignore or (), "--ignore"))
    checked, copies = _check(files, against, choice, fix=fix, force=force, form="json" if as_json else form)
    if form == "text" and not as_json:
        _print_next(checked, copies, replace(of_cluster, model=model), cluster, seq_len)
    if checked.count("error"):
        raise typer.Exit(1)


def _check(
    files: list[str], against: PredictionTarget, choice: FindingFilter, *, fix: bool, force: bool, form: Format
) -> tuple[Checked, Mapping[str, str]]:
    """Check the files and print what was found. Returns the last check, with `fix` that of the corrected copies, and
    file -> its copy."""
    from topoplan.lint.check import check as check_files
    from topoplan.lint.check import corrections
    from topoplan.lint.check import fix as fix_files
    from topoplan.lint.fix import write_copies
    from topoplan.report.check import checked_to_dict, github_lines, print_checked, print_fixed, sarif

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
    if fixed is None:
        return checked, {}
    return fixed.after, {part.name: str(copy.path) for copy in fixed.copies for part in copy.parts}


def _print_next(
    checked: Checked, copies: Mapping[str, str], said: SpecOptions, cluster: str | None, seq_len: int
) -> None:
    from topoplan.report.check import better_plan
    from topoplan.report.tables import paragraph
    from topoplan.trainers.data_parallel import USUAL_SEQ_LEN

    if checked.cluster is None:
        if checked.setup.complete_configurations and not checked.setup.bundles:
            how = "--gpu NAME --nodes N, or --cluster SPEC, adds whether it fits, how fast it is, and the best plan."
            paragraph(stdout_console(), how, style="dim")
        return
    better = better_plan(checked)
    if better is not None and Path(better.file).is_file():
        on, job = better.spec.cluster, better.spec.job
        if on.nodes != (checked.cluster.nodes if cluster is not None or said.gives("nodes") else 1):
            said = replace(said, nodes=str(on.nodes))
        if on.gpus_per_node != checked.cluster.gpus_per_node:
            said = replace(said, gpus_per_node=str(on.gpus_per_node))
        if job.seq_len == seq_len != USUAL_SEQ_LEN:
            said = replace(said, seq_len=str(seq_len))
        options, layout = replace(said, job=copies.get(better.file, better.file)), better.plan.layout
        try:
            options.read(cluster)
        except InputError:  # a model that only the flags of a command describe
            what = "--model NAME, for the model of this file, adds the command that writes the best plan."
            paragraph(stdout_console(), what, style="dim")
            return
        words = [*options.words(cluster), "--backend", layout.backend, "--plan", better.plan.id]
        stdout_console().print(f"\nNext  {join(['topoplan', 'generate', *words])}", soft_wrap=True, highlight=False)


def _against(
    cluster: str | None, said: SpecOptions, model: str | None, seq_len: int, *, fresh: bool
) -> PredictionTarget:
    from topoplan.cli.search import search
    from topoplan.lint.prediction_target import PredictionTarget
    from topoplan.specs.profile import read_profile

    if cluster is None and said.gpu is None:
        if said:
            remedy = "add --cluster SPEC, or --gpu NAME"
            raise InputError("is about a cluster, and none is given", where=said.words(None)[0], remedy=remedy)
        return PredictionTarget(model=model, seq_len=seq_len)
    return PredictionTarget(
        cluster=said.read_cluster(cluster),
        cluster_of_nodes=None if cluster is not None or said.nodes is not None else partial(_with_nodes, said),
        model=model,
        seq_len=seq_len,
        profile=None if said.profile is None else read_profile(said.profile),
        search=partial(search, fresh=fresh, best_only=True),
    )


def _with_nodes(said: SpecOptions, nodes: int) -> Cluster:
    return replace(said, nodes=str(nodes)).read_cluster(None)
