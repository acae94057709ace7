"""Run the job script under a real Slurm of four nodes on this machine, with a stub for Python on each node."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.nodes import stand_in_trainer
from tests.bundle.samples import CLUSTER, ONE_NODE, make_spec_and_plan
from tests.bundle.test_node_script import fill
from tests.verify.slurm import CPUS, GPUS, LIMIT_S, Job, Slurm, own_slurm
from topoplan.bundle.bundle import generate
from topoplan.bundle.slurm import JOB_SCRIPT
from topoplan.bundle.write import write_bundle
from topoplan.specs.cluster import Host

pytestmark = pytest.mark.verify

# Notes what it was started with; then works, fails as torchrun does, which ends its worker first, or is ended.
FAKE_PYTHON = r"""#!/bin/bash
if [[ "$1" == - || "$1" == -c ]]; then exit 0; fi
mkdir "$PROBE/$SLURMD_NODENAME" || exit 99
cd "$PROBE/$SLURMD_NODENAME"
printf '%s\0' "$@" > argv
env -0 > env
trap 'echo ended by SIGTERM; touch ended; exit 1' TERM
sleep "${WORK_S:-0}" & printf '%s %s' "$$" "$!" > pids.new; mv pids.new pids
if [[ "$SLURMD_NODENAME" == "${FAILING:-}" ]]; then
  while (($(ls -d "$PROBE"/*/pids | wc -l) < 4)); do sleep 0.02; done
  kill "$!"; exit 7
fi
# Slurm signals every process: the worker may be gone before the trap is reached.
wait "$!" || { sleep 100 & wait "$!"; }
"""


# The trainers die by SIGTERM, as if Slurm's signal had reached them first. One node fails once the shells of the others
# wait for what they are not told yet: their sleeps are ten times as long.
SIGNALLED_PYTHON = r"""#!/bin/bash
if [[ "$1" == - || "$1" == -c ]]; then exit 0; fi
mkdir "$PROBE/$SLURMD_NODENAME"
echo "$$" > "$PROBE/$SLURMD_NODENAME/pids"
[[ "$SLURMD_NODENAME" == sim3 ]] || kill "$$"
while (($(ls -d "$PROBE"/*/waits | wc -l) < 3)); do sleep 0.02; done
exit 7
"""
SIGNALLED_SLEEP = r"""#!/bin/bash
[[ "$1" == 0.1 && "$SLURMD_NODENAME" != sim3 ]] || exec /bin/sleep "$@"
touch "$PROBE/$SLURMD_NODENAME/waits"
exec /bin/sleep 1
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with own_slurm() as running:
        yield running


class Bundle:
    """A bundle on storage that all nodes share, and what its tasks recorded."""

    def __init__(self, root: Path, python_text: str = FAKE_PYTHON, **what: Any) -> None:
        self.root, self.path, self.probe = root, root / "a b'c\"$(d)`e`", root / "probe"
        python = root / "env/python3"
        for directory in (self.probe, python.parent):
            directory.mkdir()
        python.write_text(python_text)
        python.chmod(0o755)
        write_bundle(generate(*make_spec_and_plan(**what), "slurm"), self.path)
        fill(self.path)

    @property
    def script(self) -> str:
        return str(self.path / JOB_SCRIPT)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.root / "env"), "PROBE": str(self.probe), "MY_TOKEN": "a b", **more}

    def option(self, node: str, name: str) -> str:
        argv = (self.probe / node / "argv").read_bytes().decode().split("\0")
        return argv[argv.index(name) + 1]

    def ranks(self) -> dict[str, str]:
        return {path.name: self.option(path.name, "--node_rank") for path in sorted(self.probe.iterdir())}

    def env(self, node: str) -> dict[str, str]:
        lines = (self.probe / node / "env").read_bytes().decode().split("\0")[:-1]
        return dict(line.split("=", 1) for line in lines)

    def wait_for_tasks(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while len(list(self.probe.glob("*/pids"))) < count:
            assert time.monotonic() < until, "the tasks did not start"
            time.sleep(0.02)

    def alive(self) -> list[int]:
        pids = [int(pid) for path in self.probe.glob("*/pids") for pid in path.read_text().split()]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def done_well(job: Job) -> None:
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output


def test_every_node_runs_its_own_script_once(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path)
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment()))
    done_well(job)
    assert bundle.ranks() == {"sim1": "0", "sim2": "1", "sim3": "2", "sim4": "3"}
    assert {bundle.option(f"sim{n}", "--master_addr") for n in range(1, 5)} == {"127.0.0.1"}
    assert len({bundle.option(f"sim{n}", "--master_port") for n in range(1, 5)}) == 1
    assert bundle.option("sim3", "-m") == "torch.distributed.run"
    assert bundle.option("sim3", "llamafactory.launcher") == f"{bundle.path}/train.yaml"
    env = bundle.env("sim3")
    assert env["USE_MCA"] == "1"
    assert env["MY_TOKEN"] == "a b"
    # The only task of a node gets all of it, although it requested one core and no memory.
    assert (env["SLURM_CPUS_ON_NODE"], env["SLURM_GPUS_ON_NODE"]) == (str(CPUS), str(GPUS))
    assert f"mem={4 * 1000}M" in job.details["TRES"]
    assert Path(job.details["StdOut"]).parent == tmp_path
    assert (bundle.path / "logs").is_dir()


@pytest.mark.parametrize("way", ["from its directory", "from standard input", "inside an allocation"])
def test_the_bundle_is_found_however_it_is_submitted(slurm: Slurm, tmp_path: Path, way: str) -> None:
    bundle = Bundle(tmp_path)
    env = bundle.environment()
    if way == "inside an allocation":
        options = ["--nodes=4", "--ntasks-per-node=1", f"--gpus-per-node={GPUS}", "--exclusive"]
        slurm.run("salloc", *options, "bash", bundle.script, cwd=tmp_path, env=env)
    elif way == "from standard input":
        done_well(
            slurm.wait(slurm.run("bash", "-c", "sbatch --parsable < job.sbatch", cwd=bundle.path, env=env).strip())
        )
    else:
        done_well(slurm.wait(slurm.submit(JOB_SCRIPT, cwd=bundle.path, env=env)))
    assert bundle.ranks() == {"sim1": "0", "sim2": "1", "sim3": "2", "sim4": "3"}


def test_the_first_machine_of_the_job_is_node_0_and_the_address_is_slurms(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster=replace(CLUSTER, nodes=2))
    done_well(slurm.wait(slurm.submit("--exclude=sim1,sim3", bundle.script, cwd=tmp_path, env=bundle.environment())))
    assert bundle.ranks() == {"sim2": "0", "sim4": "1"}
    assert {bundle.option(node, "--master_addr") for node in ("sim2", "sim4")} == {"127.0.0.2"}


def test_one_node_needs_no_other(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster=ONE_NODE)
    done_well(slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment())))
    assert bundle.ranks() == {"sim1": "0"}


def test_hosts_of_the_spec_get_their_own_scripts(slurm: Slurm, tmp_path: Path) -> None:
    hosts = tuple(Host(address=f"sim{n}", socket_interface=f"eth{n}") for n in (3, 1, 4, 2))
    bundle = Bundle(tmp_path, cluster=replace(CLUSTER, hosts=hosts))
    done_well(slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment())))
    assert bundle.ranks() == {"sim3": "0", "sim1": "1", "sim4": "2", "sim2": "3"}
    assert {node: bundle.env(node)["GLOO_SOCKET_IFNAME"] for node in bundle.ranks()} == {
        f"sim{n}": f"eth{n}" for n in range(1, 5)
    }
    assert bundle.option("sim1", "--master_addr") == "sim3"


def test_options_of_the_spec_and_of_the_command_line_arrive(slurm: Slurm, tmp_path: Path) -> None:
    text = 'a "b" # $HOME `c`'
    given: dict[str, str | bool] = {"comment": text, "time": "1-02:00:00", "partition": "none-such", "requeue": True}
    bundle = Bundle(tmp_path, cluster=replace(CLUSTER, slurm=given))
    command = ["--partition=gpu", bundle.script, "--export=ALL,MARK=from srun"]
    job = slurm.wait(slurm.submit(*command, cwd=tmp_path, env=bundle.environment()))
    done_well(job)
    assert job.details["Comment"].strip() == text
    assert (job.details["TimeLimit"], job.details["Partition"], job.details["Requeue"]) == ("1-02:00:00", "gpu", "1")
    assert bundle.env("sim2")["MARK"] == "from srun"


def test_a_node_that_fails_ends_the_others_and_the_job_has_its_code(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path)
    env = bundle.environment(WORK_S="300", FAILING="sim3")
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=env))
    assert (job.state, job.exit_code) == ("FAILED", "7:0"), job.output
    assert "task 2: Exited with exit code 7" in job.output
    assert sorted(path.parent.name for path in bundle.probe.glob("*/ended")) == ["sim1", "sim2", "sim4"]
    assert "0: ended by SIGTERM" in job.output
    assert bundle.alive() == []
    assert job.details["Requeue"] == "1"  # only for a lost machine: a job that fails by itself is not restarted


def test_a_script_that_dies_of_the_signal_first_does_not_hide_the_code_of_the_node_that_failed(
    slurm: Slurm, tmp_path: Path
) -> None:
    bundle = Bundle(tmp_path, SIGNALLED_PYTHON)
    (tmp_path / "env/sleep").write_text(SIGNALLED_SLEEP)
    (tmp_path / "env/sleep").chmod(0o755)
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment()))
    assert (job.state, job.exit_code) == ("FAILED", "7:0"), job.output
    assert bundle.alive() == []


def test_secrets_reach_the_tasks_and_a_missing_one_ends_the_job_with_a_line(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster=replace(CLUSTER, secrets=("HF_TOKEN",)))
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment()))
    assert (job.state, job.exit_code) == ("FAILED", "2:0"), job.output
    assert "job.sbatch: HF_TOKEN is not set; export it in the shell that calls sbatch" in job.output
    done_well(slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment(HF_TOKEN="hf a'b"))))
    assert {bundle.env(f"sim{n}")["HF_TOKEN"] for n in range(1, 5)} == {"hf a'b"}


def test_a_node_that_lacks_something_ends_the_job_with_its_line(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path)
    shutil.rmtree(bundle.path / "models")
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment()))
    assert (job.state, job.exit_code) == ("FAILED", "2:0"), job.output
    assert re.search(r"^\d: node-0\d\.sh: no model in models/", job.output, re.MULTILINE)
    assert bundle.ranks() == {}


# Prints much and fails, or dies by any signal.
LOUD_PYTHON = r"""#!/bin/bash
if [[ "$1" == - || "$1" == -c ]]; then exit 0; fi
mkdir "$PROBE/$SLURMD_NODENAME"
echo "$$" > "$PROBE/$SLURMD_NODENAME/pids"
if [[ "$SLURMD_NODENAME" == sim3 ]]; then
  while (($(ls -d "$PROBE"/*/pids | wc -l) < 4)); do sleep 0.02; done
  printf 'line %s\n' {1..20000}
  exit 7
fi
exec sleep 300
"""


def test_all_that_a_failed_node_said_arrives_though_the_others_are_killed(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, LOUD_PYTHON)
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment()))
    assert (job.state, job.exit_code) == ("FAILED", "7:0"), job.output[-2000:]
    assert [line for line in job.output.splitlines() if line.startswith("2: line")] == [
        f"2: line {number}" for number in range(1, 20001)
    ]
    assert bundle.alive() == []


def test_scancel_leaves_nothing_running(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path)
    number = slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment(WORK_S="300"))
    bundle.wait_for_tasks(4)
    assert len(bundle.alive()) == 8
    slurm.run("scancel", number)
    job = slurm.wait(number)
    assert job.state == "CANCELLED"
    assert len(list(bundle.probe.glob("*/ended"))) == 4
    assert bundle.alive() == []


def test_a_job_of_another_size_says_so(slurm: Slurm, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path)
    job = slurm.wait(slurm.submit("--nodes=2", bundle.script, cwd=tmp_path, env=bundle.environment()))
    assert (job.state, job.exit_code) == ("FAILED", "2:0")
    assert job.output.startswith("job.sbatch: the plan is for 4 nodes, but the job has 2; submit it with --nodes=4")


def test_the_environment_of_a_login_node_that_exports_nothing_is_not_needed(slurm: Slurm, tmp_path: Path) -> None:
    """Sites set SBATCH_EXPORT=NONE; the job script's own environment must still reach the tasks."""
    bundle = Bundle(tmp_path)
    text = (bundle.path / JOB_SCRIPT).read_text()
    exports = f'export PATH="{tmp_path}/env:$PATH" PROBE="{bundle.probe}"\nset -euo pipefail\n'
    (bundle.path / JOB_SCRIPT).write_text(text.replace("set -euo pipefail\n", exports, 1))
    env = {"SBATCH_EXPORT": "NONE", "SHELL": os.environ.get("SHELL", "/bin/sh")}
    done_well(slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=env)))
    assert len(bundle.ranks()) == 4


LAUNCHER = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
probe = pathlib.Path(os.environ["PROBE"], f"rank-{dist.get_rank()}")
probe.mkdir()
(probe / "sum").write_text(str(total.item()))
(probe / "pids.new").write_text(f"{os.getpid()} {os.getppid()}")
(probe / "pids.new").rename(probe / "pids")
dist.barrier()
if dist.get_rank() == 2:
    raise SystemExit(3)
time.sleep(300)
"""


def test_a_rank_that_dies_under_a_real_torchrun_ends_all_nodes(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    cluster = replace(CLUSTER, nodes=2, gpus_per_node=2, env={"GLOO_SOCKET_IFNAME": "lo"})
    bundle = Bundle(tmp_path, f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n', cluster=cluster, tp=2)
    env = stand_in_trainer(tmp_path / "trainer", LAUNCHER)
    job = slurm.wait(slurm.submit(bundle.script, cwd=tmp_path, env=bundle.environment(**env)))
    assert [(bundle.probe / f"rank-{rank}/sum").read_text() for rank in range(4)] == ["6"] * 4, job.output
    assert (job.state, job.exit_code) == ("FAILED", "1:0"), job.output
    assert "task 1: Exited with exit code 1" in job.output
    assert bundle.alive() == []


TRIAL_PYTHON = r"""#!/bin/bash
if [[ "$1" == - || "$1" == -c ]]; then exit 0; fi
if [[ "$1" == *.py ]]; then exec REAL "$@"; fi
echo "$$" > "$PROBE/$(mktemp -u XXXXXXXX).pids"
[[ "$SLURMD_NODENAME" == sim1 ]] || { echo waiting; exec sleep 300; }
bundle=$(printf '%s\n' "$@" | grep train.yaml)
bundle=${bundle%/train.yaml}
[[ -f models/Qwen/Qwen3-8B/config.json ]] || exit 3
before=$(ls "$PROBE" | grep -c trial-)
touch "$PROBE/trial-$((before + 1))"
while (($(ls "$PROBE"/*.pids | wc -l) < 4 * (before + 1))); do sleep 0.05; done
case $before in
  0)
    printf '[rank3]: %s\n' 'Traceback (most recent call last):' '  File "a.py", line 1' 'RuntimeError: this trial fails'
    exit 7
    ;;
  1) echo "hangs"; exec sleep 300 ;;
esac
output=$(sed -n 's/^output_dir: \([^ ]*\).*/\1/p' "$bundle/train.yaml")
mkdir -p "$output"
for ((step = 1; step <= 120; step++)); do
  clock=$((60 + step))
  printf '{"current_steps": %d, "total_steps": 200, "loss": 1.5, "elapsed_time": "0:%02d:%02d"}\n' \
    "$step" $((clock / 60)) $((clock % 60)) >>"$output/trainer_log.jsonl"
  printf '\r%d%%|#| %d/200 [%02d:%02d<00:00, 1.00s/it]' "$step" "$step" $((clock / 60)) $((clock % 60))
done
echo
exec sleep 300
"""
"""Once all nodes are up, the first trial fails, the second falls silent, the third has a step of 1 s."""
TUNED = """\
name: lab
nodes: 4
gpus_per_node: 8
gpu: h100-sxm-80gb
ib_bandwidth: 400Gb/s
nics_per_node: 8
slurm: {partition: gpu, time: "1-00:00:00"}
model: Qwen/Qwen3-8B
job: {seq_len: 4096, global_batch_size: 64}
"""


def test_trials_run_one_after_another_in_one_job_and_tune_goes_on_from_them(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(TUNED)
    python = tmp_path / "env/python3"
    python.parent.mkdir()
    python.write_text(TRIAL_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    python.chmod(0o755)
    (tmp_path / "probe").mkdir()
    said = json.loads(tune(tmp_path, "--json"))
    first, submit = said["ahead"][0]["plan"], said["next"][0].split()[1]
    assert (said["why"], len(said["ahead"])) == ("queued", 3)
    fill(tmp_path / "generated/lab-trials", model="models/Qwen/Qwen3-8B")
    job_dir = (tmp_path / submit).parent
    script = (job_dir / "trials.sbatch").read_text()
    quiet = re.findall(r"^trial \S+ \S+ \S+ ([0-9]+)$", script, re.MULTILINE)
    assert len(quiet) == 3
    limits_s = iter([LIMIT_S, 10, LIMIT_S])
    shorter = re.sub(r"(?m)^(trial \S+ \S+ \S+) [0-9]+$", lambda line: f"{line[1]} {next(limits_s)}", script)
    (job_dir / "trials.sbatch").write_text(shorter)

    env = {"PATH": str(python.parent), "PROBE": str(tmp_path / "probe")}
    job = slurm.wait(slurm.submit(submit, cwd=tmp_path, env=env))
    done_well(job)
    results = {path.parent.parent.name: json.loads(path.read_text()) for path in job_dir.glob("*/trial/result.json")}
    in_order = [results[one["plan"]] for one in said["ahead"]]
    assert [one["ended"] for one in in_order] == ["itself", "hang", "steps"], job.output
    assert in_order[0]["code"] == 7
    assert 0 < in_order[2]["seconds"] < LIMIT_S
    pids = [int(path.read_text()) for path in (tmp_path / "probe").glob("*.pids")]
    assert len(pids) == 12
    assert not [pid for pid in pids if is_running(pid)]

    again = json.loads(tune(tmp_path, "--json", "--go-on"))
    trials = {one["plan"]: one for one in again["trials"]}
    assert "this trial fails" in trials[first]["why"]
    assert [one["step_s"] for one in again["trials"]] == [None, None, pytest.approx(1.0, rel=0.02)]
    assert (tmp_path / "generated/lab-trials/best/job.sbatch").exists()
    assert again["why"] == "queued"
    assert {one["plan"] for one in again["ahead"]}.isdisjoint(trials)
    assert again["next"][1] == "sbatch generated/lab-trials/job-2/trials.sbatch"

    number = slurm.submit(again["next"][1].split()[1], cwd=tmp_path, env=env)
    until = time.monotonic() + LIMIT_S
    while len(pids := list((tmp_path / "probe").glob("*.pids"))) < 16:
        assert time.monotonic() < until
        time.sleep(0.05)
    slurm.run("scancel", number)
    assert slurm.wait(number).state == "CANCELLED"
    assert not [path for path in pids if is_running(int(path.read_text()))]
    assert (tmp_path / "generated/lab-trials/job-2/over").exists()


def tune(cwd: Path, *words: str) -> str:
    command = [sys.executable, "-m", "topoplan", "tune", "lab.yaml", "--plans", "3", *words]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
