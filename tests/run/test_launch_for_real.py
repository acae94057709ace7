"""Real torchrun jobs with Gloo on four hosts: only the trainer is a stand-in, without a GPU."""

import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bed.jobs import LABELS, NAMES, SETTINGS, After, Hosts, Once
from tests.bundle.nodes import stand_in_trainer
from tests.run.test_attach import Client
from tests.waiting import wait_until
from topoplan.run.events import Event
from topoplan.run.progress import Progress

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

LAUNCHER = """
import datetime, os, signal, time

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group(timeout=datetime.timedelta(seconds=float(os.environ["TIMEOUT"])))
    rank = dist.get_rank()
    everyone = torch.tensor([rank])
    dist.all_reduce(everyone)
    print(f"rank {rank} of {dist.get_world_size()} sees {everyone.item()}", flush=True)
    dist.barrier()
    then = os.environ["THEN"]
    if then == f"rank {rank} raises":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if then == f"rank {rank} is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    def wait_for_data():
        time.sleep(600)

    step = 0
    while then != "end":
        step += 1
        if step == 20 and then == f"rank {rank} hangs":
            wait_for_data()
        dist.barrier(group)
        if rank == 0:
            print(f"{{'loss': {1 / step:.4f}}}", flush=True)
        time.sleep(0.05)
    dist.destroy_process_group()
"""


def ranks_on_each(ranks: int) -> pytest.MarkDecorator:
    """Let each of the four hosts have so many ranks."""
    return pytest.mark.parametrize("hosts", [{"gpus": ranks, "cpu_cores": 2}], indirect=True, ids=[f"{ranks} ranks"])


def trains(hosts: Hosts, then: str, *, timeout_s: float = 600, program: str = LAUNCHER) -> None:
    """Use real Pythons instead of the stand-ins; ranks that have met wait this long for others."""
    env = stand_in_trainer(hosts.root / "trainer", program)
    env |= {"THEN": then, "TIMEOUT": str(timeout_s), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in NAMES:
        python = hosts.root / name / "venv" / "bin" / "python"
        python.write_text(
            f"#!/bin/bash\nexport {shlex.join(f'{key}={value}' for key, value in env.items())}\n"
            f'exec {os.path.realpath(sys.prefix)}/bin/python "$@"\n'
        )


@ranks_on_each(1)
def test_a_job_over_four_hosts_ends_well(hosts: Hosts) -> None:
    trains(hosts, "end")
    ran = hosts.launch(settings=SETTINGS)
    assert ran.outcome.code == 0, ran.of("line")
    said = "\n".join(ran.of("line"))
    assert all(f"rank {rank} of 4 sees 6" in said for rank in range(4))


@ranks_on_each(2)
def test_the_rank_that_failed_is_blamed_and_all_others_are_stopped(hosts: Hosts) -> None:
    trains(hosts, "rank 5 raises")
    ran = hosts.launch(settings=replace(SETTINGS, grace_s=5))
    assert (ran.failure.node, ran.diagnosis.rank, ran.diagnosis.kind) == ("node-02", 5, "gpu-memory")
    assert (ran.outcome.end, ran.outcome.running) == ("failed", ())
    assert ran.outcome.code == 1


@ranks_on_each(1)
@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_a_rank_that_hangs_is_mentioned_and_blamed_with_its_place_in_the_program(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topoplan.run.silence._LEAST_S", 2.0)
    monkeypatch.setattr(Progress, "pace_s", 0.1)
    trains(hosts, "rank 2 hangs", timeout_s=6)
    for name in NAMES:
        (hosts.root / name / "venv" / "bin" / "py-spy").symlink_to(shutil.which("py-spy") or "")
    ran = hosts.launch(settings=replace(SETTINGS, grace_s=5))
    hosts.assert_nothing_is_left()
    [said], [places] = ran.of("silence"), ran.of("stacks")
    assert said.startswith("no step for 2 s (after step 19; one takes 0.1 s); the last lines:\n")
    assert "node-00 rank 0, " in said
    assert places.splitlines()[1].startswith("  rank 2: wait_for_data (llamafactory/launcher.py:")
    assert (ran.failure.node, ran.diagnosis.rank, ran.diagnosis.kind) == ("node-02", 2, "hang")
    assert ran.failure.stacks[0].startswith("rank 2: wait_for_data (llamafactory/launcher.py:")
    assert (ran.outcome.end, ran.outcome.code, ran.outcome.running) == ("failed", 1, ())


@ranks_on_each(1)
def test_a_host_that_dies_is_blamed_once_its_peers_have_waited_for_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topoplan.run.failure.REACHABLE_S", 3.0)
    trains(hosts, "go on", timeout_s=4)
    try:
        ran = hosts.launch(settings=replace(SETTINGS, grace_s=5), on=Once("sees 6", lambda: hosts.bed.cut("three")))
    finally:
        hosts.bed.heal("three")
    assert (ran.failure.node, ran.diagnosis.kind, ran.outcome.code) == ("node-02", "lost", 1)
    assert (ran.outcome.end, ran.outcome.running) == ("failed", ("node-02",))
    hosts.stop_from_another_client()


@ranks_on_each(1)
def test_a_rank_that_is_killed_while_the_client_is_offline_is_blamed_when_it_is_back(hosts: Hosts) -> None:
    trains(hosts, "rank 2 is killed")
    offline = After("be offline")
    hidden: list[str] = []

    def on(event: Event) -> None:
        if event.data.get("step") == "watch":
            hosts.bed.hide()
            hidden.append("all")
        offline(event)
        if offline.seen and hidden:
            hidden.clear()
            ends = [Path(node.run_dir, ".topoplan", "exit") for node in hosts.record().nodes]
            wait_until(lambda: all(end.exists() for end in ends), "all nodes end")
            hosts.bed.show()

    ran = hosts.launch(settings=replace(SETTINGS, grace_s=5), on=on)
    assert (ran.failure.node, ran.diagnosis.rank, ran.diagnosis.kind) == ("node-02", 2, "killed")
    assert (ran.outcome.end, ran.outcome.running, ran.outcome.code) == ("failed", (), 1)


STORE = """
import os, signal, sys, time

if __name__ == "__main__":
    import torch.distributed as dist

    # No more than the store: whatever else the ranks need, they would need other ports for.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    store.set(f"there {rank}", "yes")
    store.wait([f"there {each}" for each in range(4)])
    print(f"rank {rank} sees all", flush=True)
    time.sleep(1)
    if os.environ["THEN"] == f"rank {rank} is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@ranks_on_each(1)
def test_a_rank_that_is_killed_ends_all_nodes_though_nobody_watches_and_one_port_is_open(hosts: Hosts) -> None:
    trains(hosts, "rank 2 is killed", program=STORE)
    with hosts.bed.closed_but_for(hosts.bundle.draft.master_port):
        process = hosts.start()
        assert any("running on" in line for line in process.stdout)
        process.kill()
        process.communicate()
        hosts.wait_for_all("sees all")
        ends = {node.label: Path(node.run_dir, ".topoplan", "exit") for node in hosts.record().nodes}
        wait_until(lambda: all(end.exists() for end in ends.values()), "all nodes end")
    stopped = {label: end.with_name("stopped") for label, end in ends.items()}
    said = {label: file.read_text() for label, file in stopped.items() if file.exists()}
    assert said == dict.fromkeys(set(LABELS) - {"node-02"}, "node-02 failed\n")
    hosts.assert_nothing_is_left()
    attached = Client(hosts).attach()
    assert (attached.failure.node, attached.failure.diagnosis.rank, attached.code) == ("node-02", 2, 1)
