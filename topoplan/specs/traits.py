"""How a trainer computes, as far as memory and time depend on it: a value that its wing makes and engines read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a trainer that has all logits in memory, in bytes a logit."""

    forward_bytes: float
    """Alive at the end of forward."""
    backward_bytes: float
    """Alive at the worst moment of the loss's own backward."""
    forward_moved_bytes: float
    """Read and written in forward."""
    backward_moved_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What a trainer pads the sequences of a micro batch to. Packed samples fill seq_len in any case."""

    multiple: int = 1
    """The longest of them, rounded up to a multiple of this."""
    pt_multiple: int | None = None
    """The same in stage pt, where it is another."""
    end_to_end: bool = False
    """Not at all: the samples of a micro batch lie end to end, and it is as long as they are together."""
    packs_apart: bool = False
    """Attention stays within the samples of a packed sequence, whatever the job says."""
    to_seq_len_with_experts: bool = False
    """To seq_len under expert parallel, but for stage pt."""
    removed: bool = False
    """Not at all: whole samples follow each other up to a budget of seq_len tokens a sequence of the micro batch, and
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
    """Attention of Transformer Engine is flash-attn's where the layout leaves that open; version 2, for version 3 has
    to be built from its source."""
    router_pads_on: tuple[str, ...] = ()
    """Architectures on which runs in 8 bits have the router pad what an expert gets
    (moe_router_padding_for_quantization, which megatron-core leaves off)."""
    dispatcher: str = "alltoall"
    """Usual moe_token_dispatcher_type of expert groups inside a node."""
    routes_freely: bool = False
    """Tokens go to the experts that the router likes best, as in all fine-tuning. Benchmarks of Megatron-LM and
    Megatron-Bridge force balance (moe_router_force_load_balancing)."""
    dispatcher_across_nodes: str = "alltoall"
    """The same of groups that span nodes, where the cluster has what it needs."""
    is_adapter: bool = False
    """mcore_adapter (MCA) builds, feeds and saves the model, with what it lacks of Megatron-core's own ways."""
    reduces_in_fp32: bool = False
    """Gradients of FSDP2 are reduced in fp32 where no key says it, as verl does; accelerate takes the products' type
    (`utils/dataclasses.py`, FullyShardedDataParallelPlugin.set_mixed_precision)."""
    experts_impl: str = "eager"
    """How experts run where the layout does not say: one by one wherever a version of transformers below 5 will do for
    the trainer (LLaMA-Factory takes 4.55 and newer, ms-swift 4.33)."""
    loss: Loss | None = None
    """Of an eager trainer; Megatron's is one of its layout's."""
    fsdp_version: int = 2
    """1: what is in no block is one flat parameter, and a single GPU does without sharding (NO_SHARD)."""
    adam_bytes: float = 0.0
    """A trained parameter's share of what FSDP's optimizer step has on top of the states."""
    stranded_bytes: float = 0.0
    """A logit's share of a block that the caching allocator loses without expandable segments."""
    distributes_one_gpu: bool = False
    """A single process makes a process group, too."""
    sends_weights: bool = False
    """A process has a communicator with one that generates samples, in reinforcement learning."""
