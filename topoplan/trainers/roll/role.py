"""The role of ROLL's document that trains: its keys at the top, and what all of its strategies have in common.

Sources, at ROLL 8eb27cc: `roll/configs/` (base_config.py, worker_config.py, model_args.py, training_args.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from topoplan.reading.nested import flattened
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_whole
from topoplan.trainers.roll.reading import role_of

LENGTH = "sequence_length"
_DEVICES = "device_mapping"
_OF_ROLE = (_DEVICES, "use_sequence_packing", "use_dynamic_batching_in_train")
_MICRO_BATCH = 8
"""`training_args.py`, per_device_train_batch_size."""


def view(configuration: Configuration, setup: Setup) -> Configuration:
    """The keys of the role that trains, those of its strategy among them."""
    data = configuration.source.data
    role = role_of(data)
    blocks = [f"{role}.{name}" for name in ("model_args", "training_args", "strategy_args.strategy_config")]
    names = {name: f"{role}.{name}" for name in _OF_ROLE}
    names |= {name: name for name in (LENGTH, "prompt_length", "response_length")}
    names["packing_algorithm"] = f"{role}.sequence_packing_args.algorithm"
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
    return replace(flat, source=replace(flat.source, data={**found, **said}))


def gpus(keys: Keys) -> int | None:
    """How many devices the role is mapped to: ROLL evaluates the text as Python."""
    written = keys.given(_DEVICES)
    try:
        return _count(ast.parse(str(written), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        keys.fail(_DEVICES, f"{_DEVICES} is {written}", expected="expected list(range(0,8)) or a list of numbers")


def _count(node: ast.expr) -> int:
    """Raises ValueError for anything but ranges and lists of numbers."""
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


def refuse_batches_by_tokens(keys: Keys) -> None:
    """Raise NotPredictedError where micro batches are cut by their tokens."""
    if keys.flag("use_dynamic_batching_in_train"):
        keys.not_predicted(("use_dynamic_batching_in_train",))
    if keys.flag("use_sequence_packing") and keys.given("packing_algorithm") not in (None, "none"):
        keys.not_predicted(("packing_algorithm",), "sequence packing by load_balance")


def assumptions(*_: object) -> Iterator[str]:
    """What is predicted of a pipeline of several roles."""
    yield "predicted is a step of the role that trains: other roles leave the GPUs while it runs"
