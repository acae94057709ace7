"""ms-swift's `swift sft`: the meaning of its arguments, and of missing ones."""

from typing import Any

import pytest

from tests.reading.setups import all_of, configuration, launch, swift_zero2
from topoplan.lint.translate import Translation, translate
from topoplan.reading.values import NotPredictedError
from topoplan.specs.cluster import Cluster


def translated(cluster: Cluster, **keys: Any) -> Translation:
    one, where = swift_zero2(**{"max_length": 4096} | keys)
    return translate(one, where, cluster)


def test_what_is_left_out_is_ms_swifts_own(a100s: Cluster) -> None:
    one = configuration("model: Qwen/Qwen3-8B\n", trainer="swift", from_command=True)
    start = launch("swift", "sft", options={"nproc_per_node": "8"}, of=one)
    found = translate(one, all_of(one, launches=(start,)), a100s)
    job, layout = found.spec.job, found.layout

    assert (job.finetuning, job.lora_rank, job.lora_target, job.seq_len) == ("lora", 8, ("all",), 2048)
    assert any(words.startswith("max_length is not given") for words in found.assumptions)
    assert (layout.backend, layout.dp, layout.recompute.granularity) == ("ddp", 8, "full")
    # at least 16 sequences per step: ceil(16 / 1 / 8)
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, job.global_batch_size) == (1, 2, 16)
    assert not layout.expandable_segments


def test_the_guides_command_is_the_layout_that_it_describes(a100s: Cluster) -> None:
    found = translated(a100s, per_device_train_batch_size=2, gradient_accumulation_steps=8, torch_dtype="bfloat16")

    assert found.layout.id == "zero2-dp5-mbs2-full"
    assert (found.spec.cluster.nodes, found.spec.cluster.gpus_per_node) == (1, 5)
    assert (found.spec.job.finetuning, found.spec.job.global_batch_size) == ("full", 80)


@pytest.mark.parametrize(
    ("keys", "job", "layout"),
    [
        ({"train_type": "lora", "lora_rank": 16}, {"finetuning": "lora", "lora_rank": 16}, {}),
        ({"tuner_type": "lora", "quant_bits": 4, "quant_method": "bnb"}, {"finetuning": "qlora"}, {"zero_stage": 2}),
        ({"gradient_checkpointing": False}, {}, {"id": "zero2-dp5-mbs1"}),
        ({"torch_dtype": "float16"}, {"precision": "fp16"}, {}),
        # plain data parallelism trains in the loaded dtype
        ({"deepspeed": None}, {"pure_bf16": True}, {"backend": "ddp"}),
        ({"deepspeed": None, "torch_dtype": "float32", "bf16": True}, {"pure_bf16": False, "precision": "bf16"}, {}),
        ({"sequence_parallel_size": 5}, {"global_batch_size": 4}, {"ulysses": 5, "dp": 1}),
        ({"use_liger_kernel": True}, {}, {"fused_linear_cross_entropy": True}),
        # ms-swift states that Liger's loss has no effect then
        ({"use_liger_kernel": True, "sequence_parallel_size": 5}, {}, {"fused_linear_cross_entropy": False}),
        ({"use_liger_kernel": True, "enable_dft_loss": True}, {}, {"fused_linear_cross_entropy": False}),
    ],
)
def test_arguments_become_the_job_and_the_layout(
    a100s: Cluster, keys: dict[str, Any], job: dict[str, Any], layout: dict[str, Any]
) -> None:
    found = translated(a100s, **keys)

    assert {key: getattr(found.spec.job, key) for key in job} == job
    assert {key: getattr(found.layout, key) for key in layout} == layout


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"use_galore": True}, "use_galore"),
        ({"train_type": "longlora"}, "train_type"),
        ({"optim": "adafactor"}, "optim"),
        ({"deepspeed": "zero0"}, "deepspeed"),
        ({"lisa_activated_layers": 2}, "lisa_activated_layers"),
        # ms-swift's own examples/train/sequence_parallel/sequence_parallel.sh runs this way
        ({"deepspeed": None, "sequence_parallel_size": 5}, "sequence_parallel_size"),
        ({"train_type": "lora", "quant_method": "hqq", "quant_bits": 4}, "quant_method"),
    ],
)
def test_what_has_no_formula_is_not_predicted(a100s: Cluster, keys: dict[str, Any], key: str) -> None:
    with pytest.raises(NotPredictedError, match="is not predicted") as error:
        translated(a100s, **keys)
    assert error.value.key == key


def test_a_loss_in_pieces_is_not_predicted(a100s: Cluster) -> None:
    one = configuration(
        "model: Qwen/Qwen3-8B\nsequence_parallel_size: 8\ndeepspeed: zero3\n", trainer="swift", from_command=True
    )
    pieces = {"CELOSS_PARALLEL_SIZE": "2048"}
    start = launch("swift", "sft", options={"nproc_per_node": "8"}, variables=pieces, of=one)

    with pytest.raises(NotPredictedError, match="a loss in pieces"):
        translate(one, all_of(one, launches=(start,)), a100s)


@pytest.mark.parametrize(
    ("regex", "count"), [(r"^model\.layers\.(?:46|47)\.", 2), (r"^model\.layers\.(?:0|1|2)\.", -3)]
)
def test_layers_that_alone_are_trained_are_freezing_as_bundles_write_it(a100s: Cluster, regex: str, count: int) -> None:
    found = translated(a100s, freeze_parameters_ratio=1.0, trainable_parameters_regex=regex).spec.job
    assert (found.finetuning, found.freeze_trainable_layers) == ("freeze", count)
    for keys in (
        {"freeze_parameters_ratio": 0.5, "trainable_parameters_regex": regex},
        {"freeze_parameters_ratio": 1.0, "trainable_parameters_regex": "lm_head"},
        {"freeze_parameters_ratio": 1.0, "trainable_parameters_regex": regex, "tuner_type": "lora"},
    ):
        with pytest.raises(NotPredictedError):
            translated(a100s, **keys)
