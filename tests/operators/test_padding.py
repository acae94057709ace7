import random
from dataclasses import replace
from typing import Any

import pytest

from tests.layout.specs import MOE, make_layout, make_spec
from topoplan.layout.layout import Layout
from topoplan.operators import padding
from topoplan.operators.flops import model_flops_per_step
from topoplan.operators.padding import Load, content_of
from topoplan.operators.shard import average_shard, shard_of
from topoplan.specs.job import Job
from topoplan.specs.lengths import Lengths, histogram
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def load_of(spec: Spec, layout: Layout, *, ranks_wait: bool = False) -> Load:
    return padding.load_of(case_of(spec, layout.backend), layout, ranks_wait=ranks_wait)


def longest_sequence(spec: Spec, layout: Layout) -> int:
    return padding.longest_sequence(case_of(spec, layout.backend), layout)


def padding_share(spec: Spec, layout: Layout) -> float:
    return padding.padding_share(case_of(spec, layout.backend), layout)


def of(counts: dict[int, int], **keys: Any) -> Lengths:
    pairs = histogram(counts.items())
    return Lengths(**{"counts": pairs, "samples": sum(n for _, n in pairs), "source": "a test"} | keys)


def skewed(size: int = 4000) -> Lengths:
    random.seed(3)
    return of(dict(histogram((max(16, int(random.lognormvariate(5.5, 0.8))), 1) for _ in range(size))))


def test_without_lengths_every_sequence_is_full() -> None:
    spec = make_spec()
    layout = make_layout(spec, tp=2, micro_batch_size=2)
    assert load_of(spec, layout) == Load(positions=4096, extent=4096, mean_positions=4096)
    assert content_of(spec.job).tokens == content_of(spec.job).extent == longest_sequence(spec, layout) == 4096
    shard = shard_of(case_of(spec, "megatron"), layout)
    assert average_shard(shard, case_of(spec, "megatron"), layout) == shard


def test_full_samples_are_as_if_lengths_were_not_known() -> None:
    plain, known = make_spec(), make_spec(lengths=of({4096: 100}))
    for keys in ({"tp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}):
        layout = make_layout(plain, **keys)
        assert load_of(known, layout) == load_of(plain, layout)
        assert shard_of(case_of(known, "megatron"), layout) == shard_of(case_of(plain, "megatron"), layout)
    assert model_flops_per_step(known.model, known.job) == model_flops_per_step(plain.model, plain.job)


def test_two_lengths_are_averaged_by_hand() -> None:
    # 2 GPUs, one sequence each: each is long with probability 1/4, the longer of both with 7/16.
    spec = make_spec(nodes=1, gpus_per_node=2, global_batch_size=2, lengths=of({64: 3, 1024: 1}))
    layout = make_layout(spec)
    load = load_of(spec, layout)
    slowest = 64 * 9 / 16 + 1024 * 7 / 16
    assert load.positions == pytest.approx(slowest)
    assert load.extent == pytest.approx((64**2 * 9 / 16 + 1024**2 * 7 / 16) / slowest)
    assert load.mean_positions == pytest.approx(64 * 3 / 4 + 1024 / 4)
    # With one sequence per micro-batch nothing is padded, because both lengths are multiples of 64.
    assert padding_share(spec, layout) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("keys", "by_step"),
    [
        ({"micro_batch_size": 1}, False),
        ({"micro_batch_size": 2}, False),
        ({"tp": 4, "micro_batch_size": 4}, False),
        ({"tp": 8, "micro_batch_size": 1}, False),
        ({"tp": 2, "pp": 2, "micro_batch_size": 1}, True),
    ],
)
def test_the_formula_agrees_with_drawn_steps(keys: dict[str, Any], by_step: bool) -> None:
    lengths = skewed()
    spec = make_spec(lengths=lengths, global_batch_size=128)
    layout = make_layout(spec, **keys)
    values = [tokens for tokens, count in lengths.counts for _ in range(count)]
    together, draws = layout.micro_batch_size, layout.gradient_accumulation_steps
    random.seed(5)

    def rank_work() -> tuple[float, float]:
        longest = [max(random.choices(values, k=together)) for _ in range(draws)]
        if by_step:
            longest = [max(longest)] * draws
        padded = [min(4096, -(-one // 64) * 64) for one in longest]
        return sum(padded) / draws, sum(one**2 for one in padded) / draws

    steps = 1000
    drawn = [[rank_work() for _ in range(layout.dp)] for _ in range(steps)]
    slowest = [max(ranks) for ranks in drawn]
    load = load_of(spec, layout)
    assert load.mean_positions == pytest.approx(
        sum(one for ranks in drawn for one, _ in ranks) / steps / layout.dp, rel=0.02
    )
    assert load.positions == pytest.approx(sum(one for one, _ in slowest) / steps, rel=0.05)
    assert load.positions * load.extent == pytest.approx(sum(square for _, square in slowest) / steps, rel=0.18)


def test_a_pipeline_pads_the_whole_step_unless_lengths_may_vary() -> None:
    spec = make_spec(lengths=skewed())
    keys: dict[str, Any] = {"tp": 2, "pp": 2, "micro_batch_size": 1}
    fixed = load_of(spec, make_layout(spec, **keys))
    loose = make_spec(lengths=skewed(), trainer={"variable_seq_lengths": True})
    varying = load_of(loose, make_layout(loose, **keys))
    flat = load_of(spec, make_layout(spec, tp=2, micro_batch_size=1))
    assert fixed.mean_positions > 2 * varying.mean_positions
    assert varying.mean_positions == flat.mean_positions


def test_expert_parallel_pads_to_the_cutoff() -> None:
    spec = make_spec(MOE, lengths=of({100: 10}))
    layout = make_layout(spec, ep=8)
    assert load_of(spec, layout).positions == longest_sequence(spec, layout) == 4096
    assert padding_share(spec, layout) == pytest.approx(1 - 100 / 4096)
    assert load_of(spec, make_layout(spec)).positions == 128


def test_the_collator_of_pretraining_pads_to_eight() -> None:
    spec = make_spec(stage="pt", lengths=of({100: 10}))
    assert load_of(spec, make_layout(spec)).positions == 104


def test_packed_samples_attend_across_each_other_unless_kept_apart() -> None:
    lengths = of({1024: 40})
    crossing = make_spec(lengths=lengths, packing=True)
    apart = make_spec(lengths=lengths, packing=True, trainer={"neat_packing": True})
    layout = make_layout(crossing)
    assert load_of(crossing, layout) == Load(positions=4096, extent=4096, mean_positions=4096)
    assert load_of(apart, layout) == Load(positions=4096, extent=1024, mean_positions=4096)
    assert padding_share(apart, layout) == 0.0
    assert model_flops_per_step(apart.model, apart.job) < model_flops_per_step(crossing.model, crossing.job)


@pytest.mark.parametrize(("trainer", "backend"), [("swift", "megatron"), ("swift", "deepspeed")])
def test_ms_swift_keeps_packed_samples_apart_without_being_told(trainer: str, backend: str) -> None:
    spec = make_spec(lengths=of({1024: 40}), packing=True)
    apart = replace(spec, trainer=trainer)
    layout = make_layout(spec, backend=backend)
    assert padding.load_of(case_of(apart, backend), layout) == Load(positions=4096, extent=1024, mean_positions=4096)
    assert padding.keeps_samples_apart(case_of(apart, backend))
    assert not padding.keeps_samples_apart(case_of(spec, "mca"))


def test_samples_that_lie_end_to_end_are_not_padded() -> None:
    spec = make_spec(nodes=1, gpus_per_node=1, global_batch_size=2, lengths=of({1000: 1, 2000: 1}))
    two = make_layout(spec, backend="megatron", micro_batch_size=2)
    assert load_of(spec, two).mean_positions == load_of(spec, two).positions == 1500
    assert padding_share(spec, two) == 0.0
    assert load_of(spec, make_layout(spec, micro_batch_size=2)).mean_positions == 0.25 * 1024 + 0.75 * 2048
    assert longest_sequence(spec, two) == 2000


def test_packed_pairs_hold_both_answers() -> None:
    spec = make_spec(stage="dpo", packing=True, trainer={"padding_free": True})
    one_by_one = make_spec(stage="dpo", packing=True)
    layout = make_layout(spec, backend="megatron")
    tokens = [shard_of(case_of(one, "megatron"), layout).tokens for one in (spec, one_by_one)]
    assert tokens == [4096, 8192]


def test_memory_holds_the_longest_where_it_is_known() -> None:
    spec = make_spec(lengths=of({100: 99, 1000: 1}))
    layout = make_layout(spec)
    assert longest_sequence(spec, layout) == 1024
    assert shard_of(case_of(spec, layout.backend), layout).tokens == 1024

    def longest(**keys: Any) -> int:
        return longest_sequence(make_spec(lengths=of({100: 99, 1000: 1}, **keys)), layout)

    assert longest(error=0.2) == 4096
    assert longest(stride=3) == 4096
    assert longest_sequence(make_spec(lengths=of({9000: 1})), layout) == 4096


def test_preference_pairs_bring_two_sequences_each() -> None:
    spec = make_spec(stage="dpo", lengths=skewed())
    alone = make_spec(lengths=skewed())
    layout = make_layout(spec, micro_batch_size=1)
    pairs, singles = load_of(spec, layout), load_of(alone, layout)
    assert pairs.mean_positions > singles.mean_positions
    packed = Job(seq_len=4096, global_batch_size=64, stage="dpo", lengths=skewed(), packing=True)
    assert load_of(replace(spec, job=packed), layout) == pairs


@pytest.mark.parametrize(
    ("keys", "waits"),
    [({"backend": "ddp"}, False), ({"backend": "deepspeed", "zero_stage": 2}, True), ({"backend": "fsdp2"}, True)],
)
def test_where_data_alone_is_split_a_micro_batch_is_as_long_as_its_longest(keys: dict[str, Any], waits: bool) -> None:
    # 2 GPUs, two micro-batches of one sequence each: with ZeRO-2 each waits for the longer of both
    spec = make_spec(nodes=1, gpus_per_node=2, global_batch_size=4, lengths=of({60: 3, 1020: 1}))
    layout = make_layout(spec, **keys)
    load = load_of(spec, layout, ranks_wait=waits)
    mean, longer = 64 * 3 / 4 + 1024 / 4, 64 * 9 / 16 + 1024 * 7 / 16
    assert load.mean_positions == pytest.approx(mean)
    assert load.positions == pytest.approx(longer if waits else mean + (longer - mean) / 2**0.5)
    assert longest_sequence(spec, layout) == 1024
    packed = make_spec(nodes=1, gpus_per_node=2, global_batch_size=4, lengths=of({60: 3, 1020: 1}), packing=True)
    assert load_of(packed, layout).positions == longest_sequence(packed, layout) == 4096


def test_a_trainer_that_removes_padding_computes_on_samples_alone_and_fills_its_budget() -> None:
    spec = make_spec(nodes=1, gpus_per_node=2, global_batch_size=4, lengths=of({60: 3, 1020: 1}))
    trinity = replace(spec, trainer="trinity")
    layout = make_layout(spec, backend="fsdp2")
    assert load_of(trinity, layout).positions == load_of(trinity, layout).mean_positions == 60 * 3 / 4 + 1020 / 4
    assert padding_share(trinity, layout) == 0.0 < padding_share(spec, layout)
    assert longest_sequence(trinity, layout) == 4096
