"""`topoplan show models`: list the models of the catalog."""

from __future__ import annotations

from topoplan.cli.options import AsJson


def models(as_json: AsJson = False) -> None:
    """Any other model can be given as a directory or file with its config.json."""
    from topoplan.cli.output import show
    from topoplan.report.lists import model_entries, print_models

    show(as_json, lambda entries: entries, print_models, model_entries())
