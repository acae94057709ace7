from dataclasses import replace
from typing import Any

import yaml

from tests.bundle.samples import ONE_NODE, make_spec_and_plan
from topoplan.layout.layout import Recompute
from topoplan.specs.known import model
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.trinity.document import output_directory, rope_scaling
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


def test_keys_of_the_user_are_put_into_their_blocks() -> None:
    found = files(job={"trainer": {"trainer": {"grad_clip": 0.5}, "log": {"level": "DEBUG"}}})
    assert found.values["trainer"]["grad_clip"] == 0.5
    assert found.values["log"] == {"level": "DEBUG"}
    assert found.run_name != files().run_name


QWEN3 = model("Qwen3-8B")


def test_positions_are_scaled_beyond_the_models_own_context() -> None:
    own = QWEN3.max_position_embeddings
    assert own is not None
    assert rope_scaling(QWEN3, own) is None
    scaled = rope_scaling(QWEN3, 2 * own)
    assert (scaled["rope_type"], scaled["factor"], scaled["original_max_position_embeddings"]) == ("yarn", 2.5, 32768)
    assert "ROPE_THETA" in scaled["rope_theta"], "of the model's directory, which this machine may not have"
