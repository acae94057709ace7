"""The files beside train.yaml in which DeepSpeed and FSDP2 are told how to shard.

ms-swift has presets (`swift/config/`: zero1, zero2, zero3, zero2_offload, zero3_offload, fsdp2), which are of its
version and not of the plan: zero3_offload takes the parameters to host memory along with the optimizer, fsdp2 always
recomputes, and the buckets of the others are not those that memory was predicted with.
"""

from __future__ import annotations

import json

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers import deepspeed_file
from topoplan.trainers.fsdp_file import fsdp_config

DEEPSPEED_FILE = deepspeed_file.FILE
FSDP_FILE = "fsdp.json"


def sharding_files(job: Job, layout: Layout) -> dict[str, str]:
    """File name -> text; none with ddp."""
    if layout.backend == "deepspeed":
        return {DEEPSPEED_FILE: deepspeed_file.deepspeed_text(layout)}
    return {FSDP_FILE: json.dumps(fsdp_config(job, layout), indent=2) + "\n"} if layout.backend == "fsdp2" else {}
