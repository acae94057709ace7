"""A spec as the text of its file, with the meaning of each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from textwrap import wrap
from typing import Any

from topoplan.specs.forms import JobForm, SpecForm
from topoplan.specs.scalars import scalar
from topoplan.specs.spec import Spec
from topoplan.specs.written import assumed_keys, cluster_keys, job_keys, model_key
from topoplan.trainers.yaml_text import one_line, spec_line

MARK = "# A spec for topoplan, as `topoplan init` wrote it."
"""The first line of every spec written by topoplan."""
_WIDTH = 100
_OFFERED = {"dataset": "my_data", "samples": 10_000, "packing": True}
"""Commonly needed keys of a job, written as comments if they are not given."""


def spec_text(spec: Spec, notes: Sequence[str] = ()) -> str:
    """Return the whole file; `notes` are sentences on where the job comes from."""
    blocks = [[MARK, "# Where a line is left out, or behind a #, its usual value is taken."], [*_cluster_lines(spec)]]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n\n" + job_text(spec, notes)


def job_text(spec: Spec, notes: Sequence[str] = ()) -> str:
    """Return only the model, the job, and whose plans are searched."""
    head = [_line(SpecForm, "model", model_key(spec.model))]
    if spec.trainer is not None:
        head.append(_line(SpecForm, "trained_by", spec.trainer))
    return "\n".join([*head, "", *_notes(notes), "job:", *_job_lines(spec)]) + "\n"


def _cluster_lines(spec: Spec) -> Iterator[str]:
    cluster = spec.cluster
    for key, value in cluster_keys(cluster).items():
        yield from _value_lines(SpecForm, key, value)
    if assumed := assumed_keys(cluster):
        yield f"# Assumed, as in the usual machine of {cluster.gpu.name}; correct it where yours is another:"
        for key, value in assumed.items():
            yield "# " + _line(SpecForm, key, value)


def _job_lines(spec: Spec) -> Iterator[str]:
    keys = job_keys(spec.job)
    for key, value in keys.items():
        yield from _value_lines(JobForm, key, value, indent="  ")
    for key, value in _OFFERED.items():
        if key not in keys and (key != "samples" or spec.job.lengths is None):
            yield "# " + _line(JobForm, key, value, indent="  ")


def _value_lines(form: type[Any], key: str, value: Any, *, indent: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        yield spec_line(f"{indent}{key}", "", _meaning(form, key))
        for name, one in value.items():
            yield f"{indent}  {scalar(str(name))}: {scalar(one)}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield spec_line(f"{indent}{key}", "", _meaning(form, key))
        for one in value:
            yield f"{indent}  - {scalar(one)}"
    else:
        yield _line(form, key, value, indent=indent)


def _line(form: type[Any], key: str, value: Any, *, indent: str = "") -> str:
    return spec_line(f"{indent}{key}", scalar(value), _meaning(form, key))


def _meaning(form: type[Any], key: str) -> str:
    """Return the first phrase of a key's description in the schema."""
    own = next(own for own in fields(form) if own.metadata.get("alias", own.name) == key)
    said: str = own.metadata["description"]
    text = said.partition(";")[0].partition(". ")[0].rstrip(".")
    first = text.partition(" ")[0]
    return text[0].lower() + text[1:] if first.isalpha() and first[1:] == first[1:].lower() else text


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield from wrap(one_line(note), _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)
