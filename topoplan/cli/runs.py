"""`topoplan runs`: the runs that were started from this machine."""

from __future__ import annotations

import typer

from topoplan.cli.options import AsJson
from topoplan.errors import InputError


def runs(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Those that this user started from this machine, as they were last seen here; `runs status` asks the hosts."""
    if verb := ctx.invoked_subcommand:
        if as_json:
            raise InputError("--json goes behind the verb", remedy=f"as in `topoplan runs {verb} --json`")
        return

    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.runs import print_runs, runs_to_dict
    from topoplan.run import record

    found = record.runs()
    if as_json:
        print_json(runs_to_dict(found))
    else:
        print_runs(stdout_console(), found)
