"""How a configuration shards its states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reading.setups import all_of, configuration, launch, swift_zero2
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.trainers.codec import StatedSharding
from topoplan.trainers.sharding import sharding_of

FULL = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\n"


def of(one: Configuration, where: Setup | None = None) -> StatedSharding:
    return sharding_of(Keys(one, {}), where or all_of(one))


@pytest.mark.parametrize(
    ("written", "stage", "offload"),
    [
        ("zero1", 1, (False, False)),
        ("zero2_offload", 2, (True, False)),
        ("zero3_offload", 3, (True, True)),
        ("examples/deepspeed/ds_z3_config.json", 3, (False, False)),
        ("examples/deepspeed/ds_z2_offload_config.json", 2, (True, False)),
    ],
)
def test_well_known_files_are_known_by_their_names(written: str, stage: int, offload: tuple[bool, bool]) -> None:
    one, where = swift_zero2(deepspeed=written)
    found = of(one, where)

    assert (found.backend, found.zero_stage) == ("deepspeed", stage)
    assert (found.offload_optimizer, found.offload_param) == offload
    assert ("was not read" in found.assumption) == written.endswith(".json")


@pytest.mark.parametrize(
    ("written", "words"),
    [("configs/ours.json", "was not read"), ("zero0", "ZeRO stage 0 is not predicted")],
)
def test_a_file_whose_name_does_not_say_it_is_not_predicted(written: str, words: str) -> None:
    one, where = swift_zero2(deepspeed=written)
    with pytest.raises(NotPredictedError, match=words) as error:
        of(one, where)
    assert error.value.key == "deepspeed"


def zero(**keys: Any) -> StatedSharding:
    block = json.dumps({"zero_optimization": keys})
    return of(configuration(f"{FULL}deepspeed: {block}\n"))


def test_a_block_says_what_is_offloaded() -> None:
    assert zero(stage=3, offload_optimizer={"device": "cpu"}) == StatedSharding(
        backend="deepspeed", zero_stage=3, offload_optimizer=True
    )
    # offload_param has an effect only in stage 3, and "none" has none
    assert zero(stage=2, offload_param={"device": "cpu"}) == StatedSharding(backend="deepspeed", zero_stage=2)
    assert zero(stage=3, offload_param={"device": "none"}) == StatedSharding(backend="deepspeed", zero_stage=3)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"stage": 0}, "ZeRO stage 0"),
        ({"stage": "three"}, "ZeRO stage 'three'"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer to nvme"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "in part"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload_param without offload_optimizer"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size 8"),
    ],
)
def test_what_no_layout_has_is_not_predicted(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(NotPredictedError, match=words):
        zero(**keys)


def test_a_deepspeed_file_is_read_beside_the_configuration_or_among_what_was_given(tmp_path: Path) -> None:
    (tmp_path / "ours.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    beside = configuration(FULL + "deepspeed: ours.json\n", name=str(tmp_path / "train.yaml"))
    assert of(beside).zero_stage == 3

    given = configuration('{"zero_optimization": {"stage": 1}}', trainer="deepspeed", name="else/where.json")
    names_it = configuration(FULL + "deepspeed: where.json\n")
    assert of(names_it, all_of(names_it, given)).zero_stage == 1


FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: {offload}
  fsdp_reshard_after_forward: {reshard}
mixed_precision: bf16
num_processes: 8
"""


def test_an_accelerate_file_decides_where_the_trainer_says_nothing() -> None:
    one = configuration(FULL)
    told = configuration(FSDP.format(offload="true", reshard="true"), trainer="accelerate", name="fsdp.yaml")
    start = launch("src/train.py", starter="accelerate", of=one)

    assert of(one, all_of(one, told, launches=(start,))) == StatedSharding(backend="fsdp2", offload=True)
    without = configuration(FSDP.format(offload="false", reshard="false"), trainer="accelerate", name="fsdp.yaml")
    with pytest.raises(NotPredictedError, match="does not shard the parameters"):
        of(one, all_of(one, without, launches=(start,)))
    with pytest.raises(NotPredictedError, match="`accelerate` reads the sharding from"):
        of(one, all_of(one, launches=(start,)))


def test_an_accelerate_file_may_hold_deepspeed() -> None:
    one = configuration(FULL)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n"
    told = configuration(text, trainer="accelerate", name="ds.yaml")

    found = of(one, all_of(one, told))
    assert found == StatedSharding(backend="deepspeed", zero_stage=2, offload_optimizer=True)


def test_the_trainers_own_fsdp_key_counts() -> None:
    first = of(configuration(FULL + "fsdp: full_shard auto_wrap offload\n"))
    assert (first.backend, first.offload) == ("fsdp2", True)
    assert "predicted as FSDP2" in first.assumption
    second = of(configuration(FULL + "fsdp: full_shard\nfsdp_config: {fsdp_version: 2}\n"))
    assert second == StatedSharding(backend="fsdp2")
    one, where = swift_zero2(deepspeed=None, fsdp="fsdp2")
    assert of(one, where) == StatedSharding(backend="fsdp2", checkpoints=True)  # the preset enables recomputation
    with pytest.raises(NotPredictedError, match="shard_grad_op"):
        of(configuration(FULL + "fsdp: shard_grad_op\n"))


def test_nothing_said_is_plain_data_parallelism() -> None:
    assert of(configuration(FULL)) == StatedSharding()


def test_another_launcher_is_not_taken_for_one_process() -> None:
    one = configuration(FULL)
    started = replace(launch("src/train.py", "train.yaml", starter=""), wrappers=("mpirun",), file_configuration=one)
    with pytest.raises(NotPredictedError, match="what `mpirun` starts"):
        of(one, all_of(one, launches=(started,)))


def test_swift_without_processes_spreads_the_model() -> None:
    one, _ = swift_zero2(deepspeed=None)
    alone = all_of(one, launches=(launch("swift", "sft", starter="", of=one),))
    with pytest.raises(NotPredictedError, match="NPROC_PER_NODE"):
        of(one, alone)
    on_one = replace(alone.launches[0], variables=launch(variables={"CUDA_VISIBLE_DEVICES": "3"}).variables)
    assert of(one, replace(alone, launches=(on_one,))) == StatedSharding()
