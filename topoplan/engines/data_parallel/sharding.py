"""What each data-parallel backend shards of a model's states, their dtypes, and how much it sends per collective.

This is the only place that looks at a layout's backend: all formulas of this engine use the value of `sharding_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case
from topoplan.specs.job import ADAPTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A way to split data, with the trainers' default settings."""

    divides_optimizer: bool = False
    divides_gradients: bool = False
    divides_weights: bool = False
    unit: Literal["gradients", "bucket", "submodule", "block"]
    """What one collective carries: DDP's buckets, which are separate from the gradients; ZeRO's buckets; a submodule's
    weights; or a layer's weights."""
    has_16_bit_model: bool = False
    """Whether the model is in 16 bits and the optimizer keeps fp32 copies of trained weights (DeepSpeed)."""
    fp32_frozen: bool = False
    """Whether frozen weights are kept in fp32 as well (accelerate's FSDP2)."""
    autocasts: bool = False
    """Whether weights are used as they are stored, and autocast makes 16-bit copies of fp32 weights."""
    keeps_gradients: bool = False
    """Whether gradients have a buffer that persists from the first step on."""
    own_group: bool = False
    """Whether states are sharded in a process group separate from the default one."""


LOOPING = "<5"
"""Versions of transformers that run experts one by one; later ones have grouped products, with torch 2.9 or later."""
DDP = Sharding(unit="gradients", autocasts=True)
ZERO = {
    stage: Sharding(
        divides_optimizer=stage >= 1,
        divides_gradients=stage >= 2,
        divides_weights=stage == 3,
        unit="submodule" if stage == 3 else "bucket",
        has_16_bit_model=True,
        keeps_gradients=stage == 3,
        own_group=True,
    )
    for stage in range(4)
}
"""ZeRO's stages (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1); their group is a clone of the default one
(DeepSpeed `utils/groups.py::_clone_world_group`)."""
FSDP2 = Sharding(divides_optimizer=True, divides_gradients=True, divides_weights=True, unit="block", fp32_frozen=True)


def sharding_of(layout: Layout) -> Sharding:
    """Return how a layout splits data."""
    if layout.backend == "deepspeed":
        return ZERO[layout.zero_stage]
    return FSDP2 if layout.backend == "fsdp2" else DDP


def loops_experts(case: Case, layout: Layout) -> bool:
    """Return whether experts run one by one: as the layout says, or as the versions of transformers that are meant.

    Those are the version that the spec's `software` states, or else the oldest ones that the trainer supports. With
    adapters it is version 5, since experts are predicted without adapters of their own.
    """
    if layout.experts_impl is not None:
        return layout.experts_impl == "eager"
    adapts = case.job.finetuning in ADAPTERS
    return not adapts and case.traits.experts_impl == "eager" and case.cluster.may_run("transformers", LOOPING)
