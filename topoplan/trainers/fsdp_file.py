"""FSDP2's configuration files, for accelerate and ms-swift, as written for bundles and as found in users' files.

Sources: accelerate commands/config/config_args.py (ClusterConfig), utils/launch.py, utils/fsdp_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys, as_whole
from topoplan.specs.job import Job
from topoplan.specs.source import plain_scalar
from topoplan.specs.spec import Spec
from topoplan.trainers.deepspeed_file import document_on_disk, of_document, of_name
from topoplan.trainers.sharding import Sharding
from topoplan.trainers.yaml_text import Entry, Section, mapping_text

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Setup

ACCELERATE_FILE = "accelerate.yaml"
"""Identical on every node: the node's rank and the address of the first one are options in the node scripts."""
_YES = frozenset(["1", "true", "y", "yes", "on"])


def accelerate_text(spec: Spec, layout: Layout) -> str:
    """Return the file for `accelerate launch --config_file`."""
    head = (f"{spec.model.name} on {spec.cluster.name}: plan {layout.id}", "For `accelerate launch --config_file`.")
    return mapping_text(head, (_processes(spec), _shards(layout)))


def _processes(spec: Spec) -> Section:
    job, cluster = spec.job, spec.cluster
    precision = Entry("mixed_precision", job.precision, "for gathered weights; shards stay in fp32")
    if job.pure_bf16:
        comment = "pure_bf16: any other value would cast the shards to fp32"
        precision = Entry("mixed_precision", "no", comment)
    return Section(
        title="Processes",
        entries=(
            Entry("compute_environment", "LOCAL_MACHINE"),
            Entry("distributed_type", "FSDP"),
            Entry("num_machines", cluster.nodes),
            Entry("num_processes", cluster.world_size, "total, on all nodes"),
            Entry("rdzv_backend", "static", "keeps the planned node ranks"),
            Entry("main_training_function", "main"),
            precision,
            Entry("use_cpu", False),
        ),
    )


def _shards(layout: Layout) -> Section:
    entries = (
        Entry("fsdp_version", 2),
        Entry("fsdp_reshard_after_forward", True, "gathers a layer's weights again in backward"),
        Entry(
            "fsdp_auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP",
            "layer classes, as named by the model",
        ),
        Entry("fsdp_offload_params", layout.offload, "weights, gradients and optimizer states in host memory"),
        Entry("fsdp_state_dict_type", "FULL_STATE_DICT", "full checkpoints, for any number of GPUs"),
        Entry("fsdp_cpu_ram_efficient_loading", True, "only rank 0 reads the weights"),
        Entry("fsdp_activation_checkpointing", False, "LLaMA-Factory does gradient checkpointing itself"),
    )
    title = f"Shards over all {layout.world_size} GPUs"
    return Section(title=title, entries=(Entry("fsdp_config", entries=entries),))


def fsdp_config(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the file for ms-swift's `--fsdp FILE` (swift/arguments/sft_args.py, _init_fsdp)."""
    return {
        "fsdp": "full_shard auto_wrap offload" if layout.offload else "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # accelerate utils/fsdp_utils.py, fsdp2_prepare_model does not broadcast 4-bit weights from rank 0.
            "cpu_ram_efficient_loading": job.finetuning != "qlora",
            # Full checkpoints, which Hugging Face and PEFT can read; sharded ones lack such weights.
            "state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": layout.recompute.granularity == "full",
        },
    }


# Read ----------------------------------------------------------------------------------------------------------------

_FSDP1 = "FSDP's first version is predicted as FSDP2, which shards the same states"


def of_keys(written: Any, keys: Keys) -> Sharding:
    """Return the sharding in the trainer's own keys: transformers' `fsdp` and `fsdp_config`, or ms-swift's `--fsdp`.

    ms-swift's preset fsdp2 enables recomputation (`swift/config/fsdp2.json`).
    """
    is_swift = keys.configuration.trainer == "swift"
    if is_swift and written == "fsdp2":
        return Sharding(backend="fsdp2", checkpoints=True)
    config = keys.given("fsdp_config")
    if is_swift:
        found = written if isinstance(written, Mapping) else document_on_disk(str(written), keys.configuration)
        if found is None:
            keys.not_predicted(("fsdp",))
        written, config = found.get("fsdp", "full_shard auto_wrap"), found.get("fsdp_config", {})
    elif isinstance(config, str):
        config = document_on_disk(config, keys.configuration)
    words = [str(word) for word in written] if isinstance(written, list) else str(written).split()
    config = config if isinstance(config, Mapping) else {}
    if not {"full_shard", "hybrid_shard"} & set(words) or config.get("reshard_after_forward") is False:
        keys.not_predicted(("fsdp",))
    version = as_whole(config.get("fsdp_version", config.get("version"))) or (2 if is_swift else 1)
    return Sharding(
        backend="fsdp2",
        sharding="hybrid" if "hybrid_shard" in words else "full",
        offload="offload" in words,
        checkpoints=_on(config.get("activation_checkpointing")),
        assumption=_FSDP1 if version == 1 else "",
    )


def of_accelerate(told: Configuration, keys: Keys, setup: Setup) -> Sharding:
    """Return the sharding in accelerate's file (accelerate `commands/config/config_args.py`, `utils/launch.py`)."""
    kind = str(told.get("distributed_type", "NO"))
    of_file = Keys(told, {})
    if kind == "DEEPSPEED":
        block = told.get("deepspeed_config")
        if not isinstance(block, Mapping):
            of_file.not_predicted(("distributed_type",))
        if name := block.get("deepspeed_config_file"):
            return of_name(name, of_file, setup, "deepspeed_config")
        offloads = {
            name: {"device": block.get(f"{name}_device", "none")} for name in ("offload_optimizer", "offload_param")
        }
        zero = {"stage": as_whole(block.get("zero_stage", 2)), **offloads}
        return of_document({"zero_optimization": zero}, of_file, "deepspeed_config")
    if kind == "FSDP":
        block = told.get("fsdp_config")
        block = block if isinstance(block, Mapping) else {}
        version = as_whole(block.get("fsdp_version")) or 1
        strategy = str(block.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
        reshards = block.get("fsdp_reshard_after_forward", True)
        shards = {"1": "FULL_SHARD", "4": "HYBRID_SHARD"}.get(strategy, strategy)
        if shards not in ("FULL_SHARD", "HYBRID_SHARD") or (version == 2 and not _on(reshards)):
            of_file.not_predicted(("fsdp_config",), "FSDP that does not shard the parameters")
        return Sharding(
            backend="fsdp2",
            sharding="hybrid" if shards == "HYBRID_SHARD" else "full",
            offload=_on(block.get("fsdp_offload_params")),
            checkpoints=_on(block.get("fsdp_activation_checkpointing")),
            casts=str(told.get("mixed_precision", "no")).lower() not in ("no", "false"),
            assumption=_FSDP1 if version == 1 else "",
        )
    if kind in ("MULTI_GPU", "NO"):
        return Sharding()
    of_file.not_predicted(("distributed_type",))


def _on(value: Any) -> bool:
    value = plain_scalar(value) if isinstance(value, str) else value
    return value.lower() in _YES if isinstance(value, str) else bool(value)
