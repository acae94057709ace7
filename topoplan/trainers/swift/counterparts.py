"""Arguments that `swift sft` and `megatron sft` have under different names, so that a job may state either.

Sources, at ms-swift 4.5.2: `swift/trainers/arguments.py` and transformers' `optimization.py`;
`swift/megatron/arguments/megatron_args.py`, `swift/megatron/utils/megatron_lm_utils.py::get_optimizer_param_scheduler`
and Megatron-LM's `core/optimizer_param_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.reading.values import as_number

_NAMES = {
    "adam_epsilon": "adam_eps",
    "max_grad_norm": "clip_grad",
    "max_steps": "train_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_steps": "lr_warmup_iters",
}
"""Argument of `swift sft` -> the one of `megatron sft` with the same meaning."""
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}
"""lr_scheduler_type -> lr_decay_style. The other schedules of either command take settings that the other lacks."""
_WARMUP = ("warmup_ratio", "warmup_steps", "lr_warmup_fraction", "lr_warmup_iters")
WARMUP_KEYS = frozenset(_WARMUP)
"""Arguments of both commands that state the warm-up, of which a file may have one: ms-swift refuses warmup_ratio beside
warmup_steps, and lr_warmup_fraction hides lr_warmup_iters."""


def in_terms_of(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with those that only the other command has as this command's; others stay as they are."""
    return _for_megatron(given) if command.startswith("megatron") else _for_transformers(given)


def _for_megatron(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        number = as_number(value)
        if name == "lr_scheduler_type" and value in (*_SCHEDULES, "constant"):
            found["lr_decay_style"] = _SCHEDULES.get(value, "constant")
        elif name == "warmup_steps" and number is not None and 0 < number < 1:  # a ratio, in transformers 5
            found["lr_warmup_fraction"] = value
        elif name == "max_steps" and number is not None and number <= 0:
            continue  # transformers' word for none
        else:
            found[_NAMES.get(name, name)] = value
    if given.get("lr_scheduler_type") == "constant":
        # optimization.py, get_constant_schedule: without warm-up, whatever the arguments say.
        found = {name: value for name, value in found.items() if name not in _WARMUP} | {"lr_warmup_fraction": 0.0}
    return found | {name: given[name] for name in found.keys() & given.keys()}


def _for_transformers(given: Mapping[str, Any]) -> dict[str, Any]:
    names = {theirs: own for own, theirs in _NAMES.items()}
    schedules = {theirs: own for own, theirs in _SCHEDULES.items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "lr_decay_style" and value in schedules:
            found["lr_scheduler_type"] = schedules[value]
        else:
            found[names.get(name, name)] = value
    return found | {name: given[name] for name in found.keys() & given.keys()}
