"""How a data-parallel configuration shards its states, as its files and launcher say.

Sources: DeepSpeed runtime/zero/; accelerate commands/config/config_args.py, utils/launch.py; transformers'
training_args.py; ms-swift's swift/config/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from topoplan.reading.mpi import MPI
from topoplan.reading.named_files import beside
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_number, as_whole, at
from topoplan.specs.source import below, plain_scalar
from topoplan.trainers.codec import StatedSharding
from topoplan.units import shown


def sharding_of(keys: Keys, setup: Setup) -> StatedSharding:
    """Return the sharding of a configuration.

    Raises NotPredictedError if it depends on files or a launcher that are not available, or has no corresponding
    layout.
    """
    configuration = keys.configuration
    if written := keys.given("deepspeed"):
        return sharding_of_name(written, keys, setup, "deepspeed")
    if written := keys.given("fsdp"):
        return _of_keys(written, keys)
    launch = launch_of(setup, configuration)
    starter = launch.starter if launch else ""
    told = list(setup.of("accelerate"))
    if len(told) == 1 and starter in ("accelerate", ""):
        return _of_accelerate(told[0], keys, setup)
    key = next(
        (name for name in ("finetuning_type", "tuner_type", "train_type") if name in configuration.source.data),
        "deepspeed",
    )
    if starter in ("accelerate", "deepspeed"):
        keys.not_predicted(
            (key,), f"what `{starter}` reads the sharding from was not given, and this", remedy=_NAME_FILE[starter]
        )
    others = MPI & set(launch.wrappers) if launch and not starter else ()
    if others:
        keys.not_predicted(
            (key,), f"what `{min(others)}` starts, and how many processes,", remedy="predicted is a start with torchrun"
        )
    is_alone = launch is not None and visible_gpus(launch) == 1
    if configuration.trainer == "swift" and not (starter or is_alone or (launch and launch.variable("NPROC_PER_NODE"))):
        # cli/main.py starts one process; it spreads the model's layers over several visible GPUs (device_map auto).
        keys.not_predicted(
            (key,),
            "one process that spreads the model over all GPUs that it sees (no NPROC_PER_NODE)",
            remedy="set NPROC_PER_NODE to the GPUs of a node",
        )
    return StatedSharding()


_NAME_FILE = {
    "accelerate": "name accelerate's file with --config_file",
    "deepspeed": "name DeepSpeed's file with --deepspeed",
}
"""Starter -> how its command says what it reads the sharding from."""

# DeepSpeed -----------------------------------------------------------------------------------------------------------

NAMED_STAGE = re.compile(r"(?:zero|(?:^|[/_])z)_?([0-3])(?!\d)", re.IGNORECASE)
"""Finds the stage in file names: `zero2`, ms-swift's `zero3_offload`, LLaMA-Factory's `ds_z3_offload_config.json`."""


_STAGES = "predicted are stages 1 to 3, and training without DeepSpeed"


def sharding_of_name(written: Any, keys: Keys, setup: Setup, key: str) -> StatedSharding:
    """Return the sharding for a key that holds the document, or names a file or a preset.

    Raises NotPredictedError for a file that was not read and whose name does not tell the stage, and for what has no
    layout.
    """
    document = written if isinstance(written, Mapping) else document_of(str(written), keys.configuration, setup)
    if document is not None:
        return sharding_of_document(document, keys, key)
    name = PurePath(str(written)).name
    match = NAMED_STAGE.search(name)
    if match is None:
        keys.not_predicted(
            (key,), f"{key} {shown(written)}, a file that was not read,", remedy="put it where the key names it"
        )
    stage, offloads = int(match[1]), "offload" in name
    if stage == 0:
        keys.not_predicted((key,), "ZeRO stage 0", remedy=_STAGES)
    # ms-swift's zero3_offload and LLaMA-Factory's ds_z3_offload_config.json offload the parameters as well.
    is_preset = re.fullmatch(r"zero[0-3](_offload)?", name) is not None  # of ms-swift (`swift/config/`)
    return StatedSharding(
        backend="deepspeed",
        zero_stage=stage,
        offload_optimizer=offloads,
        offload_param=offloads and stage == 3,
        assumption="" if is_preset else f"{name} was not read, and is taken for what its name says",
    )


def sharding_of_document(document: Mapping[str, Any], keys: Keys, key: str) -> StatedSharding:
    """Return the sharding in a DeepSpeed configuration (`runtime/zero/config.py`, `offload_config.py`)."""
    stage = at(document, ("zero_optimization", "stage"))
    zero = at(document, ("zero_optimization",))
    if isinstance(stage, bool) or as_whole(stage) not in (1, 2, 3):
        keys.not_predicted((key,), f"ZeRO stage {shown(0 if stage is None else stage)}", remedy=_STAGES)
    offloads = []
    for name in ("offload_optimizer", "offload_param"):
        block = at(zero, (name,))
        device = at(block, ("device",)) if isinstance(block, Mapping) else None
        if device == "nvme":
            keys.not_predicted((key,), f"{name} to nvme", remedy="predicted is cpu")
        ratio = as_number(at(block, ("ratio",)))
        if ratio is not None and ratio != 1:
            keys.not_predicted((key,), f"{name} in part (ratio {ratio:g})", remedy="predicted is ratio 1")
        offloads.append(device == "cpu")
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"):
        value = at(zero, (name,))
        if value is True or (not isinstance(value, bool) and (as_whole(value) or 0) > 1):
            keys.not_predicted(
                (key,), f"{name} {shown(value)} of DeepSpeed", remedy=f"leave {name} out to plan it without"
            )
    tensor = at(document, ("tensor_parallel", "autotp_size"))
    if (as_whole(tensor) or 1) > 1:
        keys.not_predicted(
            (key,), f"DeepSpeed's autotp_size {tensor}", remedy="leave autotp_size out to plan it without"
        )
    optimizer, parameters = offloads
    if parameters and not optimizer and as_whole(stage) == 3:
        keys.not_predicted(
            (key,), "offload_param without offload_optimizer", remedy="offload both, or the optimizer alone"
        )
    return StatedSharding(
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
    return _on_disk(name, configuration)


def _on_disk(name: str, configuration: Configuration) -> Mapping[str, Any] | None:
    """Return the configuration that a key names, from the working directory or from beside the key's own file."""
    if name.lstrip().startswith("{"):  # ms-swift also accepts JSON text
        return _json(name)
    for base in beside(configuration.part):
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


# FSDP ----------------------------------------------------------------------------------------------------------------

_YES = frozenset(["1", "true", "y", "yes", "on"])
_FSDP1 = "FSDP's first version is predicted as FSDP2, which shards the same states"


def _of_keys(written: Any, keys: Keys) -> StatedSharding:
    """Return the sharding in transformers' `fsdp` and `fsdp_config`, or in ms-swift's `--fsdp`."""
    is_swift = keys.configuration.trainer == "swift"
    if is_swift and written == "fsdp2":  # swift/config/fsdp2.json
        return StatedSharding(backend="fsdp2", checkpoints=True)
    config = keys.given("fsdp_config")
    if is_swift:
        found = written if isinstance(written, Mapping) else _on_disk(str(written), keys.configuration)
        if found is None:
            keys.not_predicted(("fsdp",), remedy="put the file where the key names it")
        written, config = found.get("fsdp", "full_shard auto_wrap"), found.get("fsdp_config", {})
    elif isinstance(config, str):
        config = _on_disk(config, keys.configuration)
    words = [str(word) for word in written] if isinstance(written, list) else str(written).split()
    config = config if isinstance(config, Mapping) else {}
    if not {"full_shard", "hybrid_shard"} & set(words) or config.get("reshard_after_forward") is False:
        keys.not_predicted(("fsdp",), remedy="predicted are full_shard and hybrid_shard")
    version = as_whole(config.get("fsdp_version", config.get("version"))) or (2 if is_swift else 1)
    return StatedSharding(
        backend="fsdp2",
        sharding="hybrid" if "hybrid_shard" in words else "full",
        offload="offload" in words,
        checkpoints=_on(config.get("activation_checkpointing")),
        assumption=_FSDP1 if version == 1 else "",
    )


def _of_accelerate(told: Configuration, keys: Keys, setup: Setup) -> StatedSharding:
    """Return the sharding in accelerate's file (accelerate `commands/config/config_args.py`, `utils/launch.py`)."""
    kind = str(told.get("distributed_type", "NO"))
    of_file = Keys(told, {})
    if kind == "DEEPSPEED":
        block = told.get("deepspeed_config")
        if not isinstance(block, Mapping):
            of_file.not_predicted(("distributed_type",), remedy="write its deepspeed_config as a block")
        if name := block.get("deepspeed_config_file"):
            return sharding_of_name(name, of_file, setup, "deepspeed_config")
        offloads = {
            name: {"device": block.get(f"{name}_device", "none")} for name in ("offload_optimizer", "offload_param")
        }
        zero = {"stage": as_whole(block.get("zero_stage", 2)), **offloads}
        return sharding_of_document({"zero_optimization": zero}, of_file, "deepspeed_config")
    if kind == "FSDP":
        block = told.get("fsdp_config")
        block = block if isinstance(block, Mapping) else {}
        version = as_whole(block.get("fsdp_version")) or 1
        strategy = str(block.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
        reshards = block.get("fsdp_reshard_after_forward", True)
        shards = {"1": "FULL_SHARD", "4": "HYBRID_SHARD"}.get(strategy, strategy)
        if shards not in ("FULL_SHARD", "HYBRID_SHARD") or (version == 2 and not _on(reshards)):
            of_file.not_predicted(
                ("fsdp_config",),
                "FSDP that does not shard the parameters",
                remedy="predicted are FULL_SHARD and HYBRID_SHARD",
            )
        return StatedSharding(
            backend="fsdp2",
            sharding="hybrid" if shards == "HYBRID_SHARD" else "full",
            offload=_on(block.get("fsdp_offload_params")),
            checkpoints=_on(block.get("fsdp_activation_checkpointing")),
            casts=str(told.get("mixed_precision", "no")).lower() not in ("no", "false"),
            assumption=_FSDP1 if version == 1 else "",
        )
    if kind in ("MULTI_GPU", "NO"):
        return StatedSharding()
    of_file.not_predicted(("distributed_type",), remedy="predicted are MULTI_GPU, DEEPSPEED and FSDP")


def _on(value: Any) -> bool:
    value = plain_scalar(value) if isinstance(value, str) else value
    return value.lower() in _YES if isinstance(value, str) else bool(value)
