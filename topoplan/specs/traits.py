"""A trainer's computation, as far as memory and time depend on it: its wing creates the value, engines read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a trainer that materializes all logits, in bytes per logit."""

    forward_bytes: float
    """Alive at the end of the forward pass."""
    backward_bytes: float
    """Alive at the peak of the loss's own backward pass."""
    forward_moved_bytes: float
    """Read and written in the forward pass."""
    backward_moved_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How a trainer pads the sequences of a micro-batch. Packed samples always fill seq_len."""

    multiple: int = 1
    """Sequences are padded to the longest one, rounded up to a multiple of this."""
    pt_multiple: int | None = None
    """The multiple in stage pt, if it differs."""
    end_to_end: bool = False
    """No padding: the samples of a micro-batch are concatenated, so its length is the sum of theirs."""
    packs_apart: bool = False
    """Attention is limited to each sample of a packed sequence, whatever the job says."""
    to_seq_len_with_experts: bool = False
    """Sequences are padded to seq_len under expert parallelism, except in stage pt."""
    removed: bool = False
    """No padding: whole samples are concatenated up to a budget of seq_len tokens per sequence of the micro-batch, and
    the ranks' shares of a batch are balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a trainer builds and runs the model."""

    name: str
    padding: Padding
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this times tp (make_vocab_size_divisible_by); 1: not padded."""
    vocab_must_divide: bool = False
    """A vocabulary that tp does not divide is refused instead of padded."""
    flash_attn: bool = False
    """Transformer Engine uses flash-attn if the layout leaves the choice open; version 2, because version 3 must be
    built from source."""
    router_pads_on: tuple[str, ...] = ()
    """Architectures on which 8-bit runs make the router pad each expert's tokens
    (moe_router_padding_for_quantization, off by default in megatron-core)."""
    fuses_experts_over_nodes: bool = False
    """In mxfp8, where NVLink reaches beyond a node, an expert's activation and casts run inside its two products
    (use_transformer_engine_op_fuser, off by default in megatron-core)."""
    dispatcher: str = "alltoall"
    """Default moe_token_dispatcher_type of expert groups within a node."""
    routes_freely: bool = False
    """Tokens go to the experts that the router prefers, as in all fine-tuning. Benchmarks of Megatron-LM and
    Megatron-Bridge force balance (moe_router_force_load_balancing)."""
    dispatcher_across_nodes: str = "alltoall"
    """Default moe_token_dispatcher_type of expert groups that span nodes, if the cluster supports it."""
    is_adapter: bool = False
    """mcore_adapter (MCA) builds, feeds and saves the model, without some of Megatron-core's own features."""
    reduces_in_fp32: bool = False
    """FSDP2 reduces gradients in fp32 unless a key says otherwise, as in verl; accelerate uses the compute dtype
    (`utils/dataclasses.py`, FullyShardedDataParallelPlugin.set_mixed_precision)."""
    experts_impl: str = "eager"
    """How experts run unless the layout says otherwise: one by one if the trainer supports a version of transformers
    below 5 (LLaMA-Factory takes 4.55 and newer, ms-swift 4.33)."""
    loss: Loss | None = None
    """The loss of an eager trainer; Megatron's loss is part of the layout."""
    fsdp_version: int = 2
    """1: parameters outside the blocks form one flat parameter, and a single GPU is not sharded (NO_SHARD)."""
    adam_bytes: float = 0.0
    """Bytes per trained parameter that FSDP's optimizer step needs on top of the states."""
    stranded_bytes: float = 0.0
    """Bytes per logit of a block that the caching allocator strands without expandable segments."""
    distributes_one_gpu: bool = False
    """Even a single process creates a process group."""
    sends_weights: bool = False
    """The training process has a communicator with one that generates samples, in reinforcement learning."""
