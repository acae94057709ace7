"""The pipeline schedule: which micro-batches are in flight, and how long the stages take together.

Source: megatron-core 0.16 `core/pipeline_parallel/schedules.py` (get_pp_rank_microbatches, get_schedule_table);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


def schedule_table(pp: int, vpp: int, microbatches: int) -> list[tuple[int, int]]:
    """Return (micro-batch, model chunk) of every forward of a rank in order: pp micro-batches per chunk at a time.

    Backwards follow the same order with the chunks reversed. Source: get_schedule_table.
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + pp, microbatches))
    ]


def warmup_forwards(pp: int, vpp: int, rank: int, microbatches: int) -> int:
    """Return the forwards of a rank before forwards and backwards alternate (get_pp_rank_microbatches).

    1F1B: pp - rank - 1. Interleaved: (pp - rank - 1) * 2 + (vpp - 1) * pp. At most all forwards of the rank.
    """
    warmup = pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * pp
    return min(microbatches * vpp, warmup)


def most_in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> int:
    """Return the largest number of forwards whose activations a pipeline rank holds, over all its model chunks.

    It is the warm-up forwards plus one.
    """
    return min(microbatches * vpp, warmup_forwards(pp, vpp, rank, microbatches) + 1)


@lru_cache(maxsize=1 << 14)
def in_flight(pp: int, vpp: int, rank: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of each model chunk that a pipeline rank holds, at every fullest moment.

    At all of these moments the rank holds `most_in_flight` forwards. With interleaving there are several: while
    forwards and backwards alternate, the forwards move on to the next chunk and the backwards to the previous one.
    """
    most = most_in_flight(pp, vpp, rank, microbatches)
    if vpp == 1:
        return ((most,),)
    # The schedule repeats every pp micro-batches; four rounds contain all of its moments.
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
"""Seconds of one micro-batch, by pipeline rank, then by model chunk."""


def schedule_s(forward_s: Times, backward_s: Times, microbatches: int, p2p_s: float = 0.0) -> float:
    """Return the seconds from the first forward to the end of the last backward.

    `p2p_s` is the time of one message between neighbors.

    A forward or a backward waits for its predecessor on the same rank and for its message, so the schedule takes as
    long as its longest chain of dependent work. The chains compared are those that stay on one rank for most of the
    time, for each rank in turn:

        fill    until the rank's first backward starts: its `most_in_flight` forwards, and what they wait for
        turns   one backward and one forward each, until no forward is left
        drain   the remaining backwards, and what waits for them

    Reversed in time, the schedule is the same schedule with forward and backward exchanged (with interleaving, except
    for what messages wait for), so the drain is the fill with exchanged times. Equal stages take t * (M + (pp - 1) /
    vpp) without messages, where M is the number of micro-batches and t the time of one forward and one backward of a
    rank: equation (2) of arXiv 2104.04473.

    `simulate.py` is the reference. Of the 23,617 1F1B pipelines that are evaluated while the specs in cluster_specs are
    searched, 95% are off by less than 0.06% and all by less than 1.5%. Of the 30,407 interleaved ones, 71% are exact
    and 95% are off by less than 2.2%. The worst are 12% too short, where a rank's longest chunk is neither the first
    chunk of the first rank nor the last chunk of the last rank, and 8% too long, where messages take longer than the
    work beside them.
    """
    if len(forward_s) == 1:
        return microbatches * (sum(forward_s[0]) + sum(backward_s[0]))
    if len(forward_s[0]) > 1:
        return _interleaved_s(forward_s, backward_s, microbatches, p2p_s)
    return _plain_s([chunk for (chunk,) in forward_s], [chunk for (chunk,) in backward_s], microbatches, p2p_s)


def _plain_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, p2p_s: float) -> float:
    """Return `schedule_s` of 1F1B; times are by pipeline rank.

    Every turn includes a message with each neighbor, since nothing overlaps with them. Of p equal ranks without
    messages, rank k fills in p * f + (p - 1 - k) * b, has M - p + k turns of f + b, and drains in p * b + (p - 1 - k) *
    f: in total (M + p - 1) * (f + b), for every k.
    """
    pp = len(forward_s)
    ahead = [most_in_flight(pp, 1, rank, microbatches) for rank in range(pp)]
    messages_s = [(2 if 0 < rank < pp - 1 else 1) * p2p_s for rank in range(pp)]
    forwards_end, first_backward = _plain_fill(forward_s, backward_s, ahead, messages_s, p2p_s)
    backwards_left, last_forward = _plain_fill(backward_s, forward_s, ahead, messages_s, p2p_s)
    longest = 0.0
    for rank in range(pp):
        if turns := microbatches - ahead[rank]:
            turn = forward_s[rank] + backward_s[rank] + messages_s[rank]
            took = first_backward[rank] + turns * turn + last_forward[rank]
        else:
            # Its last forward precedes its first backward: the wait between them is in both the fill and the drain.
            took = max(first_backward[rank] + backwards_left[rank], forwards_end[rank] + last_forward[rank])
        longest = max(longest, took)
    return longest


def _plain_fill(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    ahead: Sequence[int],
    messages_s: Sequence[float],
    p2p_s: float,
) -> tuple[list[float], list[float]]:
    """Return (end of the forwards before the first backward, start of the first backward) in 1F1B.

    Both are in seconds, by pipeline rank. The first micro-batch passes one rank after another. The others follow at the
    pace of the slowest rank so far, which receives each of them and sends it on while nothing else runs: `messages_s`
    are the messages with its neighbors.
    """
    arrived = pace = 0.0
    ends = []
    for forward, count, messages in zip(forward_s, ahead, messages_s, strict=True):
        pace = max(pace, forward + messages)
        ends.append(arrived + forward + (count - 1) * pace)
        arrived += forward + p2p_s
    return ends, _first_backwards(ends, backward_s, p2p_s)


def _first_backwards(forwards_end: Sequence[float], backward_s: Sequence[float], p2p_s: float) -> list[float]:
    """Return the start of each rank's first backward.

    It follows the rank's forwards before it, and the first backward of the rank below.
    """
    starts = list(forwards_end)
    for rank in range(len(starts) - 2, -1, -1):
        starts[rank] = max(starts[rank], starts[rank + 1] + backward_s[rank + 1] + p2p_s)
    return starts


class _Fill(NamedTuple):
    """How the interleaved schedule begins on a pipeline rank, in seconds from its start."""

    forwards_end: float
    """End of the forwards before the first backward."""
    first_backward: float
    """Start of the first backward."""
    turns_begin: float
    """`first_backward`, or later if the turns have to wait for the last rank's long stretch (`_turns_begin`)."""


def _interleaved_s(forward_s: Times, backward_s: Times, microbatches: int, p2p_s: float) -> float:
    """Return `schedule_s` of interleaved 1F1B.

    A round of pp micro-batches takes a rank through all its chunks, with a stretch of pp turns in each. Turn n of a
    rank, counted from 0, is its backward n and the forward after it. Messages lead

        from a backward of turn n to turn n of the rank above, and from rank 0 to turn n + pp of the last rank;
        from a forward of turn n to turn n + 2 of the rank below, and from the last rank to turn n + 2 - pp of rank 0,

    since the rank below has two forwards fewer before turn 0. A chain that leaves its rank for a stretch of another
    rank gets longer if the stretch takes more time than the turns until it is back. Two such detours are considered:
    the last rank's stretch in its last chunk, which has the loss, once per round; and the first rank's stretch in its
    first chunk, which has the embedding, once between two rounds. A chain that includes one of them comes too late for
    the other. In the first and in the last round the last rank's stretch is in `turns_begin`; otherwise both are in
    `_detours`.
    """
    pp, vpp, rounds = len(forward_s), len(forward_s[0]), microbatches // len(forward_s)
    ahead = [most_in_flight(pp, vpp, rank, microbatches) for rank in range(pp)]
    fills = _interleaved_fill(forward_s, backward_s, ahead, rounds, p2p_s)
    drains = _interleaved_fill(backward_s, forward_s, ahead, rounds, p2p_s)
    detours = _detours(forward_s, backward_s)
    longest = 0.0
    for rank, (fill, drain) in enumerate(zip(fills, drains, strict=True)):
        along = fill.first_backward + drain.first_backward
        if rounds > 1:
            over_first, over_last = detours[rank]
            late = fill.turns_begin + drain.turns_begin
            ends = max(along + (rounds - 1) * over_first, late + (rounds - 2) * over_last)
        else:
            # There is only one stretch in the last chunk: a chain has it either after the start or before the end.
            ends = max(fill.turns_begin + drain.forwards_end, fill.forwards_end + drain.turns_begin)
            if ahead[rank] < pp * vpp:
                ends = max(ends, along)
        turns = _turns_s(forward_s[rank], backward_s[rank], pp, ahead[rank], rounds, p2p_s)
        longest = max(longest, ends + turns)
    return longest


def _turns_s(
    forward_s: Sequence[float], backward_s: Sequence[float], pp: int, ahead: int, rounds: int, p2p_s: float
) -> float:
    """Return the seconds of an interleaved rank's turns; times are by model chunk.

    These are all its work except the `ahead` forwards at the beginning and as many backwards at the end, in the same
    chunks. A message overlaps with the next backward or forward, and costs a turn what it takes longer than an average
    one.
    """
    vpp, forward, backward = len(forward_s), sum(forward_s), sum(backward_s)
    work = rounds * pp * (forward + backward) - _entries_s(forward_s, pp, ahead) - _entries_s(backward_s, pp, ahead)
    messages = max(0.0, p2p_s - backward / vpp) + max(0.0, p2p_s - forward / vpp)
    return work + (rounds * pp * vpp - ahead) * messages


def _entries_s(chunks_s: Sequence[float], pp: int, count: int) -> float:
    """Return the seconds of the first `count` entries of `schedule_table` on a rank whose chunks take `chunks_s`."""
    stretches, rest = divmod(count, pp)
    rounds, chunk = divmod(stretches, len(chunks_s))
    return pp * (rounds * sum(chunks_s) + sum(chunks_s[:chunk])) + rest * chunks_s[chunk]


def _interleaved_fill(
    forward_s: Times, backward_s: Times, ahead: Sequence[int], rounds: int, p2p_s: float
) -> list[_Fill]:
    """Return how the interleaved schedule begins, by pipeline rank.

    After its first forward of the last chunk a rank has up to pp - 1 more there, and then some in the first chunk; the
    inputs of all of them have arrived by then.
    """
    pp, vpp, ends = len(forward_s), len(forward_s[0]), []
    for chunks, reached, count in zip(forward_s, _last_chunk_s(forward_s, p2p_s), ahead, strict=True):
        more = count - (vpp - 1) * pp - 1
        last, first = min(more, pp - 1), max(0, more - pp + 1)
        ends.append(reached + last * (chunks[-1] + p2p_s) + first * (chunks[0] + p2p_s))
    starts = _first_backwards(ends, [chunks[-1] for chunks in backward_s], p2p_s)
    begin = _turns_begin(forward_s, backward_s, ahead, rounds, p2p_s, starts)
    return [_Fill(*moments) for moments in zip(ends, starts, begin, strict=True)]


def _last_chunk_s(forward_s: Times, p2p_s: float) -> list[float]:
    """Return the end of the first forward in the last chunk, in seconds from the schedule's start, by pipeline rank.

    pp micro-batches pass one virtual stage after another, each at the stage's pace, so only the first and the final one
    are followed, from stage to stage:

        first = max(first of the previous stage, final of this rank's previous chunk) + forward
        final = max(final of the previous stage + forward, first + (pp - 1) * forward)

    Megatron waits for a message where it posts it, and rank 0 posts the receives from the last rank one by one, after
    its own forwards. So the last rank sends the first message of a chunk when rank 0 has finished that chunk, and the
    final one when rank 0 has finished all but one of the next chunk (`_all_but_one_s`).
    """
    pp, last = len(forward_s), len(forward_s) - 1
    first, firsts, finals = 0.0, [0.0] * pp, [0.0] * pp
    for chunk in range(len(forward_s[0])):
        each = [chunks[chunk] + p2p_s for chunks in forward_s]
        final = finals[last]
        for rank, forward in enumerate(each):
            if rank == last and chunk:
                first = max(first, _all_but_one_s(each, firsts))
            first = max(first, finals[rank]) + forward
            final = max(final + forward, first + last * forward)
            if rank == last:
                final = max(final, finals[0] + last * forward)
            firsts[rank], finals[rank] = first, final
    return [end - p2p_s for end in firsts]


def _all_but_one_s(each_s: Sequence[float], firsts_s: Sequence[float]) -> float:
    """Return when rank 0 has finished all micro-batches of a chunk but one.

    `firsts_s` is the end of the first micro-batch on each rank. A rank proceeds when the rank below has finished the
    micro-batch before the last one, and so on down: pp - 1 micro-batches on rank 0 are pp - 1 - 2 * r on rank r,
    followed by one forward on each rank above.
    """
    pp = len(each_s)
    return max(firsts_s[rank] + (pp - 2 - 2 * rank) * each_s[rank] + sum(each_s[:rank]) for rank in range(pp // 2))


def _turns_begin(
    forward_s: Times,
    backward_s: Times,
    ahead: Sequence[int],
    rounds: int,
    p2p_s: float,
    first_backward: Sequence[float],
) -> list[float]:
    """Return `_Fill.turns_begin` by pipeline rank: a message's arrival, less the rank's work in its turns until then.

    The message comes from the end of the last rank's first long stretch: backwards 0 to pp - 1 of the last chunk, and
    the forwards between them. Backward pp - 1 is in turn pp - 1 on every rank. The forward after it is in turn 1 on
    rank 0 and in turn 2 * k + 1 on rank k, which matters if that is before turn pp - 1.
    """
    pp, vpp, last = len(forward_s), len(forward_s[0]), len(forward_s) - 1
    begin = list(first_backward)
    stretch_end = begin[last] + pp * backward_s[last][-1] + last * forward_s[last][-1]

    def until_s(rank: int, forwards: int, backwards: int) -> float:
        chunks, end = forward_s[rank], min(rounds * pp * vpp, ahead[rank] + forwards)
        forward = _entries_s(chunks, pp, end) - _entries_s(chunks, pp, ahead[rank])
        return forward + backwards * backward_s[rank][-1]

    comes = stretch_end
    for rank in range(last - 1, -1, -1):
        comes += p2p_s
        begin[rank] = max(begin[rank], comes - until_s(rank, last, last))
        comes += backward_s[rank][-1]
    if rounds > 1:
        comes = stretch_end + forward_s[last][0] + p2p_s
        for rank in range(last // 2):
            begin[rank] = max(begin[rank], comes - until_s(rank, 2 * rank + 1, 2 * rank + 2))
            comes += forward_s[rank][1] + p2p_s
    return begin


def _detours(forward_s: Times, backward_s: Times) -> list[tuple[float, float]]:
    """Return the seconds by which a long stretch lengthens a chain in a round, (first rank's, last rank's), or 0.

    The result is by pipeline rank.

    Over the first rank: up with a backward, then its stretch, where the forwards are one turn behind the backwards, so
    that the stretch includes one forward and one backward of the last chunk, and down with a forward. Meanwhile rank k
    has pp + 2 * k turns.

    Over the last rank: down with a forward, its stretch, up with a backward. Meanwhile rank k has pp - 1 + 2 * (pp - 1
    - k) turns. Or around: up with a backward to rank 0 and on to the last rank, its stretch and the forward after it,
    on to rank 0 and down. Meanwhile rank k has pp + 2 + 2 * k turns. One of these turns is assumed to be as long as the
    last rank's backward before the stretch plus the first forward of the stretch, and the ranks above, which have the
    chain in their second chunk, are assumed to be in their first.
    """
    pp, vpp, last = len(forward_s), len(forward_s[0]), len(forward_s) - 1
    first_chunk = [forward[0] + backward[0] for forward, backward in zip(forward_s, backward_s, strict=True)]
    last_chunk = [forward[-1] + backward[-1] for forward, backward in zip(forward_s, backward_s, strict=True)]
    on_first = pp * first_chunk[0] + last_chunk[0]
    on_last = pp * last_chunk[last]
    behind = forward_s[last][0] - forward_s[last][-1]
    detours = []
    for rank in range(pp):
        turn = (sum(forward_s[rank]) + sum(backward_s[rank])) / vpp
        above, below = sum(first_chunk[1:rank]), sum(last_chunk[rank + 1 : last])
        over_first = on_first + above - (pp + 2 * rank) * turn if rank else 0.0
        over_last = 0.0
        if rank < last:
            down = below + on_last - (last + 2 * (last - rank)) * turn
            around = on_last + behind + sum(first_chunk[:rank]) - (pp + 1 + 2 * rank) * turn
            over_last = max(down, around)
        detours.append((max(0.0, over_first), max(0.0, over_last)))
    return detours
