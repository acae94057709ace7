"""Read the files with Trinity-RFT's own configuration classes, and check that verl gets what was planned."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, ONE_NODE, make_spec_and_plan
from topoplan.layout.layout import Recompute
from topoplan.specs.known import model
from topoplan.trainers.trinity.document import trinity_files

pytestmark = pytest.mark.verify
pytest.importorskip("trinity", reason="trinity-rft is not installed (the verify-trinity extra has it)")

READ = """
import json, sys
from trinity.common.config import load_config
config = load_config("train.yaml")
config.check_and_update()
actor = config.trainer.trainer_config.actor_rollout_ref.actor
model = config.trainer.trainer_config.actor_rollout_ref.model
print("READ" + json.dumps({
    "tokens": actor.ppo_max_token_len_per_gpu, "ulysses": actor.ulysses_sequence_parallel_size,
    "strategy": actor.strategy, "offload": actor.fsdp_config.offload_policy,
    "shards": actor.fsdp_config.fsdp_size, "checkpointing": model.enable_gradient_checkpointing,
    "batch": actor.ppo_mini_batch_size, "rope": model.rope_scaling, "directory": config.checkpoint_job_dir,
}))
"""


def read(tmp_path: Path, text: str) -> Any:
    """Return the configuration that is passed to verl."""
    (tmp_path / "train.yaml").write_text(text)
    environment = {**os.environ, "ROPE_THETA": "1000000.0"}
    done = subprocess.run(
        [sys.executable, "-c", READ], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("READ"))[4:])


def test_the_configuration_is_read_as_it_was_planned(tmp_path: Path) -> None:
    spec, plan = make_spec_and_plan(
        cluster=replace(ONE_NODE, host_memory_bytes=2**41),
        model=model("Qwen3-8B"),
        job={"packing": False, "seq_len": 81920, "dataset": "org/chats"},
        backend="fsdp2",
        ulysses=4,
        offload=True,
    )
    files = trinity_files(spec, plan.layout)
    assert read(tmp_path, files.text) == {
        "tokens": 20480,
        "ulysses": 4,
        "strategy": "fsdp2",
        "offload": True,
        "shards": 8,
        "checkpointing": False,
        "batch": 64,
        "rope": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        },
        "directory": str(tmp_path / "saves" / "topoplan" / files.run_name),
    }


def test_hybrid_shards_stay_in_a_node(tmp_path: Path) -> None:
    spec, plan = make_spec_and_plan(
        cluster=CLUSTER,
        model=model("Qwen3-8B"),
        job={"packing": False, "dataset": "org/chats"},
        backend="fsdp2",
        sharding="hybrid",
        recompute=Recompute(granularity="full", method="uniform", num_layers=1),
    )
    found = read(tmp_path, trinity_files(spec, plan.layout).text)
    assert (found["shards"], found["checkpointing"]) == (CLUSTER.gpus_per_node, True)
