"""How a data-parallel configuration shards its states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding by DeepSpeed, by FSDP2, or none (DDP), in terms of a layout's keys."""

    backend: str = "ddp"
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    sharding: str = "full"
    offload: bool = False
    checkpoints: bool = False
    """True if FSDP recomputes activations regardless of the trainer's own key."""
    casts: bool = True
    """True if FSDP keeps trained parameters in fp32, as it does with mixed precision."""
    assumption: str = ""
