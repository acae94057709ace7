"""What the cost model must know about Megatron-core, and where LLaMA-Factory's adapter differs: traits, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a trainer builds and runs the model."""

    name: str
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp (make_vocab_size_divisible_by); 1: not padded."""
    vocab_must_divide: bool
    """A vocabulary that tp does not divide is refused instead of padded."""
    dispatcher: str = "alltoall"
    """Usual moe_token_dispatcher_type of expert groups inside a node."""
    dispatcher_across_nodes: str = "alltoall"
    """The same of groups that span nodes, where the cluster has what it needs."""


MEGATRON = Traits(name="megatron", vocab_multiple=128, vocab_must_divide=False, dispatcher_across_nodes="flex")
"""Megatron-LM's own training loop and the trainers built on it (Megatron-Bridge, ms-swift).

Dispatchers: Megatron-LM's `core/transformer/moe/README.md` (table "Token Dispatching", column "Best For") has alltoall
for "Standard EP > 1 setups", flex with DeepEP for "Cross-node EP" and flex with HybridEP for "Multi-Node NVLink";
Megatron-Bridge's `docs/training/moe-optimization.md` (Hardware affinity) has DeepEP for H100 and B200 and HybridEP for
NVL72. ms-swift's own default is alltoall everywhere: say so in the layout."""

MCA = Traits(name="mca", vocab_multiple=1, vocab_must_divide=True)
"""LLaMA-Factory's mcore_adapter: padded_vocab_size is the checkpoint's vocab_size (`models/*/__init__.py`).
`training_args.py` offers the dispatchers allgather and alltoall."""

TRAITS = {"megatron": MEGATRON, "mca": MCA}
