"""The spec file as JSON Schema, so that an editor completes and checks it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from topoplan import catalog
from topoplan.specs.cluster import Fabric
from topoplan.specs.forms import SpecForm
from topoplan.specs.job import Job


def schema_of_spec() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the spec file."""
    schema = SpecForm.model_json_schema()
    _drop_noise(schema)
    definitions = schema["$defs"]
    _add_defaults(definitions["JobForm"], Job)
    _add_defaults(definitions["FabricForm"], Fabric)
    # A name alone is one of the catalog; in a block it may be new.
    definitions["GpuForm"] = definitions["GpuForm"]["anyOf"][1]
    gpu = schema["properties"]["gpu"]
    gpu["anyOf"] = [{"type": "string", "enum": list(catalog.gpu_names())}, {"$ref": "#/$defs/GpuForm"}]
    gpu.pop("$ref", None)
    schema["properties"] = {"$schema": {"type": "string"}, **schema["properties"]}
    schema["title"] = "topoplan spec"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _drop_noise(node: Any) -> None:
    """Remove what pydantic adds and no reader needs: titles of keys, `default: null`, the branch for null."""
    if isinstance(node, list):
        for item in node:
            _drop_noise(item)
    elif isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if "default" in node and node["default"] is None:
            del node["default"]
        branches = [branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]
        if branches and len(branches) == 1:
            del node["anyOf"]
            node.update(branches[0])
        elif branches:
            node["anyOf"] = branches
        for value in node.values():
            _drop_noise(value)


def _add_defaults(definition: dict[str, Any], values: type[Job] | type[Fabric]) -> None:
    """The defaults that the frozen values hold, where key and field have one name and one unit."""
    for value in fields(values):
        if value.name in definition["properties"] and value.default not in (MISSING, None):
            default = list(value.default) if isinstance(value.default, tuple) else value.default
            definition["properties"][value.name]["default"] = default
