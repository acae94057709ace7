"""`topoplan preflight`: check the hosts before a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.completion import checks
from topoplan.cli.options import AsJson, argument, option
from topoplan.cli.output import show
from topoplan.cli.ssh_options import AcceptNew, access
from topoplan.errors import SpecError

if TYPE_CHECKING:
    from topoplan.hosts.needs import RunNeeds
    from topoplan.remote.ssh_config import Target
    from topoplan.specs.cluster import Cluster


def preflight(
    subject: Annotated[
        str,
        argument(
            "SPEC|BUNDLE", "A cluster spec with hosts, or for more checks the directory or plan.json of a bundle."
        ),
    ],
    skip: Annotated[list[str] | None, option("--skip CHECK", "Leave out a check; may be repeated.", checks)] = None,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> None:
    """Changes nothing on the hosts, and takes a few seconds. Exit code 1: a check failed; 2: bad input."""
    from topoplan.hosts.preflight.checks import refuse_unknown

    refuse_unknown(skip or (), option="--skip")
    cluster, needs = _read(subject)
    targets = targets_of(cluster)

    from topoplan.hosts.preflight.preflight import preflight as preflight_over
    from topoplan.remote.fanout import logged_in
    from topoplan.run.record import unfinished_by_address
    from topoplan.run.secrets import check

    needs = needs and replace(needs, earlier_runs=unfinished_by_address())

    with logged_in(targets, access(accept_new=accept_new)) as hosts:
        checks = preflight_over(hosts.results, cluster, needs, skip=skip or ())
    own = check(cluster.secrets)
    checks = checks if own is None or own.name in (skip or ()) else (own, *checks)

    from topoplan.report.hosts import preflight_to_dict, print_preflight, worst

    show(as_json, preflight_to_dict, print_preflight, cluster.name, list(targets), checks)
    if worst(checks) == "failure":
        raise typer.Exit(1)


def _read(subject: str) -> tuple[Cluster, RunNeeds | None]:
    from topoplan.trainers.trainer import PLAN_FILE

    path = Path(subject)
    if not path.is_dir() and path.suffix != ".json":
        from topoplan.specs.load import load_cluster

        return load_cluster(path), None

    if path.is_dir() or (path.name == PLAN_FILE and path.is_file()):
        from topoplan.cli.launch import bundle_needs
        from topoplan.run.bundle_reader import read_bundle

        # What `launch` refuses is refused here too, before any host is asked.
        bundle = read_bundle(path)
        return bundle.draft.spec.cluster, bundle_needs(bundle)

    from topoplan.bundle.plan_file import read_plan_file
    from topoplan.bundle.whole import refuse_incomplete
    from topoplan.hosts.needs import needs_of

    refuse_incomplete(path)
    recorded = read_plan_file(path)
    return recorded.spec.cluster, needs_of(recorded.spec, recorded.plan, None, recorded.trainer)


def targets_of(cluster: Cluster) -> dict[str, Target]:
    """Return the SSH targets of the cluster's hosts. Raises SpecError for no hosts, too few, or a duplicate."""
    from topoplan.remote.ssh_config import SshConfig

    if not cluster.hosts:
        raise SpecError(
            "the spec names no hosts",
            where=cluster.name,
            remedy="add `hosts: [node0, node1]` to it, or have `topoplan probe HOST... -o cluster.yaml` write a spec",
        )
    if len(cluster.hosts) != cluster.nodes:
        raise SpecError(f"{len(cluster.hosts)} hosts for {cluster.nodes} nodes", where="hosts")
    targets = SshConfig().targets(cluster.hosts)
    if len(targets) != cluster.nodes:
        raise SpecError("a host is named twice", where="hosts", remedy="name each machine once")
    return targets
