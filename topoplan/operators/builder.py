"""The base class of the builders that list a layer's operators, with what both implementations share."""

from __future__ import annotations

from typing import Any

from topoplan.network.placement import Group
from topoplan.operators.core_attention import CoreAttention, Ring
from topoplan.operators.machine import Calls, Moved, Product
from topoplan.operators.op import BF16, FP32, Op, Part, SavedTensor, Side, Work
from topoplan.operators.shard import Shard
from topoplan.specs.model import Model


class Builder:
    """Collects the operators of one layer on one rank.

    A mixer that only uses the methods of this class is right for both implementations (Transformer Engine and eager).
    """

    def __init__(self, model: Model, shard: Shard) -> None:
        self.model, self.shard, self.hidden = model, shard, model.hidden_size
        self.tokens, self.local = shard.tokens, shard.local_tokens
        self.ops: list[Op] = []

    def add(self, name: str, part: Part, work: Work | None, **fields: Any) -> None:
        """Append an operator; `fields` are further fields of `Op`."""
        self.ops.append(Op(name, part, work, **fields))

    def moved(self, name: str, forward_bytes: float, backward_bytes: float, *, kernels: int = 1, **fields: Any) -> None:
        """Append memory-bound work."""
        self.add(name, "elementwise", Moved(forward_bytes, backward_bytes, kernels, kernels), **fields)

    def keep(
        self, name: str, saved_bytes: float, freed_by: tuple[str, ...] = (), saved_only_by: tuple[str, ...] = ()
    ) -> None:
        """Record a tensor that the last operator saves for backward."""
        last = self.ops[-1]
        self.ops[-1] = last._replace(saved=(*last.saved, SavedTensor(name, saved_bytes, freed_by, saved_only_by)))

    def norm(self, name: str, width: int = 0) -> None:
        """Add a norm of the hidden state, or of a tensor `width` wide."""
        raise NotImplementedError

    def linear(
        self, name: str, inputs: int, outputs: int, side: Side = "column", *, divides: str = ""
    ) -> Product | None:
        """Add a linear layer of the whole model; `divides` names the dimension that tensor parallelism splits."""
        raise NotImplementedError

    def core_attention(self, core: CoreAttention, **fields: Any) -> None:
        """Add attention itself, its softmax if that is a separate kernel, and the traffic of context parallelism."""
        shard, by = self.shard, ("core_attn",)
        self.add("core_attn", "attention", core, freed_by=by, **fields)
        if not shard.flash_attention:
            # Masked softmax reads and writes the scores; backward reads probabilities and gradients and writes
            # gradients.
            scores = self.tokens * shard.seq_len * core.heads
            self.moved("softmax", 2 * BF16 * scores, 3 * BF16 * scores, freed_by=by)
        elif shard.cp_all_to_all:
            # q, k, v and the output; each is reordered for its receivers before it is sent, and again on arrival.
            elements = self.tokens * (core.heads + core.kv_heads) * (core.key_dim + core.value_dim)
            self.moved("cp reorder", 4 * BF16 * elements, 4 * BF16 * elements, kernels=8, freed_by=by)
            calls = Calls("all-to-all", Group(shard.cp, shard.tp), BF16 * elements / 4, 4, 4)
            self.add("cp all-to-all", "cp_comm", calls, freed_by=by)
        elif shard.cp > 1:
            # In each hop the partial output is rescaled and added in fp32.
            hops, merged = shard.cp - 1, 3 * FP32 * self.tokens * core.heads * core.value_dim
            self.moved("cp merge", hops * merged, hops * merged, kernels=4 * hops, freed_by=by)
            self.add("cp ring", "cp_comm", Ring(core), freed_by=by)

    def saved_bytes(self, first: int) -> float:
        """Return the bytes saved by the operators from index `first` on."""
        return sum(tensor.saved_bytes for op in self.ops[first:] for tensor in op.saved)
