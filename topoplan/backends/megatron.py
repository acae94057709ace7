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
    vision_on_first_stage: bool = True
    """The vision tower sits whole on every rank of the first stage."""
    expandable_segments: bool = True
    """PyTorch's allocator runs with expandable_segments:True."""


MEGATRON = Traits(name="megatron", vocab_multiple=128, vocab_must_divide=False)
"""Megatron-LM's own training loop and the trainers built on it (Megatron-Bridge, ms-swift)."""

MCA = Traits(name="mca", vocab_multiple=1, vocab_must_divide=True)
"""LLaMA-Factory's mcore_adapter: padded_vocab_size is the checkpoint's vocab_size (`models/*/__init__.py`)."""

TRAITS = {"megatron": MEGATRON, "mca": MCA}
