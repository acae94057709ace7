"""Configurations in the planner's terms: how trainers interpret keys, and missing keys."""

import pytest

from tests.reading.setups import FULL_YAML, all_of, configuration, launch, mca, setup_of
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.lint.translate import translate
from topoplan.specs.cluster import Cluster


def test_the_articles_scheme_becomes_the_layout_that_it_describes(h100s: Cluster) -> None:
    one = configuration(FULL_YAML)
    found = translate(one, all_of(one), h100s)

    assert found.layout == Layout.of(
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


def test_a_command_on_a_part_of_the_cluster_is_predicted_on_that_part(h100s: Cluster) -> None:
    one = mca()
    part = launch("llamafactory-cli", "train", "train.yaml", options={"nproc_per_node": "4"})
    found = translate(one, all_of(one, launches=(part,)), h100s)

    assert (found.spec.cluster.nodes, found.spec.cluster.gpus_per_node, found.layout.dp) == (1, 4, 4)
    assert found.spec.cluster.nvlink_domain_gpus == 4
    assert "predicted on the 1 x 4 GPUs that the command uses" in found.assumptions


def test_other_trainers_are_not_translated(h100s: Cluster) -> None:
    one = configuration("base_model: Qwen/Qwen3-8B\nsequence_len: 2048\n", trainer="axolotl")
    with pytest.raises(SpecError, match="a configuration of Axolotl is not predicted"):
        translate(one, all_of(one), h100s)


def test_a_piece_without_a_model_is_not_whole() -> None:
    whole, *pieces = (
        configuration(FULL_YAML),
        configuration("tensor_model_parallel_size: 4\n"),
        configuration("train_batch_size: 4\n", trainer="deepspeed"),
    )
    setup = all_of(whole, *pieces)
    assert [one for one in setup.configurations if setup.is_complete(one)] == [whole]


def test_what_the_command_says_behind_the_file_wins(h100s: Cluster) -> None:
    script = "export USE_MCA=1\nllamafactory-cli train a.yaml cutoff_len=8192 per_device_train_batch_size=2\n"
    setup = setup_of(script, a_yaml=FULL_YAML)
    (file,) = [one for one in setup.configurations if not one.from_command]
    found = translate(file, setup, h100s)

    assert (found.spec.job.seq_len, found.layout.micro_batch_size) == (8192, 2)
    assert found.configuration is file
    assert "cutoff_len and per_device_train_batch_size as the command has it, behind the file" in found.assumptions
