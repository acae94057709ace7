"""The JSON Schema of the spec file, for completion and checks in an editor."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from topoplan import catalog
from topoplan.specs.cluster import Host
from topoplan.specs.forms import ModelForm, RecomputeForm, SpecForm


def schema_of_spec() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the spec file."""
    schema = TypeAdapter(SpecForm).json_schema()
    _drop_noise(schema)
    blocks = schema["$defs"]
    for form in (ModelForm, Host, RecomputeForm):
        block = blocks[form.__name__]
        blocks[form.__name__] = {"anyOf": [block["properties"][form.short_key], block]}
    # A bare name must be in the catalog; a name in a block may be new.
    name = {"type": "string", "enum": list(catalog.gpu_names())}
    told = {key: value for key, value in schema["properties"]["gpu"].items() if key in ("description", "examples")}
    gpu = {**told, "anyOf": [name, {"$ref": "#/$defs/GpuForm"}]}
    schema["properties"] = {"$schema": {"type": "string"}, **schema["properties"], "gpu": gpu}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "topoplan spec"}


def _drop_noise(node: Any) -> None:
    """Remove pydantic's additions that no reader needs: titles of keys, empty defaults, the null branch."""
    if isinstance(node, list):
        for item in node:
            _drop_noise(item)
    elif isinstance(node, dict):
        for value in node.values():
            _drop_noise(value)
        if isinstance(node.get("title"), str):
            del node["title"]
        if "default" in node and node["default"] in (None, []):
            del node["default"]
        branches = [branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]
        if len(branches) == 1:
            del node["anyOf"]
            node.update({**branches[0], **node})
        elif branches:
            node["anyOf"] = branches
