"""Traits of the trainers that split the model with Megatron-core: Megatron-LM's kin, and LLaMA-Factory's adapter."""

from __future__ import annotations

from topoplan.specs.traits import Traits

MEGATRON = Traits(name="megatron", vocab_multiple=128, vocab_must_divide=False, dispatcher_across_nodes="flex")
"""Megatron-LM's own training loop and the trainers built on it (Megatron-Bridge, ms-swift).

Dispatchers: Megatron-LM's `core/transformer/moe/README.md` (table "Token Dispatching", column "Best For") has alltoall
for "Standard EP > 1 setups", flex with DeepEP for "Cross-node EP" and flex with HybridEP for "Multi-Node NVLink";
Megatron-Bridge's `docs/training/moe-optimization.md` (Hardware affinity) has DeepEP for H100 and B200 and HybridEP for
NVL72. ms-swift's own default is alltoall everywhere: say so in the layout."""

MCA = Traits(name="mca", vocab_multiple=1, vocab_must_divide=True)
"""LLaMA-Factory's mcore_adapter: padded_vocab_size is the checkpoint's vocab_size (`models/*/__init__.py`).
`training_args.py` offers the dispatchers allgather and alltoall."""

TRAITS = {
    "megatron": MEGATRON,
    "mca": MCA,
    **{name: Traits(name=name, vocab_multiple=1, vocab_must_divide=False) for name in ("ddp", "deepspeed", "fsdp2")},
}
