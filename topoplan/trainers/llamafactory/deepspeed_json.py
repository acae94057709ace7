"""ds_config.json: ZeRO as the plan has it.

`auto` is filled in by transformers from train.yaml (integrations/deepspeed.py), which so stays the one place for them.
Bucket sizes and switches are those of LLaMA-Factory's examples/deepspeed, which the prediction is made for.
"""

from __future__ import annotations

import json
from typing import Any

from topoplan.layout.layout import Layout

FILE = "ds_config.json"

_BUCKET_ELEMENTS = 500_000_000
_SUB_GROUP_ELEMENTS = 1_000_000_000


def deepspeed_config(layout: Layout) -> dict[str, Any]:
    """The configuration as a mapping."""
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
    """The file."""
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
