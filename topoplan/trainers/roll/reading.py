"""Recognition of ROLL's files and commands: one document for all roles, of which one or two train."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from topoplan.reading.recognizer import SURE, Recognizer
from topoplan.reading.setup import Configuration, Variable
from topoplan.specs.source import at

ROLES = ("actor_train", "sft_train", "student_train", "student")
"""Roles that train, in the order in which they are looked up; a critic that trains beside the actor is not included."""
_OTHERS = ("actor_infer", "teacher", "critic")
_OF_ENVIRONMENTS = frozenset(["max_actions_per_traj", "env_manager_cls", "custom_envs", "custom_env"])
_STARTS = "pipeline.py"


def role_of(data: Mapping[str, Any]) -> str:
    """Return the role that trains; empty if none does."""
    return next((one for one in ROLES if strategy_of(data, one).endswith("_train")), "")


def strategy_of(data: Mapping[str, Any], role: str) -> str:
    """Return the strategy that runs a role."""
    return str(at(data, (role, "strategy_args", "strategy_name")) or "")


def _claim(data: Mapping[str, Any], _known: int) -> float:
    roles = [one for one in (*ROLES, *_OTHERS) if isinstance(at(data, (one, "strategy_args")), dict)]
    return SURE if roles or len(data.keys() & _OF_ENVIRONMENTS) >= 2 else 0.0


def path_of(configuration: Configuration, _: Sequence[Variable]) -> str | None:
    """Return the training path, which is the role's strategy: `roll-megatron_train`, `roll-fsdp2_train`."""
    role = role_of(configuration.source.data)
    return f"roll-{strategy_of(configuration.source.data, role)}" if role else None


def _runs(script: str, keys: Collection[str], _first: str) -> bool:
    return script.endswith(_STARTS) and "config_name" in keys


ROLL = Recognizer(
    trainer="roll",
    claim=_claim,
    model_keys=("pretrain", "student_pretrain", *(f"{role}.model_args.model_name_or_path" for role in ROLES)),
    file_options=("config_path", "config_name"),
    is_training_script=_runs,
    program_substring=_STARTS,
    path=path_of,
    unpredicted=(
        "this file of ROLL trains nothing that is predicted",
        "of its roles, none has strategy_name megatron_train or fsdp2_train",
        "",
    ),
)
