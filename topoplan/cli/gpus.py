"""`topoplan gpus`: the GPUs of the catalog."""

from __future__ import annotations

from topoplan.cli.options import AsJson


def gpus(as_json: AsJson = False) -> None:
    """List the GPUs that can be named in a spec.

    Any other GPU can be given as a block with its own figures.
    """
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.lists import gpu_entries, print_gpus

    entries = gpu_entries()
    if as_json:
        print_json(entries)
    else:
        print_gpus(stdout_console(), entries)
