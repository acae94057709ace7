from dataclasses import replace
from typing import Any

import yaml

from tests.bundle.samples import ONE_NODE, make_spec_and_plan
from topoplan.layout.layout import Recompute
from topoplan.specs.known import model
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.trinity.document import output_directory
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
