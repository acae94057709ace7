"""`topoplan runs stop`: end a run on all its hosts."""

from __future__ import annotations

from topoplan.cli.options import AsJson
from topoplan.cli.ssh_options import AcceptNew, Grace, RunReference, access

_MARGIN_S = 15.0
"""Seconds for a host on top of the grace period and the wait after SIGKILL."""


def stop(
    run: RunReference = "last",
    grace: Grace = 10.0,
    accept_new: AcceptNew = False,
    as_json: AsJson = False,
) -> int:
    """Verifies that the run has ended.

    Exit code 0 if nothing of it is left on any host; 1 if something is, or a host could not be queried.
    """
    from topoplan.cli.node_output import warn
    from topoplan.cli.output import show
    from topoplan.errors import InputError
    from topoplan.report.stop import is_stopped, print_stop, stop_to_dict
    from topoplan.run import record
    from topoplan.run.node import SETTLE_S, stop_node
    from topoplan.run.outcome import ask_all, record_stop_request

    known = record.load(run)
    limit_s = grace + SETTLE_S + _MARGIN_S
    record_stop_request(known.run_id, grace)
    results = ask_all(
        known,
        access(accept_new=accept_new),
        lambda node, host: stop_node(host, node.run_dir, started=node.started, grace_s=grace, deadline_s=limit_s),
        deadline_s=limit_s + 1,
    )
    if is_stopped(results):
        try:
            end = {"state": "stopped", "ended": record.now_text(), "reason": "topoplan runs stop"}
            record.update(known.run_id, unless_over=True, **end)
            record.update(known.run_id, left=())
        except InputError as error:
            warn(str(error))
    show(as_json, stop_to_dict, print_stop, known, results)
    return int(not is_stopped(results))
