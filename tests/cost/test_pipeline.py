"""The schedule against the order of work that megatron-core lays down, run step by step."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoplan.cost.pipeline import in_flight, most_in_flight, schedule_s

Work = tuple[str, int, int]
"""forward or backward, micro batch, model chunk."""


def schedule_table(microbatches: int, vpp: int, group: int) -> list[tuple[int, int]]:
    """megatron-core 0.16 `pipeline_parallel/schedules.py::get_schedule_table`: (micro batch, model chunk)."""
    table = []
    for first in range(0, microbatches, group):
        members = range(first, min(first + group, microbatches))
        table += [(microbatch, chunk) for chunk in range(vpp) for microbatch in members]
    return table


def order_of_work(pp: int, vpp: int, rank: int, microbatches: int) -> list[Work]:
    """What a rank does: warm-up forwards (`get_pp_rank_microbatches`), then one of each, then the backwards left."""
    table = schedule_table(microbatches, vpp, pp)
    warmup = pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * pp
    warmup = min(warmup, len(table))
    forwards: list[Work] = [("forward", microbatch, chunk) for microbatch, chunk in table]
    backwards: list[Work] = [("backward", microbatch, vpp - 1 - chunk) for microbatch, chunk in table]
    work = forwards[:warmup]
    for step in range(warmup, len(table)):
        work += [forwards[step], backwards[step - warmup]]
    return work + backwards[len(table) - warmup :]


def held_moments(pp: int, vpp: int, rank: int, microbatches: int) -> list[tuple[int, ...]]:
    """Micro batches of each chunk whose activations are held, after each forward."""
    held, moments = [0] * vpp, []
    for kind, _, chunk in order_of_work(pp, vpp, rank, microbatches):
        held[chunk] += 1 if kind == "forward" else -1
        assert held[chunk] >= 0
        if kind == "forward":
            moments.append(tuple(held))
    assert not any(held)
    return moments


def makespan(forward_s: list[list[float]], backward_s: list[list[float]], microbatches: int) -> float:
    """Seconds until all work is done, each piece as soon as its rank is free and what it needs is there.

    Times are indexed by rank, then by model chunk. Messages take no time.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    queues = [order_of_work(pp, vpp, rank, microbatches) for rank in range(pp)]
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * pp, [0] * pp
    while any(position[rank] < len(queues[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            while position[rank] < len(queues[rank]):
                kind, microbatch, chunk = queues[rank][position[rank]]
                stage, last = chunk * pp + rank, pp * vpp - 1
                if kind == "forward":
                    needed = [("forward", microbatch, stage - 1)] if stage else []
                    takes = forward_s[rank][chunk]
                else:
                    needed = [("backward", microbatch, stage + 1)] if stage < last else [("forward", microbatch, stage)]
                    takes = backward_s[rank][chunk]
                if any(event not in done for event in needed):
                    break
                start = max([free[rank], *(done[event] for event in needed)])
                free[rank] = done[kind, microbatch, stage] = start + takes
                position[rank] += 1
                moved = True
        assert moved, "deadlock"
    return max(free)


GRID = [
    (pp, vpp, rank, rounds * pp)
    for pp, vpp, rounds in product((2, 3, 4, 8), (1, 2, 3, 5), (1, 2, 3, 8))
    for rank in range(pp)
]


@pytest.mark.parametrize(("pp", "vpp", "rank", "microbatches"), GRID)
def test_no_moment_of_the_schedule_holds_more_than_what_is_told(
    pp: int, vpp: int, rank: int, microbatches: int
) -> None:
    moments = set(held_moments(pp, vpp, rank, microbatches))
    told = set(in_flight(pp, vpp, rank, microbatches))
    assert max(map(sum, moments)) == most_in_flight(pp, vpp, rank, microbatches)
    assert told <= moments
    for moment in moments:
        assert any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in told), moment


def test_one_forward_one_backward_holds_min_of_micro_batches_and_stages_left() -> None:
    for pp, microbatches in product(range(1, 9), range(1, 12)):
        for rank in range(pp):
            assert in_flight(pp, 1, rank, microbatches) == ((min(microbatches, pp - rank),),)
            assert max(map(sum, held_moments(pp, 1, rank, microbatches))) == min(microbatches, pp - rank)


def test_interleaving_moves_the_held_micro_batches_between_chunks() -> None:
    # Two ranks, two chunks: five forwards are held on the first rank, at times four of them of the first chunk.
    assert in_flight(2, 2, 0, 8) == ((3, 2), (4, 1))


def test_earlier_ranks_hold_more() -> None:
    for vpp in (1, 2, 4):
        totals = [most_in_flight(8, vpp, rank, 64) for rank in range(8)]
        assert totals == sorted(totals, reverse=True)
        assert len(set(totals)) == 8


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_equal_stages_of_1f1b_take_exactly_as_long_as_the_schedule(pp: int, microbatches: int) -> None:
    simulated = makespan([[1.0]] * pp, [[2.5]] * pp, microbatches)
    assert schedule_s([1.0] * pp, [2.5] * pp, 1, microbatches) == pytest.approx(simulated, rel=1e-12)
    assert simulated == pytest.approx(3.5 * (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_equal_interleaved_stages_take_as_long_as_the_schedule(pp: int, vpp: int, rounds: int) -> None:
    chunk = [[1.0 / vpp] * vpp] * pp
    back = [[2.0 / vpp] * vpp] * pp
    simulated = makespan(chunk, back, rounds * pp)
    assert schedule_s([1.0] * pp, [2.0] * pp, vpp, rounds * pp) == pytest.approx(simulated, rel=1e-9)


UNEVEN = [
    [1.0, 1.0, 1.0, 1.4],
    [1.5, 1.0, 1.0, 1.0],
    [0.9, 1.2, 1.2, 0.9],
    [1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.0, 1.3],
]


@pytest.mark.parametrize("stages", UNEVEN)
@pytest.mark.parametrize("rounds", [1, 2, 4, 16])
@pytest.mark.parametrize(("vpp", "allowed"), [(1, 0.005), (2, 0.1), (4, 0.1)])
def test_uneven_stages_take_about_as_long_as_the_schedule(
    stages: list[float], rounds: int, vpp: int, allowed: float
) -> None:
    pp = len(stages)
    forward = [[t / vpp] * vpp for t in stages]
    backward = [[2 * t / vpp] * vpp for t in stages]
    simulated = makespan(forward, backward, rounds * pp)
    predicted = schedule_s(stages, [2 * t for t in stages], vpp, rounds * pp)
    assert predicted == pytest.approx(simulated, rel=allowed)


@settings(max_examples=150, deadline=None)
@given(
    forward=st.lists(st.floats(1.0, 1.5), min_size=1, max_size=6),
    ratio=st.floats(1.0, 3.5),
    microbatches=st.integers(1, 20),
)
def test_any_1f1b_is_close_to_the_schedule_and_never_quicker_than_its_slowest_rank(
    forward: list[float], ratio: float, microbatches: int
) -> None:
    backward = [ratio * f for f in forward]
    predicted = schedule_s(forward, backward, 1, microbatches)
    simulated = makespan([[f] for f in forward], [[b] for b in backward], microbatches)
    slowest = microbatches * (1 + ratio) * max(forward)
    # With as many micro batches as stages or more, the waits at the start and at the end do not meet.
    assert predicted == pytest.approx(simulated, rel=0.03 if microbatches >= len(forward) else 0.15)
    assert slowest - 1e-9 <= predicted <= slowest + (1 + ratio) * sum(forward)


def test_a_single_stage_has_no_bubble() -> None:
    assert schedule_s([1.0], [2.0], 1, 7) == 21.0


def test_more_virtual_stages_shrink_the_bubble() -> None:
    times = [schedule_s([1.0] * 4, [2.0] * 4, vpp, 8) for vpp in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] - 24 == pytest.approx(4 * (times[2] - 24))
