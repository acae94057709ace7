"""`topoplan measure`: time the GPUs and links of real machines, independent of any run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, argument, option
from topoplan.cli.output import print_json, print_written, stdout_console, write_new
from topoplan.cli.ssh_options import AcceptNew, access
from topoplan.errors import HostError, InputError

if TYPE_CHECKING:
    from topoplan.planner.measures import Measures
    from topoplan.specs.cluster import Cluster

_MOST_MINUTES = 5.0
_SPEC_SUFFIXES = (".yaml", ".yml", ".json")


def measure(
    subject: Annotated[
        list[str], argument("HOST...", "Machines as ssh takes them, rank 0 first; or a cluster spec with hosts.")
    ],
    output: Annotated[
        str | None, option("--output -o FILE", "Write what was measured, which `calibrate` takes.")
    ] = None,
    venv: Annotated[str | None, option("--venv DIR", "With HOST...: the environment that has torch there.")] = None,
    minutes: Annotated[float, option("--minutes N", "Time nothing new after these.", min=0.1, max=_MOST_MINUTES)] = 4.0,
    on_processors: Annotated[
        bool, option("--on-cpu", "Time processors and gloo, to see that all of it works.")
    ] = False,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> None:
    """Times matrix products, attention, copies, and the collectives of the groups that plans use, with torch over SSH.
    All GPUs are busy meanwhile, so the machines should be otherwise idle. Nothing is left on them.

    Exit code 1: a host could not be reached or could not measure; 2: bad input.
    """
    from topoplan.planner.measures import SCHEMA, measures_to_dict
    from topoplan.report.measures import measures_text, print_measures
    from topoplan.report.session import error_to_dict

    cluster = _cluster(subject, venv, accept_new=accept_new)
    try:
        measured = _measured(cluster, 60.0 * minutes, on_cpu=on_processors, accept_new=accept_new)
    except HostError as error:
        if not as_json:
            raise
        print_json({"schema": SCHEMA, "error": error_to_dict(error)})
        raise typer.Exit(1) from None
    if output is not None:
        write_new(output, measures_text(measured))
    if as_json:
        print_json(measures_to_dict(measured))
        return
    print_measures(stdout_console(), measured, cluster)
    if output is not None:
        print_written(output)


def _cluster(subject: list[str], venv: str | None, *, accept_new: bool) -> Cluster:
    from topoplan.specs.load import load_cluster

    if len(subject) == 1 and Path(subject[0]).suffix in _SPEC_SUFFIXES:
        if venv is not None:
            raise InputError("is for HOST...: the spec says it of each host", where="--venv")
        return load_cluster(subject[0])

    from topoplan.cli.host_words import hosts_of
    from topoplan.cli.probe import ask
    from topoplan.hosts.cluster_yaml import cluster_spec
    from topoplan.specs.source import parse_source

    asked = ask(hosts_of(subject, None, venv=venv), accept_new=accept_new)
    for error in asked.failed.values():
        raise error
    draft = cluster_spec(asked.reached)
    if draft.text is None:
        remedy = "`topoplan probe` with the same hosts says why"
        raise InputError("make no cluster", where=" ".join(subject), remedy=remedy)
    return load_cluster(parse_source(draft.text, name="the hosts"))


def _measured(cluster: Cluster, limit_s: float, *, on_cpu: bool, accept_new: bool) -> Measures:
    from topoplan.cli.preflight import targets_of
    from topoplan.hosts.measure import measure as measure_over
    from topoplan.planner.measures import measures_of
    from topoplan.remote.fanout import logged_in
    from topoplan.report.progress import ProgressLine

    with logged_in(targets_of(cluster), access(accept_new=accept_new)) as hosts:
        for error in hosts.errors.values():
            raise error
        with ProgressLine(work="the measurements") as line:
            about, rows = measure_over(hosts.connections, cluster, on_cpu=on_cpu, limit_s=limit_s, on_progress=line)
    return measures_of(about, rows, cluster.name)
