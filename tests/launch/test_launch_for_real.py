"""Real torchrun jobs with Gloo on four hosts of two ranks each: only the trainer is a stand-in, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.bed import Bed
from tests.launch.jobs import NAMES, SETTINGS, Hosts, hosts_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

LAUNCHER = """
import os, signal, time

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
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
    while then != "end":
        dist.barrier()
        time.sleep(0.05)
    dist.destroy_process_group()
"""


@pytest.fixture
def hosts(four: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = hosts_of(four, tmp_path, cpu_cores=2)
    monkeypatch.setenv("XDG_STATE_HOME", str(made.state))
    trainer = tmp_path / "trainer"
    for package in ("llamafactory", "mcore_adapter", "megatron", "transformer_engine"):
        (trainer / package).mkdir(parents=True)
        (trainer / package / "__init__.py").touch()
    (trainer / "llamafactory" / "launcher.py").write_text(LAUNCHER)
    return made


def trains(hosts: Hosts, then: str) -> None:
    """Real Pythons in the place of the stand-ins."""
    for name in NAMES:
        python = hosts.root / name / "venv" / "bin" / "python"
        python.write_text(
            f"#!/bin/bash\nexport THEN='{then}' PYTHONPATH='{hosts.root}/trainer' OMP_NUM_THREADS=1\n"
            f'exec {os.path.realpath(sys.prefix)}/bin/python "$@"\n'
        )


def test_a_job_over_four_hosts_ends_well(hosts: Hosts) -> None:
    trains(hosts, "end")
    ran = hosts.launch(settings=replace(SETTINGS, start_s=60))
    assert ran.outcome.code == 0, ran.of("line")
    said = "\n".join(ran.of("line"))
    assert all(f"rank {rank} of 8 sees 28" in said for rank in range(8))
    hosts.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("then", "rank", "kind"), [("rank 5 raises", 5, "gpu-memory"), ("rank 2 is killed", 2, "killed")]
)
def test_the_rank_that_failed_is_blamed_and_all_others_are_stopped(
    hosts: Hosts, then: str, rank: int, kind: str
) -> None:
    trains(hosts, then)
    ran = hosts.launch(settings=replace(SETTINGS, start_s=60, grace_s=5))
    hosts.assert_nothing_is_left()
    failure = ran.outcome.failure
    assert failure is not None
    assert failure.diagnosis is not None, failure.tail
    assert (failure.node, failure.diagnosis.rank, failure.diagnosis.kind) == (f"node-{rank // 2:02d}", rank, kind)
    assert (ran.outcome.end, ran.outcome.running) == ("failed", ())
    assert ran.outcome.code == 1
