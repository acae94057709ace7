"""LLaMA-Factory's keys one by one: known, of today, of the right type, no secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topoplan.catalog.releases import releases
from topoplan.lint.rules.yaml import misread
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import value_of
from topoplan.reading.words import is_open
from topoplan.specs.secrets import secrets_in
from topoplan.trainers.llamafactory.key_list import (
    TrainerPath,
    bridge_keys,
    judge_key,
    known_keys,
    needed_transformers,
    plain_keys,
    removed_keys,
    templates,
    trainer_versions,
)
from topoplan.trainers.llamafactory.rules.keys import RENAMED, keys_of, newer_findings
from topoplan.units import shown


def key_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """What is wrong with each key of a configuration by itself."""
    path, known = setup.path_of(configuration) or "plain", keys_of(setup, configuration)
    newest = trainer_versions()["transformers"][1]
    since = {name: key.since for name, key in known.items() if key.package == "llamafactory" and key.since}
    yield from newer_findings(configuration, since, "llamafactory", f"LLaMA-Factory {releases()[0].name}")
    for key, value in configuration.source.data.items():
        if key in RENAMED:
            yield found(
                configuration,
                "llamafactory-renamed-key",
                "error",
                key,
                f"{key} is refused: transformers calls it {RENAMED[key]}",
                why="HfArgumentParser stops at a key that it does not know",
                remedy=f"write {RENAMED[key]}",
                edits=_renamed(configuration, key),
            )
            continue
        if key not in known:
            yield _unknown_key(configuration, key, path)
            continue
        if any(secrets_in({key: value})):
            yield found(
                configuration,
                "llamafactory-secret",
                "warning",
                key,
                f"{key} holds a token or password in a file that gets copied and shared",
                remedy="take it out and set it in the environment of the nodes (HF_TOKEN, SWANLAB_API_KEY)",
            )
            continue
        if key == "warmup_ratio" and value is not None:
            yield found(
                configuration,
                "llamafactory-deprecated-key",
                "note",
                key,
                f"warmup_ratio is deprecated in transformers 5, which still takes it in {newest}",
                remedy="write warmup_steps, as a whole number",
            )
        elif key == "logging_dir" and value is not None:
            yield found(
                configuration,
                "llamafactory-deprecated-key",
                "note",
                key,
                f"logging_dir is deprecated in transformers 5, which still takes it in {newest}",
                remedy="set TENSORBOARD_LOGGING_DIR in the environment",
            )
        elif needs := needed_transformers(known[key]):
            yield found(configuration, "llamafactory-new-key", "note", key, needs)
        if finding := _wrong_type(setup, configuration, key, path):
            yield finding


def _renamed(configuration: Configuration, key: str) -> tuple[Edit, ...]:
    """The new name, and quotes around a bare `no` with it: both stand on one line."""
    if RENAMED[key] in configuration.source.data:
        return drop(configuration, (key,))
    value = value_of(configuration, key)
    if value is False:
        return change(configuration, (key,), name=RENAMED[key], value="no")
    return change(configuration, (key,), name=RENAMED[key])


def _unknown_key(configuration: Configuration, key: str, path: TrainerPath) -> Finding:
    why = "HfArgumentParser stops at a key that it does not know"
    if key in removed_keys():
        what = f"{key} is refused by transformers {removed_keys()[key]} and newer, which no longer have it"
        if key == "overwrite_output_dir":
            what = "overwrite_output_dir is refused: on the Megatron path only transformers 4 has it"
        remedy = (
            "leave it out" if key != "overwrite_output_dir" else "leave it out, and give a new run a new output_dir"
        )
        edits = drop(configuration, (key,))
        return found(configuration, "llamafactory-removed-key", "error", key, what, why=why, remedy=remedy, edits=edits)
    remedy = judge_key(key, None, path=path).remedy
    what = f"{shown(key)} is no key of LLaMA-Factory {templates().version}, which refuses the file"
    switch = {"mca": "USE_MCA=1", "bridge": "USE_MEGATRON_BRIDGE=1", "plain": ""}
    if path != "mca" and key in known_keys() and known_keys()[key].package == "mcore_adapter":
        what = f"{key} is known to the Megatron path alone, and without USE_MCA=1 the file is refused"
        remedy = "set USE_MCA=1, or take it out"
    elif path != "bridge" and key in bridge_keys() and key not in plain_keys():
        what = f"{key} is known to Megatron Bridge alone, and without USE_MEGATRON_BRIDGE=1 the file is refused"
        remedy = "set USE_MEGATRON_BRIDGE=1, or take it out"
    elif path != "plain" and key in plain_keys():
        what, remedy = f"{key} is not known with {switch[path]}, and the file is refused", "take it out"
    elif key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        remedy = "for uneven stages write pipeline_model_parallel_layout"
    return found(configuration, "llamafactory-unknown-key", "error", key, what, why=why, remedy=remedy)


def _wrong_type(setup: Setup, configuration: Configuration, key: str, path: TrainerPath) -> Finding | None:
    """A value of another kind than the key declares; what YAML made of it is explained by `rules/yaml.py`."""
    if misread(setup, configuration, key):
        return None
    value = taken = value_of(configuration, key)
    if configuration.from_command and isinstance(text := configuration.get(key), str):
        taken = _as_argument(key, text, value, path)
    verdict = judge_key(key, taken, path=path)
    filled_in = isinstance(taken, str) and (is_open(taken) if configuration.from_command else "${" in taken)
    if verdict.trouble != "type" or filled_in:
        return None
    remedy = "" if isinstance(value, bool) else verdict.remedy
    return found(
        configuration,
        "llamafactory-wrong-value",
        "error",
        key,
        verdict.what,
        why="" if configuration.from_command else _WHY_UNCHECKED,
        remedy="; ".join(part for part in (verdict.expected, remedy) if part),
    )


_WHY_UNCHECKED = "the parser checks neither types nor choices; it goes wrong later, or counts as something else"
_BOOLEAN_WORDS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})
"""transformers `hf_argparser.py::string_to_bool`."""


def _as_argument(key: str, text: str, value: Any, path: TrainerPath) -> Any:
    """What argparse makes of text: the type that the key declares, where the text can be read so."""
    if judge_key(key, text, path=path).trouble != "type":
        return text
    if text.lower() in _BOOLEAN_WORDS and judge_key(key, True, path=path).trouble != "type":
        return True
    return value
