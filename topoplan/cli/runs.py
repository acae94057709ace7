"""`topoplan runs`: list the runs started from this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.options import AsJson, option
from topoplan.cli.ssh_options import time_option
from topoplan.errors import InputError


def runs(
    ctx: typer.Context,
    measured: Annotated[
        bool, option("--measured", "What each took, beside what was predicted, for those that tell.")
    ] = False,
    prune: Annotated[
        bool, option("--prune", "Forget those that have ended, with the copies of their logs here.")
    ] = False,
    older_than: Annotated[
        float | None, time_option("--older-than", "Of those only what ended so long ago, such as 30d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the runs that this user started from this machine, as last seen here; `runs status` queries the hosts.
    `topoplan calibrate --runs` learns from them.

    --prune touches no host. Runs not known to have ended are kept, and so are records that cannot be read.
    """
    if verb := ctx.invoked_subcommand:
        if as_json:
            raise InputError("--json goes behind the verb", remedy=f"as in `topoplan runs {verb} --json`")
        return

    from topoplan.cli.output import show
    from topoplan.report.runs import print_measured, print_pruned, print_runs, pruned_to_dict, runs_to_dict
    from topoplan.run import record

    if older_than is not None and not prune:
        raise InputError("--older-than says what to forget", remedy="give --prune too")
    if prune:
        gone, freed_bytes = record.prune(older_than or 0.0)
        show(as_json, pruned_to_dict, print_pruned, gone, freed_bytes)
        return
    found = record.runs()
    show(as_json, runs_to_dict, print_measured if measured else print_runs, found)
