"""`topoplan show gpus`: list the GPUs of the catalog."""

from __future__ import annotations

from topoplan.cli.options import AsJson


def gpus(as_json: AsJson = False) -> None:
    """Any other GPU can be given as a block with its own figures."""
    from topoplan.cli.output import show
    from topoplan.report.lists import gpu_entries, print_gpus

    show(as_json, lambda entries: entries, print_gpus, gpu_entries())
