"""A layout: the numbers that split one training step over the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from topoplan.layout.ids import id_of
from topoplan.layout.stages import Stages, split_stages
from topoplan.specs.job import Job
from topoplan.specs.layout_parts import BACKENDS as BACKENDS
from topoplan.specs.layout_parts import MEGATRON_BACKENDS as MEGATRON_BACKENDS
from topoplan.specs.layout_parts import SHARDED_BACKENDS as SHARDED_BACKENDS
from topoplan.specs.layout_parts import SIZE_KEYS
from topoplan.specs.layout_parts import Degrees as Degrees
from topoplan.specs.layout_parts import Recompute as Recompute
from topoplan.specs.layout_parts import Sharding as Sharding
from topoplan.specs.layout_parts import Step as Step
from topoplan.specs.layout_parts import Switches as Switches
from topoplan.specs.model import Model
from topoplan.units import multiples_around

_Value = TypeVar("_Value")
_PARTS = {"degrees": Degrees, "step": Step, "states": Sharding, "switches": Switches}
_FIELDS = {key.name: key for part in _PARTS.values() for key in fields(part)}
PART_OF = {key.name: name for name, part in _PARTS.items() for key in fields(part)}
"""The attribute of a layout that holds each key; `backend` and `recompute` are attributes themselves."""


if TYPE_CHECKING:

    class _read(Generic[_Value]):  # noqa: N801
        """A property typed as the value that it returns."""

        def __init__(self, get: Callable[[Layout], _Value]) -> None: ...
        def __get__(self, layout: Layout | None, owner: type[Layout]) -> _Value: ...
else:
    _read = property


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run the job, in parts that can be combined freely.

    Which combinations an engine can run is up to its rules. `Layout.of` and `changed` take the keys of all parts by
    name, and the properties read them.
    """

    backend: str = "mca"
    """mca (LLaMA-Factory's adapter) or megatron, which share one cost model; ddp, deepspeed or fsdp2, which split data
    only and share another."""
    degrees: Degrees = field(default_factory=Degrees)
    step: Step = field(default_factory=Step)
    recompute: Recompute = field(default_factory=Recompute)
    states: Sharding = field(default_factory=Sharding)
    switches: Switches = field(default_factory=Switches)

    # In the order of the JSON form.
    tp = _read(lambda layout: layout.degrees.tp)
    pp = _read(lambda layout: layout.degrees.pp)
    vpp = _read(lambda layout: layout.degrees.vpp)
    cp = _read(lambda layout: layout.degrees.cp)
    ep = _read(lambda layout: layout.degrees.ep)
    etp = _read(lambda layout: layout.degrees.etp)
    dp = _read(lambda layout: layout.degrees.dp)
    micro_batch_size = _read(lambda layout: layout.step.micro_batch_size)
    gradient_accumulation_steps = _read(lambda layout: layout.step.gradient_accumulation_steps)
    sequence_parallel = _read(lambda layout: layout.step.sequence_parallel)
    distributed_optimizer = _read(lambda layout: layout.states.distributed_optimizer)
    pipeline_layout = _read(lambda layout: layout.degrees.pipeline_layout)
    optimizer_offload_fraction = _read(lambda layout: layout.states.optimizer_offload_fraction)
    zero_stage = _read(lambda layout: layout.states.zero_stage)
    offload_optimizer = _read(lambda layout: layout.states.offload_optimizer)
    offload_param = _read(lambda layout: layout.states.offload_param)
    sharding = _read(lambda layout: layout.states.sharding)
    offload = _read(lambda layout: layout.states.offload)
    sync_each_batch = _read(lambda layout: layout.states.sync_each_batch)
    ulysses = _read(lambda layout: layout.degrees.ulysses)
    grad_reduce_in_fp32 = _read(lambda layout: layout.states.grad_reduce_in_fp32)
    overlap_grad_reduce = _read(lambda layout: layout.switches.overlap_grad_reduce)
    overlap_param_gather = _read(lambda layout: layout.switches.overlap_param_gather)
    tp_comm_overlap = _read(lambda layout: layout.switches.tp_comm_overlap)
    cross_entropy_fusion = _read(lambda layout: layout.switches.cross_entropy_fusion)
    cross_entropy_fusion_impl = _read(lambda layout: layout.switches.cross_entropy_fusion_impl)
    gradient_accumulation_fusion = _read(lambda layout: layout.switches.gradient_accumulation_fusion)
    attention_backend = _read(lambda layout: layout.switches.attention_backend)
    deterministic_mode = _read(lambda layout: layout.switches.deterministic_mode)
    precision_aware_optimizer = _read(lambda layout: layout.switches.precision_aware_optimizer)
    fp8_param = _read(lambda layout: layout.switches.fp8_param)
    main_params_dtype = _read(lambda layout: layout.switches.main_params_dtype)
    exp_avg_dtype = _read(lambda layout: layout.switches.exp_avg_dtype)
    exp_avg_sq_dtype = _read(lambda layout: layout.switches.exp_avg_sq_dtype)
    cp_comm_type = _read(lambda layout: layout.switches.cp_comm_type)
    moe_token_dispatcher_type = _read(lambda layout: layout.switches.moe_token_dispatcher_type)
    moe_router_force_load_balancing = _read(lambda layout: layout.switches.moe_router_force_load_balancing)
    overlap_moe_expert_parallel_comm = _read(lambda layout: layout.switches.overlap_moe_expert_parallel_comm)
    moe_expert_capacity_factor = _read(lambda layout: layout.switches.moe_expert_capacity_factor)
    fused_linear_cross_entropy = _read(lambda layout: layout.switches.fused_linear_cross_entropy)
    expandable_segments = _read(lambda layout: layout.switches.expandable_segments)
    experts_impl = _read(lambda layout: layout.switches.experts_impl)

    @classmethod
    def of(cls, **keys: Any) -> Layout:
        """Return a layout with these keys, and defaults for all others. Raises KeyError for a key that layouts lack."""
        return changed(cls(), **keys)

    @property
    def world_size(self) -> int:
        """Number of GPUs: the product of the degrees."""
        split = self.degrees
        return split.tp * split.pp * split.cp * split.ulysses * split.dp

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron-core splits the model; otherwise only data is split."""
        return self.backend in MEGATRON_BACKENDS

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts' own grid: world / (etp * ep * pp)."""
        split = self.degrees
        return self.world_size // (split.etp * split.ep * split.pp)

    @property
    def optimizer_shards(self) -> tuple[int, int]:
        """Ranks that share the optimizer states of (dense weights, an expert's weights); 1 without sharding."""
        split = self.degrees
        return (split.dp * split.cp, self.expert_dp) if self.distributed_optimizer else (1, 1)

    @property
    def complexity(self) -> int:
        """Number of features in use: every degree above 1, recomputation, uneven stages, offload."""
        split, states = self.degrees, self.states
        degrees = (split.tp, split.pp, split.vpp, split.cp, split.ep, split.etp, split.ulysses)
        return (
            sum(degree > 1 for degree in degrees)
            + (self.recompute.granularity != "none")
            + (split.pipeline_layout is not None)
            + (states.optimizer_offload_fraction > 0)
            + sum((states.offload_optimizer, states.offload_param, states.offload))
        )

    @property
    def id(self) -> str:
        """Short, stable name of the layout; keys at their default are left out."""
        return id_of(self)


FULL = Recompute(granularity="full", method="uniform", num_layers=1)
"""Every layer is recomputed, one at a time."""
_flat = [name for name in vars(Layout) if name in _FIELDS]
_place = _flat.index("distributed_optimizer")
KEYS = ("backend", *_flat[:_place], "recompute", *_flat[_place:])
"""Keys of all layouts, in the order of the JSON form."""
DEFAULTS: Mapping[str, Any] = {key: getattr(Layout(), key) for key in KEYS}
"""Default value of each key."""


@cache
def keys_of(backend: str) -> tuple[str, ...]:
    """Return the keys that layouts of a backend have; degrees that it does not split by are among them, as 1."""
    return tuple(key for key in KEYS if key not in _FIELDS or backend in _FIELDS[key].metadata["backends"])


@cache
def pinned_keys_of(backend: str) -> tuple[str, ...]:
    """Return the keys that a form may have for a backend: its layouts' and Megatron's sizes of end stages."""
    return (*keys_of(backend), *(SIZE_KEYS if backend in MEGATRON_BACKENDS else ()))


def changed(layout: Layout, **keys: Any) -> Layout:
    """Return the layout with other values of some keys. Raises KeyError for a key that layouts lack."""
    whole: dict[str, Any] = {"backend": layout.backend, "recompute": layout.recompute}
    by_part: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        if key in whole:
            whole[key] = value
        else:
            by_part.setdefault(PART_OF[key], {})[key] = value
    for part in _PARTS:
        own = getattr(layout, part)
        whole[part] = _replaced(own, tuple(by_part[part]), *by_part[part].values()) if part in by_part else own
    return Layout(**whole)


def recomputing(layout: Layout, mode: Recompute, step: Step | None = None) -> Layout:
    """Return the layout under another recompute mode and perhaps step: the most frequent change of a search."""
    return Layout(
        backend=layout.backend,
        degrees=layout.degrees,
        step=step or layout.step,
        recompute=mode,
        states=layout.states,
        switches=layout.switches,
    )


@lru_cache(maxsize=1 << 12, typed=True)
def _replaced(part: Any, names: tuple[str, ...], *values: Any) -> Any:
    """Return a part of a layout with other values; cached, as few distinct parts are shared by thousands of layouts."""
    return replace(part, **dict(zip(names, values, strict=True)))


def stages_of(model: Model, job: Job, layout: Layout) -> Stages:
    """Return the stages of a layout. Raises LayoutError like `split_stages`."""
    split = layout.degrees
    return split_stages(model.num_layers, split.pp, split.vpp, split.pipeline_layout, job.mtp_num_layers)


def undivided(batch: int, micro_batch: int, dp: int) -> str | None:
    """Return the failed equation of a batch that ranks cannot share evenly, or None."""
    rest = batch % (micro_batch * dp)
    return f"global_batch_size {batch} % (micro_batch_size {micro_batch} * dp {dp}) = {rest}" if rest else None


def batch_remedy(batch: int, micro_batch: int, dp: int) -> str:
    """Return the nearest batches that divide, and the largest smaller micro-batch with which the given batch does."""
    smaller = next((size for size in range(micro_batch - 1, 0, -1) if batch % (size * dp) == 0), None)
    micro = f", or micro_batch_size to {smaller}" if smaller else ""
    return f"set global_batch_size to {multiples_around(batch, micro_batch * dp)}{micro}"
