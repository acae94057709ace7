"""The keys of a layout, by group: the meaning, default and kind of each, and the backends that have it.

Each key is declared here only. `layout.layout` combines the groups, and `specs.forms` derives the forms of pins and of
layouts in JSON from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from topoplan.errors import LayoutError
from topoplan.specs.kinds import DEGREE, Choice, Count, Kind, Number, Switch, Text, Words

MEGATRON_BACKENDS = ("mca", "megatron")
SHARDED_BACKENDS = ("ddp", "deepspeed", "fsdp2")
BACKENDS = MEGATRON_BACKENDS + SHARDED_BACKENDS


def _key(usual: Any, kind: Kind, description: str | None = None, *, of: tuple[str, ...] = BACKENDS) -> Any:
    """Return a field with its default, its kind, its description for JSON Schema and the backends that have it."""
    return field(default=usual, metadata={"kind": kind, "description": description, "backends": of})


RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
"""Modules that selective recomputation may name (Megatron-LM `transformer/transformer_config.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Megatron's activation recomputation."""

    granularity: str = _key("none", Choice(("none", "selective", "full")))
    modules: tuple[str, ...] = _key(
        (), Words(pattern="|".join(RECOMPUTE_MODULES), meaning=", ".join(RECOMPUTE_MODULES)), "With selective."
    )
    method: str | None = _key(None, Choice(("uniform", "block")), "With full.")
    num_layers: int | None = _key(None, Count(1, 10_000), "With full.")
    """Layers per recomputed chunk (uniform), or layers recomputed per virtual stage (block)."""


def completed_recompute(form: Mapping[str, Any], where: str) -> Recompute:
    """Complete a recompute block. Raises LayoutError for keys that its granularity, stated or implied, lacks."""
    of_full = [key for key in ("method", "num_layers") if key in form]
    implied = "selective" if "modules" in form else "full" if of_full else "none"
    granularity = form.get("granularity", implied)
    strange = of_full if granularity != "full" else []
    strange += ["modules"] if "modules" in form and granularity != "selective" else []
    if strange:
        raise LayoutError(
            f"recompute {strange[0]} with granularity {granularity}",
            where=where,
            expected="expected modules with selective, method and num_layers with full",
        )
    if granularity == "selective":
        modules = tuple(dict.fromkeys(form.get("modules", ("core_attn",))))
        return Recompute(granularity="selective", modules=modules)
    if granularity == "full":
        method, num_layers = form.get("method", "uniform"), form.get("num_layers", 1)
        return Recompute(granularity="full", method=method, num_layers=num_layers)
    return Recompute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The number of ranks along each axis of parallelism."""

    tp: int = _key(1, DEGREE, "Tensor parallel.")
    pp: int = _key(1, DEGREE, "Pipeline parallel.")
    vpp: int = _key(1, DEGREE, "Virtual pipeline stages per GPU.")
    cp: int = _key(1, DEGREE, "Context parallel.")
    ep: int = _key(1, DEGREE, "Expert parallel.")
    etp: int = _key(1, DEGREE, "Tensor parallel of the experts.")
    dp: int = _key(1, DEGREE, "Data parallel: world / (tp * pp * cp).")
    ulysses: int = _key(
        1, DEGREE, "Sequence parallel by all-to-all, of fsdp2 and deepspeed.", of=("deepspeed", "fsdp2")
    )
    """Ranks that share a sequence by all-to-all. They see the same samples, so dp is world / ulysses."""
    pipeline_layout: str | None = _key(
        None,
        Text(pattern=r"[A-Za-z0-9|,*()]+", meaning="Megatron's layout, such as Et*4|t*5|t*4,L"),
        of=MEGATRON_BACKENDS,
    )
    """Megatron's pipeline_model_parallel_layout string; None means the even split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Megatron's alternatives to a pipeline_layout. A layout holds the equivalent string instead of these keys."""

    decoder_first_pipeline_num_layers: int | None = _key(
        None, Count(1, 10_000), "Layers of the first pipeline rank.", of=MEGATRON_BACKENDS
    )
    decoder_last_pipeline_num_layers: int | None = _key(
        None, Count(1, 10_000), "Layers of the last pipeline rank.", of=MEGATRON_BACKENDS
    )
    account_for_embedding_in_pipeline_split: bool = _key(
        False, Switch(), "The embedding counts as a layer of the first stage.", of=MEGATRON_BACKENDS
    )
    account_for_loss_in_pipeline_split: bool = _key(
        False, Switch(), "The loss counts as a layer of the last stage.", of=MEGATRON_BACKENDS
    )


SIZE_KEYS = tuple(key.name for key in fields(StageSizes))


def stage_sizes_in(keys: Mapping[str, Any]) -> StageSizes | None:
    """Return the stage sizes among layout keys, or None if there are none."""
    given = {key: keys[key] for key in SIZE_KEYS if keys.get(key)}
    return StageSizes(**given) if given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How a rank processes its samples of one step."""

    micro_batch_size: int = _key(1, DEGREE)
    gradient_accumulation_steps: int = _key(1, DEGREE)
    """Also Megatron's number of micro-batches per step."""
    sequence_parallel: bool = _key(False, Switch(), of=MEGATRON_BACKENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What data-parallel ranks shard, where it is kept, and how gradients are reduced."""

    distributed_optimizer: bool = _key(True, Switch(), of=MEGATRON_BACKENDS)
    optimizer_offload_fraction: float = _key(0.0, Number(0, 1), of=MEGATRON_BACKENDS)
    zero_stage: int = _key(0, Count(1, 3), "With deepspeed.", of=("deepspeed",))
    offload_optimizer: bool = _key(False, Switch(), "With deepspeed.", of=("deepspeed",))
    """Keeps the optimizer states and their gradients in host memory."""
    offload_param: bool = _key(False, Switch(), "With deepspeed, stage 3.", of=("deepspeed",))
    """Keeps the parameters in host memory too."""
    sharding: str = _key("full", Choice(("full", "hybrid")), "With fsdp2.", of=("fsdp2",))
    """full (over all ranks) or hybrid (within a node, replicated across nodes)."""
    offload: bool = _key(False, Switch(), "With fsdp2: CPU offload.", of=("fsdp2",))
    """Keeps parameters, gradients and optimizer states in host memory (CPUOffloadPolicy)."""
    sync_each_batch: bool = _key(
        True,
        Switch(),
        "With fsdp2: gradients are reduced after every micro batch, not after the last alone.",
        of=("fsdp2",),
    )
    """accelerate's key of that name; when off, each GPU accumulates whole gradients and reduces them after the last."""
    grad_reduce_in_fp32: bool = _key(True, Switch(), of=(*MEGATRON_BACKENDS, "fsdp2"))
    """With fsdp2: fp32 as in torchtitan and verl; accelerate reduces in 16 bits."""


MOMENT_DTYPES = ("fp32", "fp16", "bf16", "fp8")
_OF_AWARE = "With precision_aware_optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Trainer options other than the split itself."""

    overlap_grad_reduce: bool = _key(True, Switch(), of=MEGATRON_BACKENDS)
    overlap_param_gather: bool = _key(True, Switch(), of=MEGATRON_BACKENDS)
    tp_comm_overlap: bool = _key(
        False, Switch(), "Tensor-parallel collectives run inside the GEMMs beside them.", of=MEGATRON_BACKENDS
    )
    """Uses Transformer Engine's user buffers in their default configuration; needs sequence_parallel."""
    cross_entropy_fusion: bool = _key(False, Switch(), of=MEGATRON_BACKENDS)
    cross_entropy_fusion_impl: str = _key("te", Choice(("te", "native")), of=MEGATRON_BACKENDS)
    """With cross_entropy_fusion: te (Transformer Engine) or native (megatron-core's own, its default)."""
    gradient_accumulation_fusion: bool = _key(
        True, Switch(), "Weight gradients are added to the sum by the product that makes them.", of=MEGATRON_BACKENDS
    )
    """When off, each weight gradient is a separate tensor before it is accumulated."""
    attention_backend: str = _key(
        "auto",
        Choice(("auto", "flash", "fused", "unfused")),
        "Whose kernel Transformer Engine takes.",
        of=MEGATRON_BACKENDS,
    )
    """flash: flash-attn; fused: cuDNN; unfused: no fused kernel, with all scores in memory; auto: cuDNN, or flash-attn
    if the trainer uses it (`Traits.flash_attn`)."""
    deterministic_mode: bool = _key(False, Switch(), of=MEGATRON_BACKENDS)
    precision_aware_optimizer: bool = _key(
        False, Switch(), "Transformer Engine's Adam, which may keep less than fp32.", of=MEGATRON_BACKENDS
    )
    main_params_dtype: str = _key("fp32", Choice(("fp32", "fp16")), _OF_AWARE, of=MEGATRON_BACKENDS)
    """Dtype of the optimizer's master weights; where possible, fp32 is stored as a 16-bit remainder of bf16 weights."""
    exp_avg_dtype: str = _key("fp32", Choice(MOMENT_DTYPES), _OF_AWARE, of=MEGATRON_BACKENDS)
    """Dtype of Adam's first moment."""
    exp_avg_sq_dtype: str = _key("fp32", Choice(MOMENT_DTYPES), _OF_AWARE, of=MEGATRON_BACKENDS)
    """Dtype of Adam's second moment."""
    fp8_param: bool = _key(False, Switch(), of=MEGATRON_BACKENDS)
    """With fp8 training, keeps the blocks' weights in fp8 only (Megatron's fp8_param_gather)."""
    cp_comm_type: str = _key(
        "p2p", Choice(("p2p", "a2a")), "How the ranks of a sequence attend to all of it.", of=MEGATRON_BACKENDS
    )
    """p2p passes keys and values around a ring; a2a gives every rank the whole sequence for some of the heads."""
    moe_token_dispatcher_type: str | None = _key(None, Choice(("alltoall", "flex")), of=MEGATRON_BACKENDS)
    """How tokens reach their experts: alltoall, flex (DeepEP, HybridEP), or None for the backend's default."""
    moe_router_force_load_balancing: bool | None = _key(
        None, Switch(), "The router spreads tokens evenly, whatever they are: of benchmarks.", of=MEGATRON_BACKENDS
    )
    """None means what the trainer's runs do (`Traits.routes_freely`)."""
    overlap_moe_expert_parallel_comm: bool = _key(
        False,
        Switch(),
        "Dispatch and combine of a micro batch run beside the work of another one.",
        of=MEGATRON_BACKENDS,
    )
    """Forward and backward of two micro-batches run together, layer by layer (`operators/combined.py`)."""
    moe_expert_capacity_factor: float | None = _key(
        None,
        Number(0.01, 1024),
        "Tokens that an expert takes at most, over the average; others are dropped.",
        of=MEGATRON_BACKENDS,
    )
    fused_linear_cross_entropy: bool = _key(
        False,
        Switch(),
        "Liger's loss, without whole logits; of ddp, deepspeed and fsdp2.",
        of=SHARDED_BACKENDS,
    )
    """Computes the loss from the hidden states without materializing the logits."""
    expandable_segments: bool = _key(
        False,
        Switch(),
        "torch's allocator with expandable segments; of ddp, deepspeed and fsdp2.",
        of=SHARDED_BACKENDS,
    )
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which all but removes allocator fragmentation."""
    experts_impl: str | None = _key(
        None,
        Choice(("eager", "grouped_mm")),
        "How transformers runs experts: eager (one by one), or grouped_mm from version 5 on; not of Megatron.",
        of=SHARDED_BACKENDS,
    )
    """None means what every trainer version in use supports (`Traits.experts_impl`)."""
