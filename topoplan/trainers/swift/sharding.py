"""The files beside train.yaml that tell DeepSpeed and FSDP2 how to shard.

ms-swift's presets (`swift/config/`: zero1, zero2, zero3, zero2_offload, zero3_offload, fsdp2) depend on its version
rather than on the plan. zero3_offload offloads parameters along with the optimizer, fsdp2 always recomputes, and the
others have different bucket sizes from those that memory was predicted for.
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
    """Return the files' texts by name; none for ddp."""
    if layout.backend == "deepspeed":
        return {DEEPSPEED_FILE: deepspeed_file.deepspeed_text(layout)}
    return {FSDP_FILE: json.dumps(fsdp_config(job, layout), indent=2) + "\n"} if layout.backend == "fsdp2" else {}
