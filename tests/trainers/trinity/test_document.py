from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.bundle.samples import ONE_NODE, make_spec_and_plan
from topoplan.errors import InputError
from topoplan.layout.layout import Recompute
from topoplan.specs.known import model
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.trinity.document import output_directory, training_steps
from topoplan.trainers.trinity.trainer import TRINITY_RFT

CLUSTER = replace(ONE_NODE, host_memory_bytes=2**41)


def files(
    cluster: Any = CLUSTER, name: str = "Qwen3-8B", job: dict[str, Any] | None = None, **layout: Any
) -> TrainerFiles:
    usual = {"packing": False, "dataset": "org/chats", "seq_len": 8192}
    fields = {"backend": "fsdp2", "recompute": Recompute(granularity="full", method="uniform", num_layers=1), **layout}
    spec, plan = make_spec_and_plan(cluster=cluster, model=model(name), job={**usual, **(job or {})}, **fields)
    return TRINITY_RFT.training_paths[0].written(spec, plan.layout)


def test_the_text_holds_the_values() -> None:
    found = files(ulysses=2, offload=True, job={"seq_len": 81920})
    assert yaml.safe_load(found.text) == found.values
    assert found.values["name"] == found.run_name
    assert output_directory(found.values) == f"saves/topoplan/{found.run_name}"


def test_the_layout_is_in_the_trainer_block() -> None:
    trainer = files(ulysses=4, micro_batch_size=2).values["trainer"]
    assert trainer["trainer_strategy"] == "fsdp2"
    assert trainer["ulysses_sequence_parallel_size"] == 4
    assert trainer["max_token_len_per_gpu"] == 2 * 8192 // 4
    assert not trainer["offload_policy"]
    assert trainer["save_hf_checkpoint"] == "last"
    assert "trainer_config" not in trainer  # by default, it checkpoints the layers


def test_offload_is_all_three_switches_and_no_gathered_model() -> None:
    trainer = files(offload=True).values["trainer"]
    assert trainer["offload_policy"]
    assert trainer["param_offload"]
    assert trainer["optimizer_offload"]
    assert trainer["save_hf_checkpoint"] == "never"


def test_without_recomputation_checkpointing_is_turned_off() -> None:
    trainer = files(recompute=Recompute()).values["trainer"]
    assert trainer["trainer_config"] == {"actor_rollout_ref": {"model": {"enable_gradient_checkpointing": False}}}


def test_yarn_is_written_beyond_the_models_own_context_alone() -> None:
    assert "rope_scaling" not in files(job={"seq_len": 40960}).values["model"]
    longer = files(job={"seq_len": 61440})
    rope = longer.values["model"]["rope_scaling"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 1.875, 32768)
    assert any("YaRN" in warning for warning in longer.warnings)


def test_too_few_cores_for_verl_are_told() -> None:
    def told(cores: int | None) -> bool:
        return any("CPU cores a GPU" in warning for warning in files(replace(CLUSTER, cpu_cores=cores)).warnings)

    assert [told(cores) for cores in (None, 24, 23)] == [False, False, True]


def test_steps_are_whole_batches_of_all_epochs_together() -> None:
    spec, _ = make_spec_and_plan(job={"samples": 100, "epochs": 1.5, "global_batch_size": 64})
    assert training_steps(spec.job) == 2
    assert files(job={"samples": 1000, "epochs": 1.5}).values["buffer"]["total_steps"] == 23
    assert files(job={"epochs": 2.0}).values["buffer"]["total_epochs"] == 2


def test_keys_of_the_user_are_put_into_their_blocks() -> None:
    found = files(job={"trainer": {"trainer": {"grad_clip": 0.5}, "log": {"level": "DEBUG"}}})
    assert found.values["trainer"]["grad_clip"] == 0.5
    assert found.values["log"] == {"level": "DEBUG"}
    assert found.run_name != files().run_name


@pytest.mark.parametrize(
    ("job", "layout", "message"),
    [
        ({"stage": "dpo"}, {}, "job.stage: no Trinity-RFT job is written for stage dpo"),
        ({}, {"fused_linear_cross_entropy": True}, "fused loss"),
        ({"trainer": {"trainers": {}}}, {}, "trainers is not a block"),
        ({"trainer": {"trainer": {"max_token_len_per_gpu": 1}}}, {}, "max_token_len_per_gpu is decided by the plan"),
        ({"trainer": {"trainer": 3}}, {}, "is not a mapping"),
    ],
)
def test_what_the_trainer_would_not_do_is_refused(job: dict[str, Any], layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        files(job=job, **layout)


def test_hybrid_shards_are_as_wide_as_a_node() -> None:
    two_nodes = replace(CLUSTER, nodes=2)
    block = files(cluster=two_nodes, sharding="hybrid").values["trainer"]
    verl = block["trainer_config"]["actor_rollout_ref"]
    assert verl["actor"]["fsdp_config"]["fsdp_size"] == 8 < two_nodes.world_size
