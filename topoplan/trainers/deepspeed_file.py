"""DeepSpeed's configuration file, as written for bundles and as found in users' files.

transformers fills in `auto` from train.yaml (integrations/deepspeed.py), so that those values are set in only one
place. Bucket sizes and switches are those of LLaMA-Factory's examples/deepspeed, which the prediction assumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys, as_number, as_whole, at
from topoplan.specs.source import below
from topoplan.trainers.sharding import Sharding
from topoplan.units import shown

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Setup

FILE = "ds_config.json"

_BUCKET_ELEMENTS = 500_000_000
_SUB_GROUP_ELEMENTS = 1_000_000_000


def deepspeed_config(layout: Layout) -> dict[str, Any]:
    """Return the configuration as a mapping."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": layout.zero_stage, **_offload(layout), **_buckets(layout)},
    }


def deepspeed_text(layout: Layout) -> str:
    """Return the text of the file."""
    return json.dumps(deepspeed_config(layout), indent=2) + "\n"


def _offload(layout: Layout) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": True}
    wanted = {"offload_optimizer": layout.offload_optimizer, "offload_param": layout.offload_param}
    return {key: dict(host) for key, on in wanted.items() if on}


def _buckets(layout: Layout) -> dict[str, Any]:
    if layout.zero_stage < 3:
        return {
            "allgather_partitions": True,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        }
    return {
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": _SUB_GROUP_ELEMENTS,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": _SUB_GROUP_ELEMENTS,
        "stage3_max_reuse_distance": _SUB_GROUP_ELEMENTS,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


# Read ----------------------------------------------------------------------------------------------------------------

NAMED_STAGE = re.compile(r"(?:zero|(?:^|[/_])z)_?([0-3])(?!\d)", re.IGNORECASE)
"""Finds the stage in file names: `zero2`, ms-swift's `zero3_offload`, LLaMA-Factory's `ds_z3_offload_config.json`."""


def of_name(written: Any, keys: Keys, setup: Setup, key: str) -> Sharding:
    """Return the sharding for a key that holds the document, or names a file or a preset.

    Raises NotPredictedError for a missing file whose name does not tell the stage, and for what has no layout.
    """
    document = written if isinstance(written, Mapping) else document_of(str(written), keys.configuration, setup)
    if document is not None:
        return of_document(document, keys, key)
    name = PurePath(str(written)).name
    match = NAMED_STAGE.search(name)
    if match is None:
        keys.not_predicted((key,), f"{key} {shown(written)}, a file that was not found,")
    stage, offloads = int(match[1]), "offload" in name
    if stage == 0:
        keys.not_predicted((key,), "ZeRO stage 0")
    # ms-swift's zero3_offload and LLaMA-Factory's ds_z3_offload_config.json offload the parameters as well.
    known = _is_preset(name)
    return Sharding(
        backend="deepspeed",
        zero_stage=stage,
        offload_optimizer=offloads,
        offload_param=offloads and stage == 3,
        assumption="" if known else f"{name} was not found, and is taken for what its name says",
    )


def _is_preset(name: str) -> bool:
    """Whether a name is a preset of ms-swift (`swift/config/`) rather than a user's file."""
    return re.fullmatch(r"zero[0-3](_offload)?", name) is not None


def of_document(document: Mapping[str, Any], keys: Keys, key: str) -> Sharding:
    """Return the sharding in a DeepSpeed configuration (`runtime/zero/config.py`, `offload_config.py`)."""
    stage = at(document, ("zero_optimization", "stage"))
    zero = at(document, ("zero_optimization",))
    if isinstance(stage, bool) or as_whole(stage) not in (1, 2, 3):
        keys.not_predicted((key,), f"ZeRO stage {shown(0 if stage is None else stage)}")
    offloads = []
    for name in ("offload_optimizer", "offload_param"):
        block = at(zero, (name,))
        device = at(block, ("device",)) if isinstance(block, Mapping) else None
        if device == "nvme":
            keys.not_predicted((key,), f"{name} to nvme")
        ratio = as_number(at(block, ("ratio",)))
        if ratio is not None and ratio != 1:
            keys.not_predicted((key,), f"{name} in part (ratio {ratio:g})")
        offloads.append(device == "cpu")
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"):
        value = at(zero, (name,))
        if value is True or (not isinstance(value, bool) and (as_whole(value) or 0) > 1):
            keys.not_predicted((key,), f"{name} {shown(value)} of DeepSpeed")
    tensor = at(document, ("tensor_parallel", "autotp_size"))
    if (as_whole(tensor) or 1) > 1:
        keys.not_predicted((key,), f"DeepSpeed's autotp_size {tensor}")
    optimizer, parameters = offloads
    if parameters and not optimizer and as_whole(stage) == 3:
        keys.not_predicted((key,), "offload_param without offload_optimizer")
    return Sharding(
        backend="deepspeed",
        zero_stage=as_whole(stage) or 0,
        offload_optimizer=optimizer,
        offload_param=parameters and as_whole(stage) == 3,  # "valid only with stage 3"
    )


def document_of(name: str, configuration: Configuration, setup: Setup) -> Mapping[str, Any] | None:
    """Return the configuration that a key names, from the given files or from disk."""
    for one in setup.of("deepspeed"):
        if PurePath(one.part.file or one.part.name).name == PurePath(name).name:
            return one.source.data
    return document_on_disk(name, configuration)


def document_on_disk(name: str, configuration: Configuration) -> Mapping[str, Any] | None:
    """Return the configuration that a key names, from the working directory or from beside the key's own file."""
    if name.lstrip().startswith("{"):  # ms-swift also accepts JSON text
        return _json(name)
    for base in (Path.cwd(), Path(configuration.part.name).parent):
        try:
            found = _json(below(base, name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if found is not None:
            return found
    return None


def _json(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
