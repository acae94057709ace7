"""What each way of splitting data divides of a model's states, in which types it keeps them, and what it sends at once.

The one place that looks at a layout's backend: all formulas of this engine read the value that `sharding_of` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A way to split data, as the trainers' usual settings have it."""

    divides_optimizer: bool = False
    divides_gradients: bool = False
    divides_weights: bool = False
    unit: Literal["gradients", "bucket", "submodule", "block"]
    """What one collective carries: DDP's buckets beside the gradients, ZeRO's buckets, a submodule's weights, or a
    block's."""
    half_model: bool = False
    """The model is in 16 bits, and the optimizer has fp32 copies of what is trained (DeepSpeed)."""
    fp32_frozen: bool = False
    """Frozen weights are kept in fp32 as well (accelerate's FSDP2)."""
    autocasts: bool = False
    """Weights are used as they are kept, and autocast makes 16-bit copies of fp32 ones."""
    keeps_gradients: bool = False
    """Gradients have a buffer that is there from the first step on."""
    own_group: bool = False
    """The states are divided in a process group beside the default one."""


DDP = Sharding(unit="gradients", autocasts=True)
ZERO = {
    stage: Sharding(
        divides_optimizer=stage >= 1,
        divides_gradients=stage >= 2,
        divides_weights=stage == 3,
        unit="submodule" if stage == 3 else "bucket",
        half_model=True,
        keeps_gradients=stage == 3,
        own_group=True,
    )
    for stage in range(4)
}
"""ZeRO's stages (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1); their group is a clone of the default one
(DeepSpeed `utils/groups.py::_clone_world_group`)."""
FSDP2 = Sharding(divides_optimizer=True, divides_gradients=True, divides_weights=True, unit="block", fp32_frozen=True)


def sharding_of(layout: Layout) -> Sharding:
    """How a layout splits data."""
    if layout.backend == "deepspeed":
        return ZERO[layout.zero_stage]
    return FSDP2 if layout.backend == "fsdp2" else DDP


def loops_experts(case: Case, layout: Layout) -> bool:
    """Experts run one by one: what the layout says, or what the trainer's versions of transformers allow.

    With adapters it is as from transformers 5 on, since experts are predicted without adapters of their own.
    """
    adapts = case.job.finetuning in ("lora", "qlora")
    return (layout.experts_impl or ("grouped_mm" if adapts else case.traits.experts_impl)) == "eager"
