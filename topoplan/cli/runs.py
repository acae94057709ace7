"""`topoplan runs`: the runs that were started from this machine."""

from __future__ import annotations

from topoplan.cli.options import AsJson


def runs(as_json: AsJson = False) -> None:
    """List the runs that this user started from this machine.

    Shows what was last seen here; `topoplan status` asks the hosts.
    """
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.runs import print_runs, runs_to_dict
    from topoplan.run import record

    found = record.runs()
    if as_json:
        print_json(runs_to_dict(found))
    else:
        print_runs(stdout_console(), found)
