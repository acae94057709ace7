"""How a trainer computes, as far as memory and time depend on it: a value that its wing makes and engines read."""

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
