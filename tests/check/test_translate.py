"""A configuration in the planner's terms: what the trainers make of keys, and of keys that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.check.written import FULL_YAML, configuration, launch, mca, setup
from topoplan.check.translate import Translation, is_whole, trainer_keys, translate
from topoplan.emit.trainer_yaml import trainer_file
from topoplan.errors import InputError, SpecError
from topoplan.layout.layout import Layout, Recompute
from topoplan.planner.predict import predict
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster, load_spec

SPECS = "cluster_specs"


@pytest.fixture(scope="module")
def h100s() -> Cluster:
    return load_cluster(f"{SPECS}/h100-4x8.yaml")


def translated(cluster: Cluster, **keys: Any) -> Translation:
    one = mca(**keys)
    return translate(one, setup(one), cluster)


def test_the_articles_scheme_becomes_the_layout_that_it_describes(h100s: Cluster) -> None:
    one = configuration(FULL_YAML)
    found = translate(one, setup(one), h100s)

    assert found.layout == Layout(
        tp=4,
        dp=8,
        micro_batch_size=1,
        gradient_accumulation_steps=8,
        sequence_parallel=False,
        grad_reduce_in_fp32=True,
    )
    job = found.spec.job
    assert (job.seq_len, job.global_batch_size, job.precision, job.packing) == (4096, 64, "bf16", False)
    assert (job.freeze_vision_tower, job.image_max_pixels) == (False, 451584)
    assert found.spec.model.name == "Qwen/Qwen3-VL-8B-Instruct"


def test_what_is_left_out_is_as_the_adapter_has_it(h100s: Cluster) -> None:
    layout = translated(h100s, tensor_model_parallel_size=2).layout

    assert (layout.micro_batch_size, layout.gradient_accumulation_steps) == (8, 1)
    assert not layout.distributed_optimizer
    assert not layout.overlap_grad_reduce
    assert not layout.overlap_param_gather
    assert not layout.sequence_parallel
    assert layout.grad_reduce_in_fp32  # forced by bf16
    assert translated(h100s).spec.job.seq_len == 2048


@pytest.mark.parametrize(
    ("keys", "sequence_parallel"),
    [
        ({"tensor_model_parallel_size": 1, "sequence_parallel": True}, False),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, True),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, True),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": '"false"'}, True),  # text is true to the trainer
    ],
)
def test_sequence_parallel_is_what_the_adapter_makes_of_it(
    h100s: Cluster, keys: dict[str, Any], sequence_parallel: bool
) -> None:
    layout = translated(h100s, model_name_or_path="Qwen/Qwen3-30B-A3B", **keys).layout

    assert layout.sequence_parallel is sequence_parallel


def test_expert_tensor_parallel_follows_tp_unless_it_is_given(h100s: Cluster) -> None:
    moe = {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "tensor_model_parallel_size": 4}

    assert translated(h100s, **moe).layout.etp == 4
    assert translated(h100s, **moe, expert_tensor_parallel_size=1).layout.etp == 1
    assert translated(h100s, tensor_model_parallel_size=4).layout.etp == 1  # no experts


@pytest.mark.parametrize(
    ("keys", "recompute"),
    [
        ({}, Recompute()),
        ({"recompute_granularity": None}, Recompute()),
        ({"recompute_granularity": "full"}, Recompute(granularity="full", method="uniform", num_layers=1)),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
            Recompute(granularity="full", method="block", num_layers=4),
        ),
        ({"recompute_granularity": "selective"}, Recompute(granularity="selective", modules=("core_attn",))),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp,core_attn"},
            Recompute(granularity="selective", modules=("mlp", "core_attn")),
        ),
        ({"moe_layer_recompute": True}, Recompute(granularity="selective", modules=("moe",))),
    ],
)
def test_recompute_modes_are_the_trainers(h100s: Cluster, keys: dict[str, Any], recompute: Recompute) -> None:
    assert translated(h100s, **keys).layout.recompute == recompute


def test_embedding_and_loss_that_count_as_layers_make_uneven_stages(h100s: Cluster) -> None:
    layout = translated(
        h100s,
        model_name_or_path="Qwen/Qwen3-32B",  # 64 layers
        pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    ).layout

    assert layout.pipeline_layout == "Et*32|t*32L"
    with pytest.raises(SpecError, match=r"\(64 layers \+ 1\) % \(pp 2 \* vpp 1\) = 1"):
        translated(
            h100s,
            model_name_or_path="Qwen/Qwen3-32B",
            pipeline_model_parallel_size=2,
            account_for_loss_in_pipeline_split=True,
        )


def test_a_pipeline_layout_gives_the_virtual_stages(h100s: Cluster) -> None:
    layout = translated(
        h100s, pipeline_model_parallel_size=2, pipeline_model_parallel_layout='"Et*9|t*9|t*9|t*9L"'
    ).layout

    assert (layout.pp, layout.vpp) == (2, 2)


def test_offload_counts_where_it_is_switched_on(h100s: Cluster) -> None:
    fraction = {"optimizer_offload_fraction": 0.5}

    assert translated(h100s, **fraction).layout.optimizer_offload_fraction == 0
    assert translated(h100s, **fraction, optimizer_cpu_offload=True).layout.optimizer_offload_fraction == 0.5


@pytest.mark.parametrize(
    ("keys", "packing"),
    [
        ({}, False),
        ({"stage": "pt"}, True),
        ({"stage": "pt", "packing": False}, False),
        ({"packing": True}, True),
        ({"neat_packing": True}, True),
        ({"sequence_packing": True}, True),
    ],
)
def test_packing_is_the_default_of_stage_pt_alone(h100s: Cluster, keys: dict[str, Any], packing: bool) -> None:
    job = translated(h100s, **keys).spec.job

    assert job.packing is packing
    assert job.keeps_samples_apart is ("neat_packing" in keys or "sequence_packing" in keys)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "fp8"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
    ],
)
def test_precisions(h100s: Cluster, keys: dict[str, Any], precision: str) -> None:
    assert translated(h100s, **keys).spec.job.precision == precision


def test_towers_are_frozen_by_default_and_only_where_there_is_one(h100s: Cluster) -> None:
    vision = translated(h100s, model_name_or_path="Qwen/Qwen3-VL-8B-Instruct").spec.job
    assert (vision.freeze_vision_tower, vision.freeze_multi_modal_projector) == (True, True)
    assert not translated(h100s).spec.job.freeze_vision_tower
    assert not translated(
        h100s, model_name_or_path="Qwen/Qwen3-VL-8B-Instruct", stage="pt"
    ).spec.job.freeze_vision_tower


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bf16": False}, "train.yaml:4: neither bf16 nor fp16"),
        ({"stage": "ppo"}, "stage 'ppo' does not reach the Megatron trainer"),
        ({"optimizer": "sgd"}, "optimizer sgd is not predicted"),
        ({"tensor_model_parallel_size": "four"}, "train.yaml:1: tensor_model_parallel_size is 'four'"),
        ({"model_name_or_path": "/data/final"}, "was not found"),
        ({"recompute_granularity": '"null"'}, "granularity 'null'"),
        ({"pipeline_model_parallel_layout": "Exx"}, "pipeline_layout 'Exx'"),
        (
            {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "freeze_language_model": True},
            "everything is frozen",
        ),
    ],
)
def test_what_cannot_be_predicted_is_said_with_its_place(h100s: Cluster, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        translated(h100s, **keys)

    assert message in str(error.value)


def test_a_lora_that_is_ignored_is_predicted_as_the_full_training_that_runs(h100s: Cluster) -> None:
    found = translated(h100s, finetuning_type="lora")

    assert found.spec.job.finetuning == "full"
    assert "finetuning_type lora trains all weights in this trainer" in found.assumptions


def test_a_command_on_a_part_of_the_cluster_is_predicted_on_that_part(h100s: Cluster) -> None:
    one = mca()
    part = launch("llamafactory-cli", "train", "train.yaml", options={"nproc_per_node": "4"})
    found = translate(one, setup(one, launches=(part,)), h100s)

    assert (found.spec.cluster.nodes, found.spec.cluster.gpus_per_node, found.layout.dp) == (1, 4, 4)
    assert found.spec.cluster.nvlink_domain_gpus == 4
    assert "predicted on the 1 x 4 GPUs that the command uses" in found.assumptions


def test_samples_are_at_most_those_of_all_data_sets(h100s: Cluster) -> None:
    assert translated(h100s, dataset="a, b", max_samples=100).spec.job.samples == 200
    assert translated(h100s, dataset="a").spec.job.samples is None
    assert translated(h100s, dataset="a", max_samples=100, packing=True).spec.job.samples is None


MEGATRON_SFT = """\
model: Qwen/Qwen3-30B-A3B
max_length: 8192
tensor_model_parallel_size: 2
expert_model_parallel_size: 8
sequence_parallel: true
micro_batch_size: 1
global_batch_size: 64
"""


def swift(cluster: Cluster, more: str = "") -> Translation:
    one = configuration(MEGATRON_SFT + more, trainer="swift-megatron", from_command=True)
    return translate(one, setup(one), cluster)


def test_megatron_sft_of_ms_swift_is_translated_with_its_own_defaults(h100s: Cluster) -> None:
    found = swift(h100s)

    assert found.layout.backend == "megatron"
    assert (found.layout.tp, found.layout.ep, found.layout.etp, found.layout.dp) == (2, 8, 1, 16)
    assert found.layout.gradient_accumulation_steps == 4
    assert found.layout.recompute == Recompute(granularity="selective", modules=("core_attn",))
    assert found.layout.distributed_optimizer
    assert not found.layout.overlap_grad_reduce
    assert found.layout.cross_entropy_fusion_impl == "native"
    assert found.spec.job.pin["backend"] == "megatron"
    assert predict(found.spec, found.layout).tokens_per_s_per_gpu > 0


@pytest.mark.parametrize("line", ["train_type: lora", "use_megatron_fsdp: true", "torch_dtype: float32"])
def test_what_is_not_predicted_of_ms_swift_is_named(h100s: Cluster, line: str) -> None:
    with pytest.raises(SpecError, match=line.partition(":")[0]):
        swift(h100s, f"{line}\n")


def test_other_trainers_are_not_translated(h100s: Cluster) -> None:
    one = configuration("model: Qwen/Qwen3-8B\n", trainer="swift")
    with pytest.raises(SpecError, match="only Megatron trainers"):
        translate(one, setup(one), h100s)


def test_a_piece_without_a_model_is_not_whole() -> None:
    assert is_whole(configuration(FULL_YAML))
    assert not is_whole(configuration("tensor_model_parallel_size: 4\n"))
    assert not is_whole(configuration("train_batch_size: 4\n", trainer="deepspeed"))


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("h100-4x8", {"tp": 2, "micro_batch_size": 2}),
        ("h100-4x8", {"tp": 2, "pp": 2, "vpp": 3, "recompute": "full"}),
        ("h100-4x8", {"pp": 2, "pipeline_layout": "Et*17|t*19L", "recompute": {"modules": ["mlp"]}}),
        ("h20-2x8", {"tp": 2, "ep": 8, "etp": 1}),
        ("h20-2x8", {"tp": 2, "optimizer_offload_fraction": 0.5}),
    ],
)
def test_what_generate_writes_is_translated_back_to_its_plan(spec: str, keys: dict[str, Any]) -> None:
    read = load_spec(f"{SPECS}/{spec}.yaml")
    plan = predict(read, keys)
    one = configuration(trainer_file(read, plan).text)
    back = translate(one, setup(one), read.cluster)

    assert back.layout == plan.layout
    assert predict(back.spec, back.layout).memory.device_bytes == plan.memory.device_bytes
    assert predict(back.spec, back.layout).time.step_s == plan.time.step_s


def test_the_keys_of_a_layout_agree_with_what_generate_writes() -> None:
    read = load_spec(f"{SPECS}/h100-4x8.yaml")
    plan = predict(read, {"tp": 2, "pp": 2, "vpp": 3, "recompute": "full"})
    written = trainer_file(read, plan).values

    for key, value in trainer_keys(plan.layout, is_moe=False).items():
        assert written.get(key) == value or value in (None, False), key
