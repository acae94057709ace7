"""The files beside train.yaml in which DeepSpeed and FSDP2 are told how to shard.

ms-swift has presets (`swift/config/`: zero1, zero2, zero3, zero2_offload, zero3_offload, fsdp2), which are of its
version and not of the plan: zero3_offload takes the parameters to host memory along with the optimizer, fsdp2 always
recomputes, and the buckets of the others are not those that memory was predicted with.
"""

from __future__ import annotations

import json
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers.llamafactory import deepspeed_json

DEEPSPEED_FILE = deepspeed_json.FILE
FSDP_FILE = "fsdp.json"


def sharding_files(job: Job, layout: Layout) -> dict[str, str]:
    """File name -> text; none with ddp."""
    if layout.backend == "deepspeed":
        return {DEEPSPEED_FILE: deepspeed_json.deepspeed_text(layout)}
    return {FSDP_FILE: json.dumps(fsdp_config(job, layout), indent=2) + "\n"} if layout.backend == "fsdp2" else {}


def fsdp_config(job: Job, layout: Layout) -> dict[str, Any]:
    """What `--fsdp FILE` reads (swift/arguments/sft_args.py, _init_fsdp)."""
    return {
        "fsdp": "full_shard auto_wrap offload" if layout.offload else "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # accelerate utils/fsdp_utils.py, fsdp2_prepare_model sends nothing from rank 0 where weights are in 4 bits.
            "cpu_ram_efficient_loading": job.finetuning != "qlora",
            # Whole checkpoints, which Hugging Face and PEFT read; with sharded ones no weights are saved for them.
            "state_dict_type": "FULL_STATE_DICT",
            "activation_checkpointing": layout.recompute.granularity == "full",
        },
    }
