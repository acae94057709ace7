"""The pipeline schedule: what is in flight, and how long the stages take together.

Source: megatron-core 0.16 `core/pipeline_parallel/schedules.py` (get_pp_rank_microbatches, get_schedule_table);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=1 << 16)
def in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> tuple[int, ...]:
    """Micro batches of each model chunk whose activations a pipeline rank holds at its fullest.

    1F1B: the warm-up forwards and one more, min(M, pp - rank). Interleaved: (pp - rank - 1) * 2 + (vpp - 1) * pp
    warm-up forwards, dealt to the chunks pp at a time, and one more.
    """
    if vpp == 1:
        return (min(microbatches, pp - rank),)
    alive = min(microbatches * vpp, (pp - rank - 1) * 2 + (vpp - 1) * pp + 1)
    counts = [0] * vpp
    group_start = 0
    while alive > 0:
        group = min(pp, microbatches - group_start)
        for chunk in range(vpp):
            taken = min(group, alive)
            counts[chunk] += taken
            alive -= taken
        group_start += group
    return tuple(counts)


def schedule_s(forward_s: Sequence[float], backward_s: Sequence[float], vpp: int, microbatches: int) -> float:
    """Seconds from the first forward to the last backward; one entry a pipeline rank, of one micro batch.

    Every micro batch passes the slowest rank; the pipeline fills and drains through the others once, in pieces a
    vpp-th as long when stages are interleaved: M * max(t) + (sum(t) - max(t)) / vpp, which for equal stages is
    t * (M + (pp - 1) / vpp), equation (2) of arXiv 2104.04473.
    """
    both = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    slowest = max(both)
    return microbatches * slowest + (sum(both) - slowest) / vpp
