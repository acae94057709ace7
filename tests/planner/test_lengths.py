"""The sentences on the lengths of the samples."""

import re
from typing import Any

import pytest

from tests.layout.specs import MOE, make_layout, make_spec
from topoplan.layout.layout import Recompute
from topoplan.planner.lengths import data_notes
from topoplan.planner.predict import predict
from topoplan.specs.lengths import Lengths, histogram
from topoplan.specs.spec import Spec

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def notes(spec: Spec, **keys: Any) -> str:
    return " / ".join(data_notes(spec, predict(spec, make_layout(spec, **keys))))


def spec_of(counts: dict[int, int], model: str = "Qwen/Qwen3-8B", **job: Any) -> Spec:
    pairs = histogram(counts.items())
    samples = sum(count for _, count in pairs)
    about = {key: job.pop(key) for key in ("rule", "error", "stride") if key in job}
    lengths = Lengths(counts=pairs, samples=samples, source="a.json", **about)
    return make_spec(model, lengths=lengths, **{"samples": samples} | job)


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert notes(make_spec(), tp=2) == ""


def test_where_lengths_come_from_is_said() -> None:
    said = notes(spec_of({100: 98, 500: 2}, rule="by eye", stride=3), tp=2)
    assert said.startswith(
        "lengths: 100 samples of a.json, mean 108 tokens, 99% within 500 (by eye; one in 3 measured);"
    )


def test_padding_of_micro_batches_and_of_steps_is_told_apart() -> None:
    counts = {128: 900, 1024: 100}
    assert "padded to the longest sample of a micro batch" in notes(spec_of(counts), tp=2)
    assert "padded to the longest sample of a step" in notes(spec_of(counts), tp=2, pp=2)


def test_heavy_padding_recommends_packing_with_what_it_gains() -> None:
    spec = spec_of({128: 90_000}, MOE, epochs=1.0)
    said = notes(spec, tp=2, ep=8)
    assert "padded to 4,096: 97% of the positions are padding" in said
    assert "set packing: true; with this layout" in said
    hours = re.search(r"with this layout ([\d.]+) (h|min) instead of ([\d.]+) (h|min)", said)
    packed, padded = (float(hours[n]) / (60 if hours[n + 1] == "min" else 1) for n in (1, 3))
    # A sequence holds 32 of these samples.
    assert padded / packed == pytest.approx(32, rel=0.05)


def test_packing_is_recommended_without_padding_too_if_it_saves_much() -> None:
    short = notes(spec_of({128: 90_000}, epochs=1.0), tp=8)
    assert "samples are much shorter than seq_len: packing: true would save" in short
    assert "a step then learns from 2,000 samples instead of 64" in short
    assert "packing: true" not in notes(spec_of({4000: 90_000}, epochs=1.0), tp=8)


def test_a_layout_is_held_to_the_rules_of_its_own_engine() -> None:
    # Megatron's rules do not know Ulysses, and would miss half of the GPUs.
    spec = spec_of({64: 90_000, 4096: 10_000}, epochs=1.0)
    keys = {"backend": "fsdp2", "ulysses": 2, "dp": 16, "micro_batch_size": 4, "recompute": FULL}
    assert "set packing: true; with this layout" in notes(spec, distributed_optimizer=False, **keys)


def test_packing_is_not_recommended_where_it_is_on_or_cannot_be() -> None:
    assert "set packing" not in notes(spec_of({128: 9000}, MOE, packing=True), tp=2, ep=8)
    assert "set packing" not in notes(spec_of({128: 9000}, MOE, stage="dpo"), tp=2, ep=8)
    assert "set packing" not in notes(spec_of({4096: 9000}), tp=2)


@pytest.mark.parametrize(("trainer", "words"), [({}, "across samples"), ({"neat_packing": True}, "within samples")])
def test_packing_says_how_samples_share_sequences(trainer: dict[str, Any], words: str) -> None:
    said = notes(spec_of({1000: 4000}, packing=True, samples=1000, trainer=trainer), tp=2)
    assert "packed, 4.0 samples per sequence, 2.3% waste" in said
    assert words in said


def test_what_is_cut_off_is_said() -> None:
    assert "25% of the sequences are longer than seq_len 4,096 and are cut to it" in notes(
        spec_of({100: 75, 5000: 25}), tp=2
    )
    assert "longer than" not in notes(spec_of({5000: 9000}, stage="pt", packing=True), tp=2)


def test_padding_costs_no_tokens_and_packing_raises_their_rate() -> None:
    padded, packed = spec_of({256: 9000}, MOE), spec_of({256: 9000}, MOE, packing=True, trainer={"neat_packing": True})
    slow, fast = (predict(spec, make_layout(spec, tp=2, ep=8)) for spec in (padded, packed))
    assert slow.padding_share == pytest.approx(1 - 256 / 4096)
    # A batch of 1,000 samples fills 62 sequences and half of another.
    assert fast.padding_share == pytest.approx(1 - 62.5 / 63)
    assert fast.tokens_per_s_per_gpu > 15 * slow.tokens_per_s_per_gpu
    assert fast.mfu > slow.mfu
