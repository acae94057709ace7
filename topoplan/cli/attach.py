"""`topoplan runs attach`: watch a running run."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from topoplan.cli.options import AsJson, option
from topoplan.cli.ssh_options import AcceptNew, Grace, HangAfter, LostHostAfter, RunReference


def attach(
    run: RunReference = "last",
    tail: Annotated[int, option("--tail N", "Lines of the past to begin with.", min=0)] = 10,
    stop_on_failure: Annotated[
        bool, option("--stop-on-failure/--no-stop-on-failure", "Stop the others when a node fails, or leave them.")
    ] = True,
    grace: Grace = 10.0,
    lost_host_after: LostHostAfter = None,
    hang_after: HangAfter = None,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> int:
    """Shows the output of all nodes, each line prefixed with its node, and the training progress.

    Ctrl-C leaves the run as it is. If a node fails, the others are stopped, as with `launch`; with
    --no-stop-on-failure, the nodes that still run are reported instead. The local copies of the logs are continued. A
    host that cannot be reached is retried until it can; --lost-host-after gives it up, and stops the run if other hosts
    can be reached.

    Exit code: that of the first node that failed; 0 if all ended well; 1: a host was given up; 2: bad input; 130:
    Ctrl-C.
    """
    from topoplan.cli.event_output import EventOutput
    from topoplan.cli.interrupts import Interrupts
    from topoplan.report.session import ATTACH, attach_lines, outcome_to_dict
    from topoplan.run import record
    from topoplan.run.attach import AttachSession
    from topoplan.run.settings import Settings

    settings = Settings(
        tail_lines=tail,
        stop_on_failure=stop_on_failure,
        grace_s=grace,
        lost_after_s=lost_host_after,
        hang_after_s=hang_after,
    )
    known = record.load(run)
    output = EventOutput(ATTACH if as_json else None)
    with Interrupts(endings=True) as interrupts:
        outcome = AttachSession(
            known,
            output.access(accept_new=accept_new),
            settings=settings,
            tell=output.tell,
            # When standard output is closed, nobody is watching any more.
            interrupts=lambda: interrupts.count or interrupts.ending or output.reader_has_left,
        ).go()
        if outcome.end == "left" and not interrupts.wants_out:
            return 0
        if outcome.end == "left" and interrupts.ending:
            outcome = replace(outcome, code=128 + interrupts.ending)
        output.end(outcome_to_dict(outcome, ATTACH), attach_lines(outcome), outcome.code, interrupts)
    return outcome.code
