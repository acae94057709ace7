"""Slurm's sbatch options in a spec: the names and values that an `#SBATCH` line can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.errors import SpecError, nearest
from topoplan.specs.kinds import Checked, KeyedError
from topoplan.specs.passed_on import block, mapping_schema
from topoplan.specs.secrets import NEVER_WRITTEN, REMEDY, is_secret
from topoplan.units import shown

NAME_PATTERN = "[a-z][a-z0-9_-]{1,63}"

# Options set by the job script, because the plan determines them.
_OURS: Mapping[str, tuple[str, str]] = {
    "nodes": ("is the spec's `nodes`", "set `nodes` instead"),
    "ntasks": ("is one a node, which starts the processes of all its GPUs", "leave it out"),
    "ntasks-per-node": ("is 1, a task that starts the processes of all GPUs of its node", "leave it out"),
    "array": ("would start one training several times", "leave it out"),
    "wrap": ("would take the place of the job script", "leave it out"),
}
_LARGEST = 10**9


def check_option(name: object, value: object) -> tuple[str, str | bool]:
    """Return an option's name and value for sbatch; true means no value, false removes one of topoplan's own options.

    Underscores in names become hyphens. Raises a SpecError without a location.
    """
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise SpecError("is not an option of sbatch", expected="expected a long name, such as partition")
    option = name.replace("_", "-")
    if option in _OURS:
        what, remedy = _OURS[option]
        raise SpecError(what, remedy=remedy)
    if isinstance(value, bool):
        return option, value
    if not isinstance(value, str | int):
        raise SpecError(f"{shown(value)} is not text", remedy="put it in quotes")
    text = value.strip() if isinstance(value, str) else str(value) if abs(value) <= _LARGEST else ""
    # Neither ' nor \ can appear within the single quotes of an #SBATCH line.
    if not text.isprintable() or not re.fullmatch(r"[^'\\]{1,1024}", text):
        raise SpecError(f"{shown(value)} is not usable", expected="expected text on one line without ' and \\")
    return option, text


def output_variables() -> frozenset[str]:
    """Return the environment variables that Slurm sets for a job and its steps."""
    return frozenset(_document()["variables"])


def unknown_option(option: str) -> str:
    """Return a warning about an option unknown to sbatch itself (a cluster's plugin may add it), or an empty string."""
    document = _document()
    if option in document["options"]:
        return ""
    oldest, newest = document["versions"]
    what = f"sbatch of Slurm {oldest} to {newest} has no option {option!r}, unless a plugin of the cluster has it"
    return "; ".join(filter(None, (what, nearest(option, document["options"]))))


@cache
def _document() -> Mapping[str, Any]:
    text = files("topoplan.catalog").joinpath("sbatch_options.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document


def _options(value: Any) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for name, content in block(value, "options of sbatch, such as `partition: gpu`").items():
        if content is None:
            continue
        words = str(content).split(",")  # such as `export: ALL,HF_TOKEN=...`
        if is_secret("", content) or any(is_secret(*word.partition("=")[::2]) for word in words):
            raise KeyedError(name, f"looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
        try:
            option, usable = check_option(name, content)
        except SpecError as error:
            raise KeyedError(name, error.what, expected=error.expected, remedy=error.remedy) from None
        if option in options:
            raise KeyedError(name, "is given twice", remedy="keep one of them")
        options[option] = usable
    return options


BATCH_OPTIONS = Checked(_options, mapping_schema(f"^{NAME_PATTERN}$", "string", "integer", "boolean"))
