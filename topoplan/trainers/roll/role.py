"""Recognition of ROLL's documents of all roles, and the role that trains: its keys moved to the top level.

Sources, at ROLL 8eb27cc: `roll/configs/` (base_config.py, worker_config.py, model_args.py, training_args.py).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.reading.nested import flattened
from topoplan.reading.recognizer import SURE, Recognizer
from topoplan.reading.setup import Configuration, Setup, Variable
from topoplan.reading.values import Keys, as_whole
from topoplan.specs.job import Job
from topoplan.specs.source import at
from topoplan.trainers.codec import Reading

LENGTH = "sequence_length"
VISION, PROJECTOR = "freeze_vision_tower", "freeze_multi_modal_projector"
"""Keys of a job."""
_DEVICES = "device_mapping"
_TOKENS = "max_tokens_per_microbatch_in_train"
_OF_ROLE = (_DEVICES, "use_sequence_packing", "use_dynamic_batching_in_train", _TOKENS)
_PACKED = "max_packed_sequence_length_train"
LORA_RANK = 8
"""Default of lora_rank in `model_args.py`."""
_MICRO_BATCH = 8
"""Default of per_device_train_batch_size in `training_args.py`."""


def view(configuration: Configuration, setup: Setup) -> Configuration:
    """Return the keys of the training role, including those of its strategy, at the top level."""
    data = configuration.source.data
    role = role_of(data)
    blocks = [f"{role}.{name}" for name in ("model_args", "training_args", "strategy_args.strategy_config")]
    names = {name: f"{role}.{name}" for name in _OF_ROLE}
    names |= {name: name for name in (LENGTH, "prompt_length", "response_length")}
    names |= {name: f"{role}.sequence_packing_args.{name}" for name in ("algorithm", _PACKED)}
    flat = flattened(configuration, setup, blocks, names)
    found = flat.source.data
    both = [as_whole(found.get(name)) for name in ("prompt_length", "response_length")]
    dtype = found.get("dtype", "bf16")
    said = {
        LENGTH: found.get(LENGTH) or sum(filter(None, both)) or None,
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "stage": "dpo" if "chosen_key" in data else "sft",
        "per_device_train_batch_size": found.get("per_device_train_batch_size", _MICRO_BATCH),
    }
    return replace(flat, source=replace(flat.source, data={**found, **said, **_by_tokens({**found, **said})}))


def _by_tokens(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the micro-batches for ROLL's modes that form them by token count, if all samples have full length.

    utils/dynamic_batching.py pads samples to one length and takes as many as the token limit allows; load_balance of
    utils/sequence_packing.py lays samples end to end.
    """
    tokens, limit, packed = (as_whole(data.get(key)) for key in (LENGTH, _TOKENS, _PACKED))
    samples = data["per_device_train_batch_size"] * (as_whole(data.get("gradient_accumulation_steps")) or 1)
    if data.get("use_dynamic_batching_in_train") and tokens and limit and limit >= tokens:
        size = min(limit // tokens, samples)
        return {"per_device_train_batch_size": size, "gradient_accumulation_steps": ceil(samples / size)}
    if data.get("use_sequence_packing") and data.get("algorithm") == "load_balance" and tokens and packed:
        return {
            LENGTH: packed,
            "packing": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": ceil(samples * tokens / packed),
        }
    return {}


def devices(mapping: object) -> int:
    """Return the number of devices in a mapping, whose text ROLL evaluates as Python. Raises ValueError."""
    try:
        return _count(ast.parse(str(mapping), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError from error


def gpus(keys: Keys) -> int | None:
    """Return the number of devices that the role is mapped to."""
    written = keys.given(_DEVICES)
    try:
        return devices(written)
    except ValueError:
        keys.fail(_DEVICES, f"{_DEVICES} is {written}", expected="expected list(range(0,8)) or a list of numbers")


def _count(node: ast.expr) -> int:
    """Count devices. Raises ValueError for anything but ranges and lists of numbers."""
    match node:
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _count(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
            return len(range(*(_number(one) for one in args)))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return len([_number(one) for one in items])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _count(left) + _count(right)
    raise ValueError


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10**6:
        return node.value
    raise ValueError


def frozen(keys: Keys, towers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return for each freezable part whether freeze_module_prefix freezes it; `towers` lists the parts per prefix.

    Raises NotPredictedError for any other prefix.
    """
    written = str(keys.given("freeze_module_prefix") or "")
    prefixes = [one.strip() for one in written.split(",") if one.strip()]
    if not towers.keys() >= set(prefixes):
        keys.not_predicted(("freeze_module_prefix",), remedy=f"predicted are {listed([*towers])}")
    found = {part for one in prefixes for part in towers[one]}
    return {part: part in found for part in (VISION, PROJECTOR)}


def packed(keys: Keys) -> dict[str, Any]:
    """Return a job's keys for packed samples that do not attend to each other; empty without packing."""
    return {"packing": True, "trainer": {"neat_packing": True}} if keys.flag("packing") else {}


def assumptions(reading: Reading, layout: Layout, job: Job) -> Iterator[str]:
    """State what is predicted of a pipeline of several roles, and of micro-batches formed by token count."""
    yield "predicted is a step of the role that trains: other roles leave the GPUs while it runs"
    if reading.keys.flag("use_dynamic_batching_in_train"):
        samples = f"{layout.micro_batch_size} samples of {job.seq_len:,} tokens"
        yield f"micro batches, which ROLL cuts by their tokens, are taken to be {samples}"
    if job.packing:
        yield f"samples fill packs of {job.seq_len:,} tokens, and are all as long as they may be"


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
