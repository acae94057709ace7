"""`topoplan show schema`: print the JSON Schema of the spec file."""

from __future__ import annotations


def schema() -> None:
    """An editor with this schema completes and checks a spec while it is written."""
    from topoplan.cli.output import print_json
    from topoplan.specs.forms import schema_of_spec

    print_json(schema_of_spec())
