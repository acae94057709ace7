"""Plans of every data-parallel backend, for tests of what explains them."""

from typing import Any

from tests.engines.samples import DENSE, LATENT, MIXED, TIED, VISION, spec_of
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.specs.spec import Spec

A100 = {"gpu": "a100-sxm-80gb", "nodes": 1}
GAMING = {"gpu": "rtx4090-24gb", "nodes": 2}
ALONE = {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": 1}
HOST = {"cluster": {"host_memory": "2TB"}}
ZERO3_AWAY = {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True, "offload_param": True}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"backend": "fsdp2"}, {}),
    (DENSE, {"backend": "fsdp2", "ulysses": 4, "recompute": "full"}, A100),
    (DENSE, {"backend": "fsdp2", "sharding": "hybrid", "micro_batch_size": 2}, {"pure_bf16": True}),
    (DENSE, {"backend": "fsdp2", "offload": True, "recompute": "full"}, HOST),
    (DENSE, {"backend": "fsdp2", "recompute": "selective"}, {}),
    (DENSE, {"backend": "fsdp2", "cp": 8}, A100),
    (DENSE, {"backend": "deepspeed", "zero_stage": 1}, {"stage": "dpo"}),
    (DENSE, {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True}, HOST),
    (DENSE, {"backend": "deepspeed", "zero_stage": 3}, {"optimizer": "adamw_8bit"}),
    ("meta-llama/Llama-3.1-70B-Instruct", {**ZERO3_AWAY, "recompute": "full"}, HOST),
    (DENSE, {"backend": "ddp"}, {}),
    (DENSE, {"backend": "ddp", "recompute": "full"}, {**ALONE, "finetuning": "qlora", "quantization_bit": 4}),
    (DENSE, {"backend": "fsdp2", "recompute": "full"}, {"finetuning": "qlora", "quantization_bit": 4}),
    (DENSE, {"backend": "ddp"}, {**GAMING, "finetuning": "lora", "lora_rank": 64, "stage": "dpo"}),
    (DENSE, {"backend": "deepspeed", "zero_stage": 3}, {"finetuning": "lora"}),
    (DENSE, {"backend": "deepspeed", "zero_stage": 2}, {"finetuning": "freeze", "freeze_trainable_layers": 4}),
    (MIXED, {"backend": "fsdp2", "recompute": "full", "fused_linear_cross_entropy": True}, {}),
    (LATENT, {"backend": "fsdp2"}, {}),
    (VISION, {"backend": "deepspeed", "zero_stage": 3}, {"freeze_vision_tower": False}),
    (TIED, {"backend": "ddp", "expandable_segments": True}, {}),
]
"""(model, layout, job and cluster values that differ from the default)."""


def plan_of(model: str, form: dict[str, Any], other: dict[str, Any]) -> tuple[Spec, Plan]:
    """Return the spec and its plan."""
    spec = spec_of(model, **other)
    return spec, predict(spec, form)
