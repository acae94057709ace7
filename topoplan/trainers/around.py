"""The context of a configuration for the expressions of relations: launch, model, sharding and cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from topoplan.catalog import gpu_table
from topoplan.operators.finetuning import linear_names
from topoplan.reading.processes import launch_of, processes_for
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import as_whole
from topoplan.specs.facts import facts_of
from topoplan.specs.source import at
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.sharding import NAMED_STAGE, document_of

UNKNOWN = object()
_OPEN_WORD = re.compile(r"\$(?:[@*]|\{(\w+)\[[@*]\]\})")
"""Arguments that a command takes from elsewhere, so that any key may be among them."""
_TO_FILL_IN = re.compile(r"<[A-Za-z][\w ]*>")
"""Placeholders for a reader to fill in, which the shell reads as redirections."""
_SLURM_GPU = re.compile(
    r"^#SBATCH[^\n]*?(?:--gpus(?:-per-node)?[= ]|--gres[= ]gpu:|--constraint[= ]|--partition[= ]|-[Cp] )"
    r"([A-Za-z][\w.-]*)",
    re.MULTILINE,
)
_OF_THE_MODEL = ("model_family", "positions", "layers", "heads", "kv_heads", "experts", "has_vision", "linears")
NAMES_AROUND = frozenset(
    [
        *_OF_THE_MODEL,
        *("nodes", "processes_per_node", "world", "path", "command", "starter", "method", "is_piece", "environment"),
        *("zero_stage", "fsdp_states", "gpu", "architecture", "versions"),
    ]
)


def context_of(setup: Setup, configuration: Configuration) -> Mapping[str, Any]:
    """Return what launch and model determine, such as process counts and model sizes; UNKNOWN for the rest."""
    started, launch = processes_for(setup, configuration), launch_of(setup, configuration)
    nodes, each = (started.nodes, started.gpus_per_node) if started else (None, None)
    if nodes == 1 and launch and "nnodes" in launch.options and launch.options["nnodes"].assumed:
        nodes = None  # the default in `${SLURM_NNODES:-1}` says nothing about the job
    found: dict[str, Any] = {
        "nodes": nodes or UNKNOWN,
        "processes_per_node": each or UNKNOWN,
        "world": nodes * each if nodes and each else UNKNOWN,
        "path": setup.training_path(configuration),
        "environment": setup.environment,
        "command": launch.program if launch else UNKNOWN,
        "starter": launch.starter if launch else UNKNOWN,
        "method": next(iter(launch.arguments), "") if launch else UNKNOWN,
        "zero_stage": _zero_stage(setup, configuration),
        "fsdp_states": _fsdp_states(setup, launch),
        **_cards(launch),
        "is_piece": not setup.is_complete(configuration)
        or (launch is not None and configuration.from_command and _is_open(launch)),
    }
    found |= {f"versions.{package}": version for package, version in setup.versions.items()}
    found |= {f"env.{one.name}": one.value for one in (launch.variables if launch else ())}
    model = model_at_hand(setup.named_model(configuration), configuration.part)
    if model is None:
        return found | dict.fromkeys(_OF_THE_MODEL, UNKNOWN)
    facts = facts_of(model)
    return found | {
        "model_family": model.model_type,
        "positions": model.max_position_embeddings or UNKNOWN,
        "layers": len(model.layers),
        "heads": facts.grouped[0].heads if facts.grouped else UNKNOWN,
        "kv_heads": facts.grouped[0].kv_heads if facts.grouped else UNKNOWN,
        "experts": facts.experts[0] if facts.experts else None,
        "has_vision": model.vision is not None,
        "linears": list(linear_names(model)),
    }


def _zero_stage(setup: Setup, configuration: Configuration) -> Any:
    """Return the ZeRO stage; None without DeepSpeed, UNKNOWN if its file is missing and has an uninformative name."""
    written = configuration.get("deepspeed")
    if written is None:
        return None if setup.is_complete(configuration) else UNKNOWN
    document = written if isinstance(written, Mapping) else document_of(str(written), configuration, setup)
    if document is not None:
        return as_whole(at(document, ("zero_optimization", "stage"))) or 0
    named = NAMED_STAGE.search(PurePath(str(written)).name)
    return int(named[1]) if named else UNKNOWN


def _fsdp_states(setup: Setup, launch: Launch | None) -> str | None:
    """Return how FSDP saves its state, from the only file of `accelerate launch`; None without one."""
    told = [one for one in setup.of("accelerate") if one.get("distributed_type") == "FSDP"]
    if launch is None or launch.starter != "accelerate" or len(told) != 1:
        return None
    names = ("fsdp_config.fsdp_state_dict_type", "fsdp_config.state_dict_type")
    return str(next(filter(None, map(told[0].at, names)), "FULL_STATE_DICT")).upper()


def _cards(launch: Launch | None) -> Mapping[str, Any]:
    asked = {one.lower() for one in _SLURM_GPU.findall(launch.part.text)} if launch else set()
    rows = ((name, row["architecture"]) for name, row in gpu_table().items())
    found = {(name.split("-")[0], architecture) for name, architecture in rows if asked & {name, name.split("-")[0]}}
    gpu, architecture = found.pop() if len(found) == 1 else (UNKNOWN, UNKNOWN)
    return {"gpu": gpu, "architecture": architecture}


def _is_open(launch: Launch) -> bool:
    """Whether a command has arguments that are unknown before it runs."""
    text = "\n".join(launch.part.text.split("\n")[launch.first_line - 1 : launch.last_line])
    arrays = {match[1] for match in _OPEN_WORD.finditer(text)}
    is_set = all(name and re.search(rf"\b{name}\+?=", launch.part.text) for name in arrays)
    return not is_set or _TO_FILL_IN.search(text) is not None
