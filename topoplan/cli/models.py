"""`topoplan models`: the models of the catalog."""

from __future__ import annotations

from topoplan.cli.options import AsJson


def models(as_json: AsJson = False) -> None:
    """List the models that can be named in a spec.

    Any other model can be given as a directory or file with its config.json.
    """
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.lists import model_entries, print_models

    entries = model_entries()
    if as_json:
        print_json(entries)
    else:
        print_models(stdout_console(), entries)
