"""`topoplan attach`: watch a run that goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.ssh_options import AcceptNew, RunReference, access


def attach(
    run: RunReference = "last",
    tail: Annotated[int, typer.Option("--tail", metavar="N", min=0, help="Lines of the past to begin with.")] = 10,
    accept_new: AcceptNew = False,
) -> int:
    """Watch a run until it ends: the output of all nodes, each line behind its node.

    Ctrl-C leaves the run as it is. The exit code is the run's; 1 if a host was lost; 130 after Ctrl-C.
    """
    from topoplan.cli.exit_codes import INTERRUPTED
    from topoplan.cli.node_output import show_streams, warn
    from topoplan.cli.status import ASK_S
    from topoplan.errors import HostError
    from topoplan.launch import record
    from topoplan.launch.connection import Stream
    from topoplan.launch.node import follow_node, node_state
    from topoplan.launch.outcome import exit_code, noted
    from topoplan.launch.reach import ask_all, reach
    from topoplan.report.status import node_words

    known = record.load(run)
    try:
        with reach(known, access(accept_new=accept_new)) as reached:
            opened = ask_all(
                reached, lambda node, host: follow_node(host, node.run_dir, tail_lines=tail), deadline_s=ASK_S
            )
            show_streams({label: one for label, one in opened.items() if isinstance(one, Stream)}, prefix=True)
            states = ask_all(
                reached, lambda node, host: node_state(host, node.run_dir, deadline_s=ASK_S), deadline_s=ASK_S + 1
            )
    except KeyboardInterrupt:
        warn(f"left; the run goes on. `topoplan attach {known.run_id}` watches it again, `topoplan stop` ends it")
        return INTERRUPTED
    for label, state in states.items():
        if isinstance(state, HostError):
            warn(str(state))
        elif state.code is None:
            warn(f"{label}: {node_words(state)}")
    noted(known, states)
    code = exit_code(states)
    return 1 if code is None else code
