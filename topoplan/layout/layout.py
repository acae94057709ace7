"""A layout: the numbers that split one training step over the GPUs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from topoplan.errors import LayoutError
from topoplan.layout.stages import Stages, end_sizes, split_stages
from topoplan.specs.job import Job
from topoplan.specs.model import Model

MEGATRON_BACKENDS = ("mca", "megatron")
SHARDED_BACKENDS = ("ddp", "deepspeed", "fsdp2")
BACKENDS = MEGATRON_BACKENDS + SHARDED_BACKENDS


RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""What selective recomputation may name (MLM `transformer/transformer_config.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Megatron's activation recomputation."""

    granularity: str = "none"
    """none, selective or full."""
    modules: tuple[str, ...] = ()
    """With selective: core_attn, mlp, moe, moe_act, layernorm, mla_up_proj, shared_experts."""
    method: str | None = None
    """With full: uniform or block."""
    num_layers: int | None = None
    """With full: layers per recomputed chunk (uniform), or layers recomputed per virtual stage (block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run the job. `dp` and `gradient_accumulation_steps` are always filled in."""

    backend: str = "mca"
    """mca (LLaMA-Factory's adapter) or megatron, which share one cost model; ddp, deepspeed or fsdp2, which split data
    alone, and share another."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int
    micro_batch_size: int = 1
    gradient_accumulation_steps: int
    """Also Megatron's number of micro batches per step."""
    sequence_parallel: bool = False
    recompute: Recompute = Recompute()
    distributed_optimizer: bool = True
    pipeline_layout: str | None = None
    """Megatron's pipeline_model_parallel_layout string; None is the even split."""
    optimizer_offload_fraction: float = 0.0
    grad_reduce_in_fp32: bool = True
    """Gradients are reduced in fp32; with fsdp2 too, as torchtitan and verl do, where accelerate takes 16 bits."""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    cross_entropy_fusion: bool = False
    cross_entropy_fusion_impl: str = "te"
    """With cross_entropy_fusion: te (Transformer Engine) or native (megatron-core's own, its default)."""
    precision_aware_optimizer: bool = False
    fp8_param: bool = False
    """In fp8, the blocks' weights are kept in fp8 alone (Megatron's fp8_param_gather)."""
    moe_token_dispatcher_type: str | None = None
    """How tokens get to their experts: alltoall, flex (DeepEP, HybridEP), or None for the backend's usual one."""
    zero_stage: int = 0
    """With deepspeed: 1, 2 or 3."""
    offload_optimizer: bool = False
    """With deepspeed: the optimizer, with its gradients, in host memory."""
    offload_param: bool = False
    """With deepspeed stage 3: the parameters in host memory too."""
    sharding: str = "full"
    """With fsdp2: full (over all ranks) or hybrid (inside a node, replicated between nodes)."""
    offload: bool = False
    """With fsdp2: parameters, gradients and optimizer in host memory (CPUOffloadPolicy)."""
    sync_each_batch: bool = True
    """With fsdp2: gradients are reduced to their shards after every micro batch (accelerate's key of that name); else
    each GPU sums whole ones, and reduces them after the last."""
    ulysses: int = 1
    """Ranks that share a sequence by all-to-all; they see the same samples, so that dp is world / ulysses."""
    fused_linear_cross_entropy: bool = False
    """The loss from the hidden states, the logits never whole in memory (Liger)."""
    expandable_segments: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator's fragmentation all but gone."""

    @property
    def world_size(self) -> int:
        """GPUs that the degrees multiply to."""
        return self.tp * self.pp * self.cp * self.ulysses * self.dp

    @property
    def is_megatron(self) -> bool:
        """The model is split by Megatron-core; else data alone is."""
        return self.backend in MEGATRON_BACKENDS

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts' own grid: world / (etp * ep * pp)."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def optimizer_shards(self) -> tuple[int, int]:
        """Ranks that share the optimizer state of (dense weights, an expert's weights); 1 without sharding."""
        return (self.dp * self.cp, self.expert_dp) if self.distributed_optimizer else (1, 1)

    @property
    def complexity(self) -> int:
        """How many things are switched on: every degree above 1, recomputation, uneven stages, offload."""
        degrees = (self.tp, self.pp, self.vpp, self.cp, self.ep, self.etp)
        return (
            sum(degree > 1 for degree in degrees)
            + (self.recompute.granularity != "none")
            + (self.pipeline_layout is not None)
            + (self.optimizer_offload_fraction > 0)
            + sum((self.offload_optimizer, self.offload_param, self.offload, self.ulysses > 1))
        )

    @property
    def id(self) -> str:
        """Short, stable name; keys at their usual value are left out."""
        if not self.is_megatron:
            return self._sharded_id()
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"{key}{value}" for key, value in (("vpp", self.vpp), ("cp", self.cp), ("ep", self.ep)) if value > 1]
        if self.etp > 1:
            parts.append(f"etp{self.etp}")
        parts += [f"dp{self.dp}", f"mbs{self.micro_batch_size}"]
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("nosp")
        if self.recompute.granularity == "selective":
            parts.append("sel-" + "+".join(self.recompute.modules))
        elif self.recompute.granularity == "full":
            method, layers = self.recompute.method, self.recompute.num_layers
            parts.append("full" if (method, layers) == ("uniform", 1) else f"full-{method}{layers}")
        if self.pipeline_layout:
            parts.append(_uneven_name(self.pipeline_layout, self.pp, self.vpp))
        if self.optimizer_offload_fraction:
            parts.append(f"offload{round(self.optimizer_offload_fraction * 100)}")
        return "-".join(parts)

    def _sharded_id(self) -> str:
        """`zero3-dp8-mbs1-full-offload+param`, `fsdp2-hybrid-ulysses2-dp4-mbs1`."""
        parts = [f"zero{self.zero_stage}" if self.backend == "deepspeed" else self.backend]
        if self.backend == "fsdp2" and self.sharding != "full":
            parts.append(self.sharding)
        parts += [f"{key}{value}" for key, value in (("cp", self.cp), ("ulysses", self.ulysses)) if value > 1]
        parts += [f"dp{self.dp}", f"mbs{self.micro_batch_size}"]
        if self.recompute.granularity != "none":
            parts.append({"full": "full", "selective": "sel"}[self.recompute.granularity])
        if self.offload_optimizer or self.offload:
            parts.append("offload+param" if self.offload_param else "offload")
        parts += ["nosync"] * (not self.sync_each_batch)
        parts += ["liger"] * self.fused_linear_cross_entropy + ["expandable"] * self.expandable_segments
        return "-".join(parts)


USUAL = {field.name: field.default for field in fields(Layout)}
"""Values of a layout that does not say."""
_FIELDS = tuple(field.name for field in fields(Layout))
_values = attrgetter(*_FIELDS)
_put = {name: Layout.__dict__[name].__set__ for name in _FIELDS}
_puts = tuple(_put.values())


def changed(layout: Layout, **changes: Any) -> Layout:
    """`dataclasses.replace` for a layout, at less than half its cost: a search makes some for every candidate."""
    new: Layout = object.__new__(Layout)
    for put, value in zip(_puts, _values(layout), strict=True):
        put(new, value)
    for name, value in changes.items():
        _put[name](new, value)
    return new


def stages_of(model: Model, job: Job, layout: Layout) -> Stages:
    """The stages of a layout. Raises LayoutError as `split_stages`."""
    return split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout, job.mtp_num_layers)


def _uneven_name(pipeline_layout: str, pp: int, vpp: int) -> str:
    """`ends8+6`: the layers of the first and the last virtual stage, the others evenly between; else `uneven`."""
    try:
        ends = end_sizes(pipeline_layout, pp, vpp)
    except LayoutError:
        ends = None
    return f"ends{ends[0]}+{ends[1]}" if ends else "uneven"
