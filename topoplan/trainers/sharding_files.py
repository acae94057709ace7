"""Configuration files of DeepSpeed and FSDP2, as written for bundles.

transformers fills in `auto` of DeepSpeed's file from train.yaml (integrations/deepspeed.py), so that those values are
set in only one place. Bucket sizes and switches are those of LLaMA-Factory's examples/deepspeed, which the prediction
assumes. accelerate's file: commands/config/config_args.py (ClusterConfig), utils/launch.py, utils/fsdp_utils.py.
"""

from __future__ import annotations

import json
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.yaml_text import Entry, Section, mapping_text

DEEPSPEED_FILE = "ds_config.json"

_BUCKET_ELEMENTS = 500_000_000
_SUB_GROUP_ELEMENTS = 1_000_000_000


def deepspeed_text(layout: Layout) -> str:
    """Return the text of DeepSpeed's file."""
    wanted = {"offload_optimizer": layout.offload_optimizer, "offload_param": layout.offload_param}
    offloads = {key: {"device": "cpu", "pin_memory": True} for key, on in wanted.items() if on}
    document = {
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
        "zero_optimization": {"stage": layout.zero_stage, **offloads, **_buckets(layout)},
    }
    return json.dumps(document, indent=2) + "\n"


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


ACCELERATE_FILE = "accelerate.yaml"
"""Identical on every node: the node's rank and the address of the first one are options in the node scripts."""


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
