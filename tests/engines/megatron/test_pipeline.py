"""The schedule, compared with megatron-core's order of work executed step by step."""

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
    """Return the micro-batches of each chunk whose activations are held, after each forward."""
    held, moments = [0] * vpp, []
    for kind, _, chunk in order_of_work(pp, vpp, rank, microbatches):
        held[chunk] += 1 if kind == "forward" else -1
        assert held[chunk] >= 0
        if kind == "forward":
            moments.append(tuple(held))
    assert not any(held)
    return moments


def makespan(forward_s: Times, backward_s: Times, microbatches: int, p2p_s: float = 0.0) -> float:
    """Return the seconds until all work is done."""
    return simulate(forward_s, backward_s, microbatches, p2p_s=p2p_s).total_s


INTERLEAVED = [(pp, vpp, rounds * pp) for pp, vpp, rounds in product((2, 3, 4, 8), (2, 3, 5), (1, 2, 3, 8))]
PLAIN = [(pp, 1, microbatches) for pp, microbatches in product((1, 2, 3, 4, 8), (1, 3, 8, 11))]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), PLAIN + INTERLEAVED)
def test_no_moment_of_the_schedule_holds_more_than_those_named(pp: int, vpp: int, microbatches: int) -> None:
    for rank in range(pp):
        moments = set(held_moments(pp, vpp, rank, microbatches))
        fullest = set(in_flight(pp, vpp, rank, microbatches))
        assert max(map(sum, moments)) == most_in_flight(pp, vpp, rank, microbatches)
        assert fullest <= moments
        for moment in moments:
            assert any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in fullest), moment


def test_one_forward_one_backward_holds_min_of_micro_batches_and_stages_left() -> None:
    for pp, microbatches in product(range(1, 9), range(1, 12)):
        for rank in range(pp):
            assert in_flight(pp, 1, rank, microbatches) == ((min(microbatches, pp - rank),),)


def test_interleaving_moves_the_held_micro_batches_between_chunks() -> None:
    # Two ranks, two chunks: the first rank holds five forwards, at times four of them in the first chunk.
    assert in_flight(2, 2, 0, 8) == ((3, 2), (4, 1))


def test_earlier_ranks_hold_more() -> None:
    for vpp in (1, 2, 4):
        totals = [most_in_flight(8, vpp, rank, 64) for rank in range(8)]
        assert totals == sorted(totals, reverse=True)
        assert len(set(totals)) == 8


SHAPES = [(1, 1, 7), (2, 1, 1), (4, 1, 3), (4, 1, 4), (8, 1, 32), (2, 2, 2), (4, 3, 8), (8, 2, 64), (8, 4, 8)]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SHAPES)
def test_equal_stages_take_what_equation_2_says(pp: int, vpp: int, microbatches: int) -> None:
    """Equation (2) of arXiv 2104.04473: a bubble of (pp - 1) / vpp micro-batches."""
    forward, backward = [[1.0] * vpp] * pp, [[2.5] * vpp] * pp
    seconds = 3.5 * vpp * (microbatches + (pp - 1) / vpp)
    assert schedule_s(forward, backward, microbatches) == pytest.approx(seconds)
    assert makespan(forward, backward, microbatches) == pytest.approx(seconds)


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SHAPES)
def test_equal_stages_with_messages_take_as_long_as_the_schedule(pp: int, vpp: int, microbatches: int) -> None:
    forward, backward = [[1.0] * vpp] * pp, [[2.0] * vpp] * pp
    simulated = makespan(forward, backward, microbatches, 0.05)
    assert schedule_s(forward, backward, microbatches, 0.05) == pytest.approx(simulated, rel=5e-3)


@pytest.mark.parametrize("pp", [4, 8])
@pytest.mark.parametrize("seconds", [1.5, 2.0])
@pytest.mark.parametrize(("rank", "chunk"), [(0, 0), (-1, -1)], ids=["first", "last"])
def test_a_long_chunk_at_either_end_holds_up_every_further_round_as_simulated(
    pp: int, seconds: float, rank: int, chunk: int
) -> None:
    """The long chunk is on a rank that has no more work than others: its other chunks are shorter."""
    forward = [[1.0] * 3 for _ in range(pp)]
    forward[rank] = [(3.0 - seconds) / 2.0] * 3
    forward[rank][chunk] = seconds
    backward = [[2.0 * each for each in chunks] for chunks in forward]
    (predicted, simulated) = (
        run(forward, backward, 8 * pp) - run(forward, backward, 7 * pp) for run in (schedule_s, makespan)
    )
    assert predicted == pytest.approx(simulated)
    assert predicted > 9.0 * pp


def stages_of_layers(seed: int, *, interleaved: bool) -> tuple[list[list[float]], list[list[float]], int, float]:
    """Return virtual stages of n or n + 1 layers, with output layer and loss added, and short messages.

    Output layer and loss take up to two layers' time.
    """
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


@pytest.mark.parametrize(("interleaved", "typical", "worst"), [(False, 1e-3, 0.005), (True, 0.005, 0.055)])
def test_stages_of_whole_layers_take_about_as_long_as_the_schedule(
    interleaved: bool, typical: float, worst: float
) -> None:
    errors = []
    for seed in range(80):
        forward, backward, microbatches, p2p_s = stages_of_layers(seed, interleaved=interleaved)
        simulated = makespan(forward, backward, microbatches, p2p_s)
        errors.append(schedule_s(forward, backward, microbatches, p2p_s) / simulated - 1)
    assert median(map(abs, errors)) < typical
    assert max(map(abs, errors)) < worst


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
    simulated = makespan(ahead, back, microbatches, p2p_s)
    assert schedule_s(ahead, back, microbatches, p2p_s) == pytest.approx(simulated, rel=0.03)
    assert makespan(back, ahead, microbatches, p2p_s) == pytest.approx(simulated), "backwards in time it is the same"
    slowest = microbatches * (1 + ratio) * max(forward)
    assert slowest - 1e-9 <= schedule_s(ahead, back, microbatches) <= slowest + (1 + ratio) * sum(forward)


def test_messages_cost_a_rank_between_two_others_twice_what_they_cost_an_end() -> None:
    def each(pp: int) -> float:
        """Return the additional seconds of an additional micro-batch, with messages of one second."""
        (few, many) = (schedule_s([[9.0]] * pp, [[9.0]] * pp, count, 1.0) for count in (20, 21))
        return many - few - 18.0

    assert each(2) == pytest.approx(1.0)
    assert each(4) == pytest.approx(2.0)
