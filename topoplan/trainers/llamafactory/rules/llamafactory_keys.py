"""Checks of LLaMA-Factory's keys one by one: whether each is known, current, of the right type, and not a secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topoplan.catalog.packages import releases
from topoplan.reading.edits import change, corrected_name, drop
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import value_of
from topoplan.reading.words import is_open
from topoplan.specs.secrets import secrets_in
from topoplan.trainers.key_classes import newer_keys
from topoplan.trainers.llamafactory.key_list import (
    TrainerPath,
    bridge_keys,
    judge_key,
    known_keys,
    needed_transformers,
    newer_than,
    own_removed_keys,
    plain_keys,
    removed_keys,
    templates,
    trainer_versions,
)
from topoplan.trainers.llamafactory.rules.keys import RENAMED, keys_of
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.llamafactory.rules.yaml_values import misread
from topoplan.units import shown

_OF_EVALUATION = frozenset(["task", "task_dir", "batch_size", "lang", "n_shot", "save_dir", "download_mode"])
"""Keys of `llamafactory-cli eval` (hparams/evaluation_args.py)."""
_VALUES_OF_BEFORE = {("quantization_method", "bitsandbytes"): "0.9.3"}
"""Key and value -> the first LLaMA-Factory version that uses another word for the value."""


def key_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Report faults of single keys."""
    path, known = setup.training_path(configuration) or "plain", keys_of(setup, configuration)
    since = {name: key.since for name, key in known.items() if key.package == "llamafactory" and key.since}
    for key, needs, version in newer_keys(configuration, since):
        newer, oldest = newer_than(version), releases()[0].name
        yield RULES["llamafactory-new-key"].at(
            configuration, key, needs=needs, newer=newer, oldest=oldest, since=version
        )
    for key, value in configuration.source.data.items():
        if key in RENAMED:
            edits = _renamed(configuration, key)
            yield RULES["llamafactory-renamed-key"].at(configuration, key, renamed=RENAMED[key], edits=edits)
        elif key in _OF_EVALUATION and "task" in configuration.source.data:
            continue
        elif key not in known:
            yield _unknown_key(configuration, key, path)
        elif any(secrets_in({key: value})):
            yield RULES["llamafactory-secret"].at(configuration, key)
        else:
            if key in ("warmup_ratio", "logging_dir") and value is not None:
                newest = trainer_versions()["transformers"][1]
                yield RULES[f"llamafactory-deprecated-key.{key}"].at(configuration, key, newest=newest)
            elif needs := needed_transformers(known[key]):
                first = known[key].since
                rule = RULES[f"llamafactory-new-key.{'transformers' if first else 'build'}"]
                yield rule.at(configuration, key, needs=needs, since=first)
            if finding := _wrong_type(setup, configuration, key, path):
                yield finding


def _renamed(configuration: Configuration, key: str) -> tuple[Edit, ...]:
    """Return edits to the new name, quoting a bare `no` at the same time because both are on one line."""
    value = value_of(configuration, key)
    if RENAMED[key] in configuration.source.data:
        return drop(configuration, (key,)) if value == value_of(configuration, RENAMED[key]) else ()
    if value is False:
        return change(configuration, (key,), name=RENAMED[key], value="no")
    return change(configuration, (key,), name=RENAMED[key])


def _unknown_key(configuration: Configuration, key: str, path: TrainerPath) -> Finding:
    if key == "overwrite_output_dir" and key in removed_keys():
        return RULES["llamafactory-removed-key.overwrite_output_dir"].at(configuration, key)
    if key in removed_keys():
        edits = () if value_of(configuration, key) else drop(configuration, (key,))  # removing a disabled key is safe
        return RULES["llamafactory-removed-key"].at(configuration, key, version=removed_keys()[key], edits=edits)
    if key in own_removed_keys():
        return RULES["llamafactory-removed-key.own"].at(configuration, key, version=own_removed_keys()[key])
    if path != "mca" and key in known_keys() and known_keys()[key].package == "mcore_adapter":
        return RULES["llamafactory-unknown-key.mca"].at(configuration, key)
    if path != "bridge" and key in bridge_keys() and key not in plain_keys():
        return RULES["llamafactory-unknown-key.bridge"].at(configuration, key)
    if path != "plain" and key in plain_keys():
        switch = "USE_MCA=1" if path == "mca" else "USE_MEGATRON_BRIDGE=1"
        return RULES["llamafactory-unknown-key.plain"].at(configuration, key, switch=switch)
    remedy = judge_key(key, None, path=path).remedy
    if key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        remedy = "for uneven stages write pipeline_model_parallel_layout"
    name, version = shown(key), templates().version
    edits = corrected_name(configuration, key)
    return RULES["llamafactory-unknown-key"].at(
        configuration, key, name=name, version=version, remedy=remedy, edits=edits
    )


def _wrong_type(setup: Setup, configuration: Configuration, key: str, path: TrainerPath) -> Finding | None:
    """Report a value of the wrong type, unless YAML's misreading explains it (`yaml_values.py`)."""
    if misread(setup, configuration, key) or (key in _SPLIT and isinstance(configuration.get(key), list)):
        return None
    value = taken = value_of(configuration, key)
    if configuration.from_command and isinstance(text := configuration.get(key), str):
        taken = _as_argument(key, text, value, path)
    verdict = judge_key(key, taken, path=path)
    filled_in = isinstance(taken, str) and (is_open(taken) if configuration.from_command else "${" in taken)
    if verdict.trouble != "type" or filled_in:
        return None
    if version := _VALUES_OF_BEFORE.get((key, str(taken))):
        return RULES["llamafactory-wrong-value.before"].at(configuration, key, verdict=verdict.what, version=version)
    rule = RULES["llamafactory-wrong-value.argument" if configuration.from_command else "llamafactory-wrong-value"]
    remedy = "; ".join(filter(None, (verdict.expected, "" if isinstance(value, bool) else verdict.remedy)))
    return rule.at(configuration, key, verdict=verdict.what, remedy=remedy)


_SPLIT = frozenset(
    [
        *("dataset", "eval_dataset", "interleave_probs", "lora_target", "oft_target", "additional_target"),
        *("galore_target", "apollo_target", "freeze_trainable_modules", "freeze_extra_modules"),
    ]
)
"""Keys whose text split_arg of `hparams/` splits at commas, and which may also be lists."""
_BOOLEAN_WORDS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})
"""Words that transformers `hf_argparser.py::string_to_bool` accepts."""


def _as_argument(key: str, text: str, value: Any, path: TrainerPath) -> Any:
    """Convert text as argparse does: to the type that the key declares, if the text can be read so."""
    if judge_key(key, text, path=path).trouble != "type":
        return text
    if text.lower() in _BOOLEAN_WORDS and judge_key(key, True, path=path).trouble != "type":
        return True
    return value
