"""How a data-parallel configuration shares out its states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """DeepSpeed, FSDP2, or not at all: in the keys of a layout."""

    backend: str = "ddp"
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    sharding: str = "full"
    offload: bool = False
    checkpoints: bool = False
    """FSDP recomputes activations by itself, whatever the trainer's own key says."""
    casts: bool = True
    """FSDP keeps what it trains in fp32; not where it is given no mixed precision."""
    assumption: str = ""
