"""`topoplan launch`: start a bundle on its hosts, and watch it to its end."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topoplan.cli.options import AsJson
from topoplan.cli.ssh_options import AcceptNew

if TYPE_CHECKING:
    from topoplan.launch.bundle_reader import Bundle
    from topoplan.launch.events import Event
    from topoplan.launch.run import Outcome, Preflight


def launch(
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="The directory that `topoplan generate` wrote.", show_default=False)
    ],
    no_preflight: Annotated[bool, typer.Option("--no-preflight", help="Do not check the hosts first.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running once all nodes have started.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every file and command, and touch nothing.")
    ] = False,
    accept_new: AcceptNew = False,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", metavar="LIST", help="Hosts to use: addresses, numbers, ranges.", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="LIST", help="Hosts to leave out, in the same way.", show_default=False),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, max=3600, help="From SIGTERM to SIGKILL.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Put a bundle on its hosts over SSH, start all nodes together, and follow them to the end.

    The first node that fails stops the others, and so does Ctrl-C; a second Ctrl-C leaves at once. A closed terminal
    or a killed `topoplan` leaves the run going: see `topoplan status`, `attach` and `stop`.

    Exit code: that of the node that failed first; 0 when all ended well; 1: a host failed; 2: bad input; 130: Ctrl-C.
    """
    from topoplan.launch.bundle_reader import choose_nodes, read_bundle
    from topoplan.launch.ssh_config import SshConfig

    read = read_bundle(bundle)
    choose_nodes(read, nodes or (), exclude or ())
    config = SshConfig()
    by_address = config.targets(node.host for node in read.nodes)
    targets = dict(zip((node.name for node in read.nodes), by_address.values(), strict=True))
    if dry_run:
        _show_dry_run(read, targets, preflight=not no_preflight, as_json=as_json)
        return
    outcome = _launch(
        read, targets, detach=detach, accept_new=accept_new, grace_s=grace, as_json=as_json, preflight=not no_preflight
    )
    raise typer.Exit(outcome.code)


def _launch(
    bundle: Bundle,
    targets: dict[str, Any],
    *,
    detach: bool,
    accept_new: bool,
    grace_s: float,
    as_json: bool,
    preflight: bool,
) -> Outcome:
    import json

    from topoplan.cli.live_output import LiveOutput
    from topoplan.cli.ssh_options import access
    from topoplan.launch.events import Event
    from topoplan.launch.run import Launch, Settings
    from topoplan.report.launch import event_text, event_to_dict, outcome_lines, outcome_to_dict

    output = LiveOutput(keep_status=not as_json)

    def tell(event: Event) -> None:
        if as_json:
            text = json.dumps(event_to_dict(event))
            output.line(text) if event.kind in ("line", "bar") else output.message(text, stdout=True)
        elif event.status is not None:
            output.show(event.status)
        elif event.kind in ("line", "bar"):
            output.line(event_text(event))
        else:
            output.message(event_text(event))

    who = access(accept_new=accept_new)
    who.on_new_key = lambda new: tell(
        Event(
            kind="new-key",
            text=f"{new.host}: new host key {new.key.fingerprint} noted in {new.file}",
            data={"host": new.host, "fingerprint": new.key.fingerprint},
        )
    )
    for note in bundle.notes:
        tell(Event(kind="note", text=note))
    with Interrupts() as interrupts:
        outcome = Launch(
            bundle,
            targets,
            who,
            preflight=_preflight(bundle) if preflight else None,
            settings=Settings(detach=detach, grace_s=grace_s),
            tell=tell,
            interrupts=lambda: interrupts.count,
        ).go()
        if as_json:
            output.message(json.dumps(outcome_to_dict(outcome)), stdout=True)
        else:
            for line in outcome_lines(outcome):
                output.message(line)
        while not output.close(limit_s=1.0):
            if interrupts.count:
                # A terminal that is halted (Ctrl-S) must not keep a user who wants to leave; nor may the last flush.
                os._exit(outcome.code)
    return outcome


def _preflight(bundle: Bundle) -> Preflight:
    """The checks of `topoplan preflight BUNDLE`."""
    from topoplan.hosts.needs import needs_of
    from topoplan.launch.bundle_reader import TRAINER_FILE
    from topoplan.launch.checks import preflight
    from topoplan.specs.source import read_source

    recorded = bundle.recorded
    edited = read_source(bundle.directory / TRAINER_FILE).data
    needs = needs_of(recorded.spec, recorded.plan, edited, recorded.trainer)
    return lambda connections: preflight(connections, recorded.spec.cluster, needs)


def _show_dry_run(bundle: Bundle, targets: dict[str, Any], *, preflight: bool, as_json: bool) -> None:
    import sys

    from topoplan.cli.output import print_json
    from topoplan.report.launch import dry_run_lines, dry_run_to_dict

    if as_json:
        print_json(dry_run_to_dict(bundle, targets, preflight=preflight))
    else:
        sys.stdout.write("\n".join(dry_run_lines(bundle, targets, preflight=preflight)) + "\n")


class Interrupts:
    """Counts Ctrl-C in place of being ended by it. The fourth one ends the program as ever."""

    def __init__(self) -> None:
        """None yet."""
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # in the background of a shell script, Ctrl-C is for others
            signal.signal(signal.SIGINT, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    def _count(self, *_: object) -> None:
        # Nothing else: a handler runs between two steps of whatever the main thread does.
        self.count += 1
        if self.count > 2:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
