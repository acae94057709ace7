"""`topoplan launch`: start a bundle on its hosts, and watch it to its end."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topoplan.cli.completion import bundles
from topoplan.cli.interrupts import Interrupts
from topoplan.cli.options import AsJson, argument, option
from topoplan.cli.output import print_json
from topoplan.cli.ssh_options import AcceptNew, Grace, HangAfter, LostHostAfter, NoPreflight
from topoplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from topoplan.hosts.needs import RunNeeds
    from topoplan.hosts.result import Result
    from topoplan.remote.connection import Connection
    from topoplan.run.bundle_reader import Bundle
    from topoplan.run.launch import Preflight
    from topoplan.run.session import Outcome
    from topoplan.run.settings import Settings


def launch(
    bundle: Annotated[str, argument("BUNDLE", "The directory that `topoplan generate` wrote.", bundles)],
    no_preflight: NoPreflight = False,
    detach: Annotated[bool, option("--detach -d", "Leave it running once all nodes have started.")] = False,
    dry_run: Annotated[
        bool, option("--dry-run", "Print every file and command (with --json, the programs too), and touch nothing.")
    ] = False,
    accept_new: AcceptNew = False,
    nodes: Annotated[list[str] | None, option("--nodes LIST", "Hosts to use: addresses, numbers, ranges.")] = None,
    exclude: Annotated[list[str] | None, option("--exclude LIST", "Hosts to leave out, in the same way.")] = None,
    stop_on_exit: Annotated[
        bool, option("--stop-on-exit", "Stop the run when `topoplan` is ended (SIGTERM, a closed terminal).")
    ] = False,
    retries: Annotated[int, option("--retries N", "Restart after failures that may not recur.", min=0)] = 0,
    grace: Grace = 10.0,
    lost_host_after: LostHostAfter = None,
    hang_after: HangAfter = None,
    as_json: AsJson = False,
) -> None:
    """Copies the bundle to its hosts over SSH and starts all nodes together.

    The first node that fails stops the others, and so does Ctrl-C; a second Ctrl-C exits at once. A closed terminal or
    a killed `topoplan` leaves the run going (see `topoplan runs`); a failed node still ends the others, but later.

    An unreachable host is retried until it answers. If its peers have lost it too, they fail, and it is blamed. With
    --lost-host-after it is given up after that time: if other hosts can be reached, the rest is stopped; if none can,
    the run is left as it is, with exit code 1.

    A run without a step for a long time is reported once, with the last output of each rank, and with the ranks' stacks
    if the hosts have py-spy. --hang-after then ends it: before the first step, any line counts as progress; afterwards,
    only a step or a progress bar. The time must be longer than a checkpoint takes.

    With --retries, the run is restarted from the last complete checkpoint, up to that many times, if a host, a rank or
    a link was lost and nothing is left on any host; not if input, software, a disk or memory is known to be at fault. A
    rank that was killed is restarted unless the logs say that memory ran out.

    Exit code: that of the first failed node; 0: all went well; 1: host failed; 2: bad input; 130: Ctrl-C; 143: SIGTERM.
    """
    from topoplan.run.bundle_reader import choose_nodes, read_bundle
    from topoplan.run.secrets import take
    from topoplan.run.settings import Settings

    settings = Settings(
        detach=detach,
        stop_on_exit=stop_on_exit,
        retries=retries,
        grace_s=grace,
        lost_after_s=lost_host_after,
        hang_after_s=hang_after,
    )
    read = read_bundle(bundle, may_lack_hosts=dry_run)
    _check_retries(read, settings)
    choose_nodes(read, nodes or (), exclude or ())
    targets = _targets(read)
    if dry_run:
        _show_dry_run(read, targets, preflight=not no_preflight, grace_s=grace, as_json=as_json)
        return
    values = take(read.draft.spec.cluster.secrets)
    done = _launch(read, targets, values, settings, accept_new=accept_new, as_json=as_json, preflight=not no_preflight)
    raise typer.Exit(done.code)


def _targets(bundle: Bundle) -> dict[str, Any]:
    from topoplan.remote.ssh_config import SshConfig, placeholders

    hosts = [node.host for node in bundle.nodes]
    by_address = SshConfig().targets(hosts) if bundle.has_hosts else placeholders(hosts)
    return dict(zip((node.name for node in bundle.nodes), by_address.values(), strict=True))


def _check_retries(bundle: Bundle, settings: Settings) -> None:
    """Raise InputError if nobody would be there to restart the run, or the trainer could not resume."""
    if settings.retries and settings.detach:
        raise InputError("nobody is there to start it again", where="--retries", remedy="leave out --detach")
    if settings.retries and not bundle.draft.run.checkpoints.resumable:
        what = "the trainer cannot go on from the checkpoints of this plan"
        raise InputError(what, where="--retries", remedy="see README.md of the bundle; or choose another plan")


def _launch(
    bundle: Bundle,
    targets: dict[str, Any],
    secrets: dict[str, str],
    settings: Settings,
    *,
    accept_new: bool,
    as_json: bool,
    preflight: bool,
) -> Outcome:
    from topoplan.cli.live_output import EventOutput
    from topoplan.report.session import LAUNCH, launch_lines, outcome_to_dict
    from topoplan.run.attempts import RetryingLaunch
    from topoplan.run.events import Event

    output = EventOutput(LAUNCH if as_json else None)
    for note in bundle.notes:
        output.tell(Event(kind="note", text=note))
    with Interrupts(endings=True) as interrupts:
        outcome = RetryingLaunch(
            bundle,
            targets,
            output.access(accept_new=accept_new),
            preflight=preflight_of(bundle) if preflight else None,
            settings=settings,
            tell=output.tell,
            interrupts=lambda: interrupts.count,
            ending=lambda: interrupts.ending,
            secrets=secrets,
        ).go()
        output.end(outcome_to_dict(outcome, LAUNCH), launch_lines(outcome), outcome.code, interrupts)
    return outcome


def bundle_needs(bundle: Bundle) -> RunNeeds:
    """Return what the hosts need for this run, by the plan and by train.yaml in its present state."""
    from topoplan.hosts.needs import needs_of
    from topoplan.specs.source import read_source
    from topoplan.trainers.trainer import MAIN_FILE

    draft = bundle.draft
    edited = read_source(bundle.directory / MAIN_FILE).data
    return needs_of(draft.spec, draft.plan, edited, draft.writer.name, own=draft.trainer)


def preflight_of(bundle: Bundle, skip: Collection[str] = ()) -> Preflight:
    """Return the checks of `topoplan preflight BUNDLE`."""
    from topoplan.hosts.preflight.preflight import preflight
    from topoplan.run.record import unfinished_by_address

    needs = bundle_needs(bundle)

    def checked(connections: Mapping[str, Connection]) -> Sequence[Result]:
        # Looked up late: by then the launch has found out which of the recorded runs of this bundle have ended.
        asked = replace(needs, earlier_runs=unfinished_by_address())
        return preflight(connections, bundle.draft.spec.cluster, asked, skip=skip)

    return checked


def _show_dry_run(bundle: Bundle, targets: dict[str, Any], *, preflight: bool, grace_s: float, as_json: bool) -> None:
    from topoplan.report.dry_run import dry_run_lines, dry_run_to_dict

    checks = bundle_needs(bundle) if preflight else None
    document = dry_run_to_dict(bundle, targets, checks=checks, grace_s=grace_s)
    if as_json:
        print_json(document)
    else:
        sys.stdout.write("\n".join(dry_run_lines(document)) + "\n")
