"""Compare packed sequences with LLaMA-Factory's own knapsack."""

import random
from typing import Any

import pytest

from topoplan.specs.lengths import Lengths, histogram, knapsacks, packed

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def greedy_knapsack() -> Any:
    reason = "llamafactory is not installed (the verify extra has it)"
    return pytest.importorskip("llamafactory.data.processor.processor_utils", reason=reason).greedy_knapsack


@pytest.mark.parametrize("seed", range(50))
def test_knapsacks_are_filled_as_there(greedy_knapsack: Any, seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([64, 1000, 4096])
    lengths = [rng.randint(1, rng.choice([capacity, capacity // 4])) for _ in range(rng.randint(1, 400))]
    theirs = [sum(sack) for sack in greedy_knapsack(list(lengths), capacity)]
    assert knapsacks(histogram((one, 1) for one in lengths), capacity) == theirs


@pytest.mark.parametrize("seq_len", [1024, 2048, 8192])
def test_an_epoch_has_as_many_packed_sequences_as_there(greedy_knapsack: Any, seq_len: int) -> None:
    rng = random.Random(seq_len)
    drawn = [min(seq_len, max(8, int(rng.lognormvariate(5.5, 1.0)))) for _ in range(10_400)]
    batches = [drawn[start : start + 1000] for start in range(0, len(drawn), 1000)]
    theirs = [sack for batch in batches for sack in greedy_knapsack(list(batch), seq_len)]
    lengths = Lengths(counts=histogram((one, 1) for one in drawn), samples=len(drawn), source="drawn")
    ours = packed(lengths, seq_len, 1000, joined=False)
    assert ours.sequences == pytest.approx(len(theirs), rel=0.01)
    assert ours.fill == pytest.approx(sum(map(sum, theirs)) / len(theirs) / seq_len, rel=0.01)
    squares = sum(sum(one**2 for one in sack) + (seq_len - sum(sack)) ** 2 for sack in theirs)
    # The last sequence of a batch is padded, by an amount that differs from batch to batch.
    assert ours.extent == pytest.approx(squares / len(theirs) / seq_len, rel=0.1)
