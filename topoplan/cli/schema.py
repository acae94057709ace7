"""`topoplan show schema`: what a spec file may hold."""

from __future__ import annotations


def schema() -> None:
    """An editor that knows it completes and checks a spec while it is written."""
    from topoplan.cli.output import print_json
    from topoplan.specs.load import spec_json_schema

    print_json(spec_json_schema())
