"""`topoplan runs status`: query the hosts of a run for its status."""

from __future__ import annotations

from topoplan.cli.options import AsJson
from topoplan.cli.ssh_options import AcceptNew, RunReference, access

ASK_S = 15.0
"""Seconds for a host to report the state of its job."""


def status(run: RunReference = "last", accept_new: AcceptNew = False, as_json: AsJson = False) -> int:
    """Exit code 0 if every host answered, whatever the answer; 1 if one did not."""
    from topoplan.cli.node_output import warn
    from topoplan.cli.output import show
    from topoplan.errors import HostError, InputError
    from topoplan.report.status import print_status, status_to_dict
    from topoplan.run import record
    from topoplan.run.node import node_state
    from topoplan.run.outcome import ask_all, record_end_of

    known = record.load(run)
    states = ask_all(
        known,
        access(accept_new=accept_new),
        lambda node, host: node_state(host, node.run_dir, started=node.started, deadline_s=ASK_S),
        deadline_s=ASK_S + 1,
    )
    try:
        known = record_end_of(known, states)
    except InputError as error:
        warn(str(error))
    show(as_json, status_to_dict, print_status, known, states)
    return int(any(isinstance(state, HostError) for state in states.values()))
