"""The pipeline schedule: what is in flight, and how long the stages take together.

Source: megatron-core 0.16 `core/pipeline_parallel/schedules.py` (get_pp_rank_microbatches, get_schedule_table);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def schedule_table(pp: int, vpp: int, microbatches: int) -> list[tuple[int, int]]:
    """(micro batch, model chunk) of every forward of a rank in order: pp micro batches a chunk at a time.

    Backwards follow the same order with the chunks the other way round. Source: get_schedule_table.
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + pp, microbatches))
    ]


def warmup_forwards(pp: int, vpp: int, rank: int, microbatches: int) -> int:
    """Forwards of a rank before forwards and backwards take turns (get_pp_rank_microbatches).

    1F1B: pp - rank - 1. Interleaved: (pp - rank - 1) * 2 + (vpp - 1) * pp. Not more than there are.
    """
    warmup = pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * pp
    return min(microbatches * vpp, warmup)


def most_in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> int:
    """Forwards whose activations a pipeline rank holds at its fullest, all its model chunks together.

    The warm-up forwards and one more.
    """
    return min(microbatches * vpp, warmup_forwards(pp, vpp, rank, microbatches) + 1)


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
    table = [chunk for _, chunk in schedule_table(pp, vpp, min(microbatches, 4 * pp))]
    held = [0] * vpp
    for chunk in table[:most]:
        held[chunk] += 1
    moments = {tuple(held)}
    for backward, forward in enumerate(table[most:]):
        held[vpp - 1 - table[backward]] -= 1
        held[forward] += 1
        moments.add(tuple(held))
    return tuple(sorted(moments))


Times = Sequence[Sequence[float]]
"""Seconds of one micro batch, by pipeline rank, then by model chunk."""


def schedule_s(forward_s: Times, backward_s: Times, microbatches: int, p2p_s: float = 0.0) -> float:
    """Seconds from the first forward to the end of the last backward; `p2p_s` is one message between neighbours.

    The longest path through the schedule, among those that run along one rank k for most of the time: from the start to
    k's first backward (`_fill_s`), k's own forwards and backwards in turn, and from k's last forward to the end, which
    is the beginning of the same schedule backwards in time. Where k is not the busiest all along, the path may join it
    later and leave it earlier (`_late_s`), or leave it for a while (`_detours_s`). Equal stages take
    t * (M + (pp - 1) / vpp) without messages, equation (2) of arXiv 2104.04473.

    A message costs a rank of 1F1B its time for every neighbour and direction, since nothing runs beside it; with
    interleaving only in the warm-up and the last backwards, and where it outlasts the work that it runs beside.

    Measured against `cost.simulate` over 500 random pipelines and more of each kind: 1F1B is off by 0.5% at most,
    with fewer micro batches than ranks too. Interleaved, with virtual stages that differ by one layer of two to eight
    and ends that are up to two layers heavier, by 0.2% at the median, 2.6% in 19 of 20, from 6% low to 6% high at
    worst; with a vision tower of up to two layers in front, 7%; with stages up to twice as long as others and ends
    up to four times, 0.4% at the median and 10% at worst.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    if pp == 1:
        return microbatches * (sum(forward_s[0]) + sum(backward_s[0]))
    total, groups = microbatches * vpp, microbatches // pp
    counts = [most_in_flight(pp, vpp, rank, microbatches) for rank in range(pp)]
    forwards_done, first_backward = _fill_s(forward_s, backward_s, counts, p2p_s)
    backwards_left, last_forward = _fill_s(backward_s, forward_s, counts, p2p_s)
    late_backward, early_forward = first_backward, last_forward
    if vpp > 1:
        late_backward = _late_s(forward_s, backward_s, counts, first_backward, total, p2p_s)
        early_forward = _late_s(backward_s, forward_s, counts, last_forward, total, p2p_s)
    before = (vpp - 1) * pp
    above, below = 0.0, sum(ahead[-1] + back[-1] for ahead, back in zip(forward_s, backward_s, strict=True))
    longest = 0.0
    for rank in range(pp):
        ahead, back, count = forward_s[rank], backward_s[rank], counts[rank]
        forward, backward = sum(ahead), sum(back)
        # All of them but the `count` forwards at the beginning and as many backwards at the end.
        between = (microbatches - pp) * (forward + backward) + pp * (ahead[-1] + back[-1])
        between -= _turns_s(ahead, pp, count - before) + _turns_s(back, pp, count - before)
        if vpp == 1:
            between += (total - count) * p2p_s * (2 if 0 < rank < pp - 1 else 1)
        else:
            beside = max(0.0, p2p_s - backward / vpp) + max(0.0, p2p_s - forward / vpp)
            between += (total - count) * beside
        if groups > 1 and vpp > 1:
            # The ends of the last rank, or those of the first: the path cannot have both.
            below -= ahead[-1] + back[-1]
            last_end, first_end = _detours_s(forward_s, backward_s, rank, above, below)
            took = between + max(
                late_backward[rank] + early_forward[rank] + (groups - 2) * last_end,
                first_backward[rank] + last_forward[rank] + (groups - 1) * first_end,
            )
            above += ahead[0] + back[0]
        else:
            # One group of micro batches: a path begins late or ends early, not both.
            took = between + max(
                forwards_done[rank] + early_forward[rank],
                late_backward[rank] + backwards_left[rank],
                first_backward[rank] + last_forward[rank] if count < total else 0.0,
            )
        longest = max(longest, took)
    return longest


def _turns_s(times_s: Sequence[float], pp: int, count: int) -> float:
    """Seconds of `count` entries of the schedule table on a rank, from the first one of the last chunk; below 3 * pp.

    Behind the last chunk's pp micro batches come the next ones in the first chunk, then in the second.
    """
    seconds = min(count, pp) * times_s[-1]
    if count > pp:
        seconds += min(count - pp, pp) * times_s[0] + max(0, count - 2 * pp) * times_s[1]
    return seconds


def _fill_s(
    forward_s: Times, backward_s: Times, counts: Sequence[int], p2p_s: float
) -> tuple[list[float], list[float]]:
    """(end of the `counts` forwards before the first backward, start of the first backward), a rank each, in seconds.

    pp micro batches pass a chunk after another, each at the same pace; so the first and the last of them tell when a
    rank is through: it is held up by the rank above or by itself. Megatron waits for a message where it is posted, and
    rank 0 posts the receives from the last rank one by one, behind its own forwards: the last rank goes on to a chunk
    when rank 0 has done all but one of the micro batches there (`gate`), and rank 0 in turn hands on a micro batch when
    the rank below is through with the one before the last.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    last, warm = pp - 1, (vpp - 1) * pp + 1
    through = [0.0] * pp
    done: list[float] = []
    reached = gate = pace = 0.0
    for chunk in range(vpp):
        slowest = through[last]
        above = 0.0
        for rank, times in enumerate(forward_s):
            each = times[chunk] + p2p_s
            if rank == last:
                reached = max(reached, gate)
            reached = max(reached, through[rank]) + each
            if chunk and 2 * rank <= pp - 2:
                gate = max(gate, above + reached + (pp - 2 - 2 * rank) * each)
            above += each
            if chunk < vpp - 1:
                slowest = max(slowest + each, reached + last * each)
                if rank == last:
                    slowest = max(slowest, through[0] + last * each)
                through[rank] = slowest
                continue
            # The forwards from the first one of the last chunk to the first backward. A rank of 1F1B that has two
            # neighbours receives before, and sends behind, each of them.
            message = 2 * p2p_s if vpp == 1 and 0 < rank < last else p2p_s
            more = counts[rank] - warm
            pace = max(pace, times[chunk] + message)
            own, held_up = min(more, last) * (times[chunk] + message), min(more, last) * pace
            next_group = max(0, more - last) * (times[0] + message)
            done.append(reached - p2p_s + max(own, held_up) + next_group)
    starts = list(done)
    for rank in range(last - 1, -1, -1):
        starts[rank] = max(done[rank], starts[rank + 1] + backward_s[rank + 1][-1] + p2p_s)
    return done, starts


def _late_s(
    forward_s: Times, backward_s: Times, counts: Sequence[int], starts: Sequence[float], total: int, p2p_s: float
) -> list[float]:
    """`starts`, or later where a rank goes on only when the last rank has the first pp micro batches behind it.

    The last rank's forwards with the output layer and the loss, and their backwards, are all in its first pp turns.
    What is behind them reaches the ranks above as a backward, and the first ranks also as the next forward; both are
    carried back to the start of the rank by what it does until then.
    """
    pp, last = len(forward_s), len(forward_s) - 1
    before = (len(forward_s[0]) - 1) * pp
    late = list(starts)
    behind = starts[last] + pp * backward_s[last][-1] + last * forward_s[last][-1]
    up = behind
    for rank in range(last - 1, -1, -1):
        up += p2p_s
        ahead, count = forward_s[rank], counts[rank]
        turns = _turns_s(ahead, pp, min(total, count + last) - before) - _turns_s(ahead, pp, count - before)
        late[rank] = max(late[rank], up - turns - last * backward_s[rank][-1])
        up += backward_s[rank][-1]
    if total > before + pp:
        round_trip = behind + forward_s[last][0] + p2p_s
        for rank in range(last // 2):
            ahead, turn = forward_s[rank], 2 * rank + 1
            count = counts[rank] - before
            turns = _turns_s(ahead, pp, count + turn) - _turns_s(ahead, pp, count)
            late[rank] = max(late[rank], round_trip - turns - (turn + 1) * backward_s[rank][-1])
            round_trip += ahead[1] + p2p_s
    return late


def _detours_s(forward_s: Times, backward_s: Times, rank: int, above: float, below: float) -> tuple[float, float]:
    """What a path along a rank gains by leaving it while the (last, first) rank has its end, or 0.

    Once for every group of pp micro batches but the outer ones. A turn is a forward and a backward. A message takes
    two turns to each rank further down as a forward, and none further up as a backward; from the last rank to the first
    a forward gains pp - 2 turns, and a backward the other way loses pp. `above` is a turn of the first chunks of all
    ranks above, `below` one of the last chunks of all ranks below.
    """
    pp, vpp, last = len(forward_s), len(forward_s[0]), len(forward_s) - 1
    turn = (sum(forward_s[rank]) + sum(backward_s[rank])) / vpp
    last_end = first_end = 0.0
    if rank < last:
        ahead, back = forward_s[last], backward_s[last]
        # `below` has the last rank's own turn once.
        down = last * (ahead[-1] + back[-1]) + below - (2 * (last - rank) + last) * turn
        around = pp * (ahead[-1] + back[-1]) - ahead[-1] + ahead[0] + above - (pp + 1 + 2 * rank) * turn
        last_end = max(0.0, down, around)
    if rank:
        ahead, back = forward_s[0], backward_s[0]
        # `above` has the first rank's own turn once.
        first_end = max(0.0, last * (ahead[0] + back[0]) + ahead[-1] + back[-1] + above - (pp + 2 * rank) * turn)
    return last_end, first_end
