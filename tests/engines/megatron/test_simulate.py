"""The event simulation: cases worked out by hand, and invariants of every schedule."""

from collections import Counter, defaultdict
from itertools import pairwise, product

import pytest

from topoplan.engines.megatron.simulate import Simulation, order_of_work, simulate
from topoplan.engines.timeline import BACKWARD, FORWARD, P2P, RECOMPUTE, Event

SHAPES = [(1, 1, 3), (2, 1, 4), (4, 1, 2), (4, 1, 9), (3, 2, 3), (2, 2, 6), (4, 3, 8), (4, 2, 4), (8, 2, 16)]


def uneven(pp: int, vpp: int) -> list[list[float]]:
    return [[1.0 + 0.1 * ((3 * rank + 2 * chunk) % 5) for chunk in range(vpp)] for rank in range(pp)]


def run(pp: int, vpp: int, microbatches: int, p2p_s: float = 0.05) -> Simulation:
    forward = uneven(pp, vpp)
    backward = [[2.0 * seconds for seconds in row] for row in forward]
    repeated = [[0.5 * seconds for seconds in row] for row in forward]
    return simulate(forward, backward, microbatches, p2p_s=p2p_s, recompute_s=repeated)


def by_rank(result: Simulation) -> dict[int, list[Event]]:
    lanes: dict[int, list[Event]] = defaultdict(list)
    for event in result.events:
        lanes[event.rank].append(event)
    return lanes


def test_two_equal_stages_and_two_micro_batches_by_hand() -> None:
    events = [
        (event.rank, event.kind, event.microbatch, event.start_s, event.end_s)
        for event in simulate([[1.0], [1.0]], [[2.0], [2.0]], 2).events
    ]
    assert events == [
        (0, "forward", 0, 0.0, 1.0),
        (0, "forward", 1, 1.0, 2.0),
        (0, "backward", 0, 4.0, 6.0),
        (0, "backward", 1, 7.0, 9.0),
        (1, "forward", 0, 1.0, 2.0),
        (1, "backward", 0, 2.0, 4.0),
        (1, "forward", 1, 4.0, 5.0),
        (1, "backward", 1, 5.0, 7.0),
    ]


def test_messages_of_two_stages_by_hand() -> None:
    # In each micro-batch the forward's message is waited for together with the previous backward's: M + 1 in total.
    plain, slow = (simulate([[1.0]] * 2, [[2.0]] * 2, 4, p2p_s=p2p).total_s for p2p in (0.0, 0.1))
    assert slow - plain == pytest.approx(0.1 * 5)


def test_interleaving_hides_messages_in_the_steady_state() -> None:
    def cost(microbatches: int) -> float:
        plain, slow = (simulate([[1.0] * 2] * 4, [[2.0] * 2] * 4, microbatches, p2p_s=p2p).total_s for p2p in (0, 0.2))
        return slow - plain

    assert cost(4) > 0.0
    assert cost(8) == pytest.approx(cost(32))


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SHAPES)
def test_every_micro_batch_passes_every_virtual_stage_once_each_way(pp: int, vpp: int, microbatches: int) -> None:
    counts = Counter(
        (event.kind, event.rank, event.chunk, event.microbatch)
        for event in run(pp, vpp, microbatches).events
        if event.kind != "p2p"
    )
    wanted = product(("forward", "recompute", "backward"), range(pp), range(vpp), range(microbatches))
    assert counts == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SHAPES)
def test_a_rank_does_one_thing_at_a_time_and_in_megatrons_order(pp: int, vpp: int, microbatches: int) -> None:
    result = run(pp, vpp, microbatches)
    for rank, lane in by_rank(result).items():
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))
        assert lane[-1].end_s <= result.total_s
        assert all(event.kind in (FORWARD, RECOMPUTE, BACKWARD, P2P) for event in lane)
        work = [(event.kind, event.microbatch, event.chunk) for event in lane if event.kind in ("forward", "backward")]
        assert work == order_of_work(pp, vpp, rank, microbatches)


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), SHAPES)
def test_work_starts_when_its_message_has_arrived(pp: int, vpp: int, microbatches: int) -> None:
    p2p = 0.05
    result = run(pp, vpp, microbatches, p2p)
    times = {(event.kind, event.chunk * pp + event.rank, event.microbatch): event for event in result.events}
    for event in result.events:
        stage = event.chunk * pp + event.rank
        if event.kind == "forward" and stage:
            assert event.start_s >= times["forward", stage - 1, event.microbatch].end_s + p2p - 1e-9
        elif event.kind == "recompute":
            last = stage == pp * vpp - 1
            source = (
                times["forward", stage, event.microbatch] if last else times["backward", stage + 1, event.microbatch]
            )
            assert event.start_s >= source.end_s + (0.0 if last else p2p) - 1e-9


def test_interleaving_needs_a_multiple_of_the_ranks() -> None:
    with pytest.raises(ValueError, match="6 micro batches are not a multiple of 4"):
        simulate([[1.0] * 2] * 4, [[1.0] * 2] * 4, 6)
