"""Turn YAML and JSON parts into configurations by recognizing which trainer their keys belong to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.errors import SpecError
from topoplan.reading.parts import Part
from topoplan.reading.recognizer import SURE, Recognizers, keys_of, misspelt_keys
from topoplan.reading.setup import Configuration
from topoplan.specs.source import Source, parse_source

READ = (
    "read are the YAML of LLaMA-Factory, ms-swift, Trinity-RFT and accelerate, the JSON of DeepSpeed, "
    "launch scripts and documents with these"
)
_OF_TOPOPLAN = frozenset(["gpus_per_node", "nodes", "gpu", "hosts", "job", "fabric"])


class UnknownKindError(SpecError):
    """A YAML or JSON document that belongs to no known trainer."""


def configuration_of(part: Part, recognizers: Recognizers, *, trainer: str | None = None) -> Configuration:
    """Return the configuration in a YAML or JSON part; `trainer` is the trainer if a command determines it.

    Raises SpecError if the part cannot be parsed, or UnknownKindError if no trainer is recognized.
    """
    source = _source(part)
    guessed, is_sure = _guess(source.data, recognizers)
    if is_sure or trainer is None:
        trainer = guessed
    if trainer is None:
        hint = _hint(source.data)
        raise UnknownKindError(
            "is a configuration of an unknown kind", where=part.place(None), expected=READ, remedy=hint
        )
    recognizer = next((one for one in recognizers if one.trainer == trainer), None)
    misspelt = misspelt_keys(recognizer, source.data.keys())
    return Configuration(trainer=trainer, part=part, source=source, misspelt=misspelt)


def _source(part: Part) -> Source:
    try:
        if part.kind == "json":
            return _json_source(part)
        return parse_source(part.text, name=part.name)
    except SpecError as error:
        raise SpecError(
            error.what, where=_in_file(part, error.where), expected=error.expected, remedy=error.remedy
        ) from None


def _in_file(part: Part, where: str) -> str:
    """Convert `name:line:column` in the text of a part to the line in the file."""
    match = re.fullmatch(r":(\d+)(?::\d+)?", where.removeprefix(part.name))
    if not part.lines or match is None:
        return where
    return part.place(int(match.group(1)))


def _json_source(part: Part) -> Source:
    """Parse JSON strictly with the JSON parser, and get the line of each value from the YAML parser."""
    data: Any = None
    try:
        data = json.loads(part.text)
    except RecursionError:
        pass  # the YAML parser below reports it, with the line
    except json.JSONDecodeError as error:
        at = _last_comma(part.text, error.pos)
        raise SpecError(
            f"is not valid JSON: {error.msg if at is None else 'a comma behind the last item'}",
            where=f"{part.name}:{error.lineno if at is None else part.text.count(chr(10), 0, at) + 1}",
            remedy="JSON has no comments, no commas behind the last item and double quotes only",
        ) from None
    except ValueError as error:
        raise SpecError(f"is not valid JSON: {error}", where=f"{part.name}:1") from None
    return replace(parse_source(part.text.replace("\t", " "), name=part.name), data=data)


def _last_comma(text: str, fault: int) -> int | None:
    """Return where the comma is that the bracket at a parser's `fault` must not follow; None for any other fault."""
    before = text[: fault + text.startswith(",", fault)].rstrip()  # since Python 3.13 the fault is the comma itself
    follows = text[len(before) :].lstrip()
    return len(before) - 1 if before.endswith(",") and follows.startswith(("}", "]")) else None


def _guess(data: Mapping[str, Any], recognizers: Recognizers) -> tuple[str | None, bool]:
    """Return the trainer that the keys belong to, and whether that is certain."""
    known = len(data.keys() & keys_of(recognizers))
    claims = {one.trainer: one.claim(data, known) for one in recognizers}
    best = max(claims, key=lambda name: claims[name])
    claim = claims[best]
    if claim >= SURE:
        return best, claim == SURE
    if isinstance(data.get("model"), dict):
        return None, False
    is_enough = claim > 2 or (claim >= 1 and known) or 0 < claim < 1
    return (best if is_enough else None), False


def _hint(data: Mapping[str, Any]) -> str:
    """Return what an unrecognized document may be instead."""
    schema = data.get("schema")
    if isinstance(schema, str) and schema.startswith("topoplan."):
        return "for a bundle give its directory"
    if {"apiVersion", "kind"} <= data.keys():
        return (
            "it looks like a manifest of Kubernetes: give the command in it as a script, and the trainer's file itself"
        )
    if len(data.keys() & _OF_TOPOPLAN) >= 2:
        return "it looks like a cluster spec of topoplan: see `topoplan rank`"
    return ""
