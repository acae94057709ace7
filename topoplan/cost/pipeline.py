"""The pipeline schedule: what is in flight, and how long the stages take together.

Source: megatron-core 0.16 `core/pipeline_parallel/schedules.py` (get_pp_rank_microbatches, get_schedule_table);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def most_in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> int:
    """Forwards whose activations a pipeline rank holds at its fullest, all its model chunks together.

    1F1B: the warm-up forwards and one more, min(M, pp - rank). Interleaved: (pp - rank - 1) * 2 + (vpp - 1) * pp
    warm-up forwards and one more.
    """
    warmup = pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * pp
    return min(microbatches * vpp, warmup + 1)


@lru_cache(maxsize=1 << 14)
def in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Micro batches of each model chunk that a pipeline rank holds, at all moments that no other one exceeds.

    All of them hold `most_in_flight` forwards. With interleaving there are several: while forwards and backwards take
    turns, the forwards move on to the next chunk and the backwards to the one before.
    """
    most = most_in_flight(pp, vpp, rank, microbatches)
    if vpp == 1:
        return ((most,),)
    # The schedule repeats itself every pp micro batches; four rounds hold every moment of it.
    rounds = min(microbatches, 4 * pp)
    table = [
        chunk for start in range(0, rounds, pp) for chunk in range(vpp) for _ in range(start, min(start + pp, rounds))
    ]
    held = [0] * vpp
    for chunk in table[:most]:
        held[chunk] += 1
    moments = {tuple(held)}
    for backward, forward in enumerate(table[most:]):
        held[vpp - 1 - table[backward]] -= 1
        held[forward] += 1
        moments.add(tuple(held))
    return tuple(sorted(moments))


def schedule_s(forward_s: Sequence[float], backward_s: Sequence[float], vpp: int, microbatches: int) -> float:
    """Seconds from the first forward to the last backward; one entry a pipeline rank, of one micro batch.

    A rank k is busy for M * t[k]. Before that the ranks above it pass the first micro batch down, and after it the last
    one up. In between it waits twice at most for a round trip through the ranks below: after its first forward, less
    its w warm-up forwards, and after its last forward, less as many backwards. The longest such path is the time: with
    M >= pp and stages up to half as long again as others, 1F1B takes 1.5% more at most. Interleaved stages pass pieces
    a vpp-th as long. Equal stages take t * (M + (pp - 1) / vpp), equation (2) of arXiv 2104.04473.
    """
    pp = len(forward_s)
    both = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    above, below, longest = 0.0, sum(both), 0.0
    for rank in range(pp):
        below -= both[rank]
        warmup = min(microbatches, pp - rank) - 1
        waits = max(0.0, below - warmup * forward_s[rank]) + max(0.0, below - warmup * backward_s[rank])
        longest = max(longest, microbatches * both[rank] + (above + min(waits, max(0.0, below))) / vpp)
        above += both[rank]
    return longest
