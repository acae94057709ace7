"""Rules on trainers that are checked but never written for: ROLL, Megatron-LM and LLaMA-Factory's v1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup
from topoplan.trainers.around import context_of
from topoplan.trainers.key_classes import KeyClasses, undefined
from topoplan.trainers.llamafactory.key_list import keys_for, plain_keys
from topoplan.trainers.relations import Relations, read_relations
from topoplan.trainers.roll.role import devices

RULES = read_rules(__package__, "only_read.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """How one trainer is checked."""

    trainer: str
    rule: str
    relations: Relations
    keys: KeyClasses | None = None
    fork_by: str = ""
    """A key found only in a fork that has rules of its own; its configurations are skipped."""


def _keys(listed: str, prefix: str, *, ignores_others: bool) -> KeyClasses:
    return KeyClasses(
        listed=listed,
        top="Top",
        unknown=RULES[f"{prefix}-unknown-key"],
        others=RULES.get(f"{prefix}-unknown-key.others"),
        wrong=RULES[f"{prefix}-wrong-value"],
        ignores_others=ignores_others,
    )


_ALL = (
    _Judged(
        trainer="roll",
        rule="roll-refused-together",
        relations=read_relations("topoplan.trainers.roll", "relations.toml"),
        keys=_keys("roll", "roll", ignores_others=True),  # dacite ignores keys that it does not know
    ),
    _Judged(
        trainer="llamafactory-v1",
        rule="v1-refused-together",
        relations=read_relations("topoplan.trainers.llamafactory.rules", "v1_relations.toml"),
        keys=_keys("llamafactory_v1", "v1", ignores_others=False),
    ),
    _Judged(
        trainer="megatron-lm",
        rule="megatron-lm-refused-together",
        relations=read_relations("topoplan.trainers", "megatron_lm.toml"),
        keys=_keys("megatron_lm", "megatron-lm", ignores_others=False),
        fork_by="deepspeed",  # found in Megatron-DeepSpeed
    ),
)


def _is_devices(mapping: object) -> bool:
    try:
        return devices(mapping) > 0
    except ValueError:
        return False


def _no_megatron(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of ROLL's strategy_config that are arguments neither of mcore_adapter nor of transformers."""
    return [key for key in config if key not in keys_for("mca") and key not in plain_keys()]


def _wrong_megatron(config: Mapping[str, Any]) -> list[str]:
    """Return `key: value` for each key whose value is not among its choices."""
    choices = {key: keys_for("mca")[key].choices for key in config if key in keys_for("mca")}
    return [f"{key}: {config[key]}" for key, some in choices.items() if some and config[key] not in (None, *some)]


_FUNCTIONS = {
    "devices": devices,
    "is_devices": _is_devices,
    "no_megatron": _no_megatron,
    "wrong_megatron": _wrong_megatron,
}


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults in the configurations of these trainers."""
    for judged in _ALL:
        for configuration in setup.of(judged.trainer):
            if judged.fork_by and configuration.get(judged.fork_by) is not None:
                continue
            if judged.keys is not None and setup.is_complete(configuration):
                yield from judged.keys.findings(configuration)
            if judged.trainer == "roll":
                yield from undefined(configuration, RULES["roll-undefined-reference"])
            known = context_of(setup, configuration)
            unwise = RULES.get(f"{judged.rule}.unwise")
            yield from judged.relations.findings(RULES[judged.rule], configuration, known, _FUNCTIONS, unwise)
