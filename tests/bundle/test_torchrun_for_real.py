"""The real node scripts with the real torchrun; only the trainer is a stub, which needs no GPU.

The stub replaces llamafactory.launcher, meets the other ranks over Gloo, and records how it was started.
"""

import importlib.util
import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.nodes import Machine, Nodes, Started, nodes, stand_in_trainer, two_machines, wait_until
from tests.bundle.samples import CLUSTER, QWEN3_8B, make_layout, make_plan, make_spec_and_plan
from tests.bundle.test_node_script import fill
from topoplan.bundle.bundle import generate
from topoplan.bundle.node_script import master_port
from topoplan.bundle.write import write_bundle
from topoplan.specs.cluster import Host
from topoplan.specs.passed_on import HIJACKERS
from topoplan.specs.spec import Spec
from topoplan.trainers.environment import node_environment
from topoplan.trainers.llamafactory.mca import trainer_file, trainer_run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

LAUNCHER = """
import json, os, pathlib, sys, time

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everyone = torch.tensor([rank])
    dist.all_reduce(everyone)
    print(f"rank {rank} is here", flush=True)
    seen = {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "rank": rank,
        "sum": everyone.item(),
        "world": dist.get_world_size(),
    }
    report = pathlib.Path(os.environ["REPORTS"], f"{rank}.json")
    report.with_suffix(".new").write_text(json.dumps(seen))
    report.with_suffix(".new").rename(report)
    if os.environ["THEN"] == f"rank {rank} raises":
        raise RuntimeError("as it was told to")
    while os.environ["THEN"] != "end":
        dist.barrier()  # as training does: what happens to one rank comes to the others through a collective
        time.sleep(0.05)
    dist.destroy_process_group()
"""

TORCHRUN_SETS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
}


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path / "run") as running:
        yield running


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines:
        yield machines


def spec_for(root: Path, *machines: Machine, **cluster: Any) -> Spec:
    """Return a spec of machines with two processes each, every machine with a work directory of its own."""
    (root / "venv").symlink_to(sys.prefix)
    known = []
    for node, machine in enumerate(machines):
        workdir = root / f"node {node}"
        fill(workdir, model="model")
        known.append(
            Host(
                address=machine.address,
                workdir=str(workdir),
                venv=str(root / "venv"),
                socket_interface=machine.interface,
            )
        )
    # The name determines the port, which must be free when such tests run in parallel.
    name = f"test-{uuid.uuid4().hex}"
    size = {"name": name, "nodes": len(machines), "gpus_per_node": 2, "nvlink_domain_gpus": 2, "nics_per_node": 2}
    spec, _ = make_spec_and_plan(
        cluster=replace(CLUSTER, **size, hosts=tuple(known), **cluster),
        model=QWEN3_8B,
        job={"trainer": {"model_name_or_path": "model"}},
        tp=2,
    )
    return spec


def start(running: Nodes, spec: Spec, machines: tuple[Machine, ...], bundle: Path, then: str) -> list[Started]:
    """Start the scripts of all nodes, in an environment with variables left over from an earlier job."""
    layout = make_layout(spec.cluster, tp=2)
    write_bundle(generate(spec, make_plan(layout)), bundle)
    reports = bundle.parent / "reports"
    reports.mkdir()
    poison = dict.fromkeys([*HIJACKERS, "PET_NNODES", "TORCHELASTIC_RUN_ID"], "7")
    trainer = stand_in_trainer(bundle.parent / "trainer", LAUNCHER)
    env = poison | trainer | {"REPORTS": str(reports), "THEN": then}
    return [
        running.start(bundle / f"node-{node:02d}.sh", machine=machine, env=env) for node, machine in enumerate(machines)
    ]


def seen_by_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_two_scripts_become_one_job_whose_ranks_are_as_planned(
    launched: Nodes, pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    spec = spec_for(tmp_path, *pair, cpu_cores=2)
    bundle = tmp_path / "bundle"
    started = start(launched, spec, pair, bundle, "end")
    assert [(one.wait(), one.text) for one in started if one.wait()] == []

    seen = seen_by_ranks(tmp_path / "reports")
    assert [one["rank"] for one in seen] == [0, 1, 2, 3]
    layout = make_layout(spec.cluster, tp=2)
    trainer = trainer_file(spec, layout)
    own = trainer_run(spec, layout, trainer.values).environment
    for rank, one in enumerate(seen):
        node, local = divmod(rank, 2)
        env = one["env"]
        assert (one["world"], one["sum"]) == (4, 6)
        assert one["argv"][1:] == [f"{bundle}/train.yaml"]
        assert one["cwd"] == str(tmp_path / f"node {node}")
        by_torchrun = {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": node,
            "ROLE_RANK": rank,
            "MASTER_ADDR": pair[0].address,
            "MASTER_PORT": master_port(spec, trainer),
        }
        assert {key: env[key] for key in by_torchrun} == {key: str(value) for key, value in by_torchrun.items()}
        assert not {*HIJACKERS, "PET_NNODES"} - TORCHRUN_SETS & env.keys()
        assert env["TORCHELASTIC_RUN_ID"] != "7"
        exported = {variable.name: variable.value for variable in node_environment(spec.cluster, own, node)}
        assert exported["USE_MCA"] == "1"
        assert {key: env[key] for key in exported} == exported
        assert env["VIRTUAL_ENV"] == f"{tmp_path}/venv"
        logs = [*(Path(one["cwd"]) / "logs" / trainer.run_name / f"node-{node:02d}").rglob(f"{local}/stdout.log")]
        assert [path.read_text() for path in logs] == [f"rank {rank} is here\n"]
        assert f"rank {rank} is here" in started[node].text
    assert [one.left() for one in started] == [{}, {}]


def test_one_node_trains_alone_whatever_its_directories_are_called(launched: Nodes, tmp_path: Path) -> None:
    root = tmp_path / "训练 'a' \"b\" $(c)"
    root.mkdir()
    alone = Machine(address="127.0.0.1", interface="lo")
    spec = spec_for(root, alone)
    bundle = root / "包 `d` & e"
    (started,) = start(launched, spec, (alone,), bundle, "end")
    assert started.wait() == 0, started.text
    seen = seen_by_ranks(root / "reports")
    assert [(one["rank"], one["world"], one["cwd"]) for one in seen] == [(n, 2, str(root / "node 0")) for n in (0, 1)]
    assert seen[0]["argv"][1:] == [f"{bundle}/train.yaml"]
    assert seen[0]["env"]["VIRTUAL_ENV"] == str(root / "venv")


def test_sigterm_to_one_script_ends_its_ranks_and_the_rest_of_the_job(
    launched: Nodes, pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    started = start(launched, spec_for(tmp_path, *pair), pair, tmp_path / "bundle", "train on")
    wait_until("all ranks are up", lambda: len(seen_by_ranks(tmp_path / "reports")) == 4, started)
    started[1].process.terminate()
    assert started[1].wait() != 0
    assert not started[1].left()
    # Ranks on the other node notice in the next collective that their peers are gone.
    assert started[0].wait() != 0
    assert [one.left() for one in started] == [{}, {}]


def test_a_rank_that_raises_ends_both_scripts_with_an_error(
    launched: Nodes, pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    started = start(launched, spec_for(tmp_path, *pair), pair, tmp_path / "bundle", "rank 3 raises")
    wait_until("all ranks are up", lambda: len(seen_by_ranks(tmp_path / "reports")) == 4)
    assert [one.wait() for one in started] == [1, 1]
    assert "RuntimeError: as it was told to" in started[1].text
    assert [one.left() for one in started] == [{}, {}]
