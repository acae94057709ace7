from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from tests.emit.samples import CLUSTER, HOSTS, make_spec_and_plan
from topoplan.catalog import model
from topoplan.emit.bundle import generate
from topoplan.emit.writers import writer_for


def bundle(**job: Any) -> dict[str, str]:
    spec, plan = make_spec_and_plan(
        cluster=replace(CLUSTER, nodes=2, hosts=HOSTS[:2], host_memory_bytes=2**41),
        model=model("Qwen3-8B"),
        job={"packing": False, "seq_len": 8192, **job},
        backend="fsdp2",
        ulysses=2,
        expandable_segments=True,
    )
    return generate(spec, plan, trainer="trinity")


def test_it_is_taken_for_fsdp2_where_it_is_asked_for() -> None:
    assert writer_for("fsdp2", "trinity").trainer == "trinity"
    assert writer_for("fsdp2").trainer == "llamafactory"


def test_node_0_is_the_head_and_the_others_join_it() -> None:
    files = bundle()
    head, worker = files["node-00.sh"], files["node-01.sh"]
    assert 'ray_start --head --node-ip-address "$master_addr" --port "$master_port"' in head
    assert 'trinity.cli.launcher run --config "$bundle_dir/train.yaml"' in head
    assert 'ray_start --address "$master_addr:$master_port"' in worker
    assert "trinity.cli" not in worker


def test_the_environment_is_set_before_ray_whose_workers_inherit_it() -> None:
    head = bundle()["node-00.sh"]
    assert head.index("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") < head.index("ray_start --head")


def test_yarn_is_checked_on_the_node_that_starts_the_trainer() -> None:
    assert "ROPE_THETA" not in bundle()["node-00.sh"]
    files = bundle(seq_len=81920)
    assert "export ROPE_THETA" in files["node-00.sh"]
    assert "needs verl below 0.8" in files["node-00.sh"]
    assert "ROPE_THETA" not in files["node-01.sh"]


@pytest.mark.parametrize("name", ["node-00.sh", "node-01.sh"])
def test_bash_reads_the_scripts(name: str) -> None:
    script = bundle(seq_len=81920)[name]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""


def test_a_bundle_without_data_says_where_it_goes() -> None:
    files = bundle(dataset=None)
    assert "\n      path: SET_ME" in files["train.yaml"]
    assert "grep -q '^      path: SET_ME" in files["node-00.sh"]
    assert "`path` in `train.yaml`" in files["README.md"]
