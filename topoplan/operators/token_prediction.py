"""What a multi-token-prediction layer has around its block.

Source: megatron-core 0.16 `core/transformer/multi_token_prediction.py` (MultiTokenPredictionLayer).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.network.placement import Group
from topoplan.operators.machine import Machine, Product
from topoplan.operators.op import BF16, FP32, Collective, Seconds, Work
from topoplan.operators.te import TeBuilder


def te(build: TeBuilder) -> None:
    """Add the norms of hidden state and next embedding, their joint projection, and the norm after the block."""
    hidden, local, shard = build.hidden, build.local, build.shard
    hidden_bytes = BF16 * local * hidden
    for name in ("enorm", "hnorm", "mtp final_layernorm"):
        build.norm(name)
        build.keep(f"{name} input", hidden_bytes)
    joined = 2 * BF16 * local * 2 * hidden
    # At the block's own worst moment, the input of the norm after the block has been freed.
    build.moved("concatenation", joined, joined, gradients_bytes=-hidden_bytes)
    build.keep("mtp norm statistics", 3 * FP32 * local)
    product = build.linear("eh_proj", 2 * hidden, hidden)
    if shard.tp == 1:
        return
    build.add("eh_proj collectives", "tp_comm", JointProjection(hidden, product))
    if shard.sequence_parallel:
        # The block's input is a slice of eh_proj's output, gathered over the tensor-parallel group, and keeps it alive.
        build.keep("eh_proj output, gathered", BF16 * (shard.tokens - local) * hidden)


@dataclass(frozen=True, slots=True)
class JointProjection(Work):
    """Collectives of the joint projection, whose output is gathered over the tensor-parallel group.

    With sequence parallelism its input is gathered too, and the block gets a slice of the output, whose gradient is
    gathered.
    """

    hidden: int
    beside: Product
    source = "MLM core/transformer/multi_token_prediction.py"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds that the product's gradients do not hide."""
        shard, overlap, group = on.shard, on.profile.tp_overlap, Group(on.shard.tp, 1)
        whole = BF16 * shard.tokens * 2 * self.hidden
        forward = on.call_s("all-gather", group, whole / 2)
        dgrad, wgrad = on.gradients_s(self.beside)
        if not shard.sequence_parallel:
            into = on.call_s("all-reduce", group, whole)
            # A frozen weight has no gradient to overlap with. Gathering the output, which is half as large, costs a
            # quarter of an all-reduce.
            backward = into - min(into, wgrad) * overlap
            return Seconds(forward, backward, Collective("all-reduce", group, whole, into, 0.25, 1))
        into = on.call_s("all-gather", group, whole)
        if shard.adapters is not None:
            return Seconds(forward + into, forward + into, Collective("all-gather", group, whole, into, 1.5, 1.5))
        backward = forward + 2 * into - min(2 * into, dgrad + wgrad) * overlap
        return Seconds(forward + into, backward, Collective("all-gather", group, whole, into, 1.5, 2.5))
