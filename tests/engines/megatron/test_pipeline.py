"""The schedule against the order of work that megatron-core lays down, run step by step."""

from itertools import product
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples
from topoplan.engines.megatron.pipeline import Times, in_flight, most_in_flight, schedule_s
from topoplan.engines.megatron.simulate import order_of_work, simulate


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


def makespan(forward_s: Times, backward_s: Times, microbatches: int, p2p_s: float = 0.0) -> float:
    """Seconds until all work is done."""
    return simulate(forward_s, backward_s, microbatches, p2p_s=p2p_s).total_s


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
    forward, backward = [[1.0]] * pp, [[2.5]] * pp
    assert schedule_s(forward, backward, microbatches) == pytest.approx(makespan(forward, backward, microbatches))
    assert schedule_s(forward, backward, microbatches) == pytest.approx(3.5 * (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3), (8, 2), (8, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 8])
@pytest.mark.parametrize("p2p_s", [0.0, 0.05])
def test_equal_interleaved_stages_take_as_long_as_the_schedule(pp: int, vpp: int, rounds: int, p2p_s: float) -> None:
    forward, backward = [[1.0] * vpp] * pp, [[2.0] * vpp] * pp
    predicted = schedule_s(forward, backward, rounds * pp, p2p_s)
    assert predicted == pytest.approx(makespan(forward, backward, rounds * pp, p2p_s), rel=5e-3)
    if not p2p_s:
        assert predicted == pytest.approx(3.0 * (rounds * pp * vpp + pp - 1))


def stages_of_layers(seed: int, *, interleaved: bool) -> tuple[list[list[float]], list[list[float]], int, float]:
    """Virtual stages of n or n + 1 layers, up to two layers' worth of output layer and loss, and quick messages."""
    draw = Random(seed)
    pp = draw.choice([2, 3, 4, 6, 8, 12, 16])
    vpp = draw.choice([2, 3, 4, 6]) if interleaved else 1
    microbatches = pp * draw.choice([1, 2, 3, 5]) if interleaved else draw.randint(pp, 6 * pp)
    layers, ratio = draw.randint(2, 8), draw.uniform(1.8, 3.2)
    forward = [[float(layers + draw.randint(0, 1)) for _ in range(vpp)] for _ in range(pp)]
    forward[0][0] += draw.uniform(0.0, 0.2)
    forward[-1][-1] += draw.uniform(0.0, 2.0)
    backward = [[ratio * seconds for seconds in row] for row in forward]
    return forward, backward, microbatches, draw.choice([0.0, draw.uniform(0.0, 0.1)]) * layers


@pytest.mark.parametrize(
    ("interleaved", "typical", "lowest", "highest"), [(False, 1e-3, 0.005, 0.005), (True, 0.005, 0.055, 0.055)]
)
def test_stages_of_whole_layers_take_about_as_long_as_the_schedule(
    interleaved: bool, typical: float, lowest: float, highest: float
) -> None:
    errors = []
    for seed in range(80):
        forward, backward, microbatches, p2p_s = stages_of_layers(seed, interleaved=interleaved)
        simulated = makespan(forward, backward, microbatches, p2p_s)
        errors.append(schedule_s(forward, backward, microbatches, p2p_s) / simulated - 1)
    assert median(map(abs, errors)) < typical
    assert -lowest < min(errors)
    assert max(errors) < highest


@settings(max_examples=examples(150), deadline=None)
@given(
    forward=st.lists(st.floats(1.0, 2.0), min_size=2, max_size=6),
    ratio=st.floats(1.0, 3.5),
    microbatches=st.integers(1, 20),
    p2p_s=st.floats(0.0, 0.2),
)
def test_any_1f1b_is_close_to_the_schedule_and_never_quicker_than_its_slowest_rank(
    forward: list[float], ratio: float, microbatches: int, p2p_s: float
) -> None:
    ahead, back = [[f] for f in forward], [[ratio * f] for f in forward]
    predicted = schedule_s(ahead, back, microbatches, p2p_s)
    assert predicted == pytest.approx(makespan(ahead, back, microbatches, p2p_s), rel=0.03)
    slowest = microbatches * (1 + ratio) * max(forward)
    assert slowest - 1e-9 <= schedule_s(ahead, back, microbatches) <= slowest + (1 + ratio) * sum(forward)


def test_a_single_stage_has_no_bubble_and_no_messages() -> None:
    assert schedule_s([[1.0]], [[2.0]], 7, 0.5) == 21.0


def test_more_virtual_stages_shrink_the_bubble() -> None:
    times = [schedule_s([[1.0 / vpp] * vpp] * 4, [[2.0 / vpp] * vpp] * 4, 8) for vpp in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] - 24 == pytest.approx(4 * (times[2] - 24))


def test_messages_cost_a_rank_between_two_others_twice_what_they_cost_an_end() -> None:
    def each(pp: int) -> float:
        """Further seconds of a further micro batch with messages of one second."""
        (few, many) = (schedule_s([[9.0]] * pp, [[9.0]] * pp, count, 1.0) for count in (20, 21))
        return many - few - 18.0

    assert each(2) == pytest.approx(1.0)
    assert each(4) == pytest.approx(2.0)
