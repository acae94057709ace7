"""A private Slurm on this machine: a controller and a daemon for each node, in a temporary directory.

Needs slurmctld, slurmd, the Slurm commands and munged; on Debian `apt-get install slurmctld slurmd slurm-client munge`.
The system's own Slurm is not read, started or changed: configuration, keys, sockets and ports are separate.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES, CPUS, GPUS = 4, 4, 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
LIMIT_S = 150
"""Limit for what takes a second or a few, however slow the machine is."""
PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"

# GPUs are plain files; there are no cgroups, no accounting and no MPI plug-in. Each node has its own loopback address,
# and its name is unknown to the resolver. Time limits are those of a busy machine.
CONFIG = """\
ClusterName=topoplan
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
GresTypes=gpu
KillWait=120
BatchStartTimeout=120
DefMemPerCPU=10
"""
NODE = (
    "NodeName=sim{n} NodeHostname={host} NodeAddr=127.0.0.{n} Port={port} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}\n"
)


@dataclass(frozen=True)
class Job:
    """A finished job."""

    state: str
    exit_code: str
    """`code:signal`."""
    output: str
    details: Mapping[str, str]
    """The output of `scontrol show job` by key."""


@dataclass(frozen=True)
class Slurm:
    """Runs the commands of the Slurm in `root`."""

    root: Path

    def run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        environment = {"PATH": PATH, "HOME": "/", **(env or {}), "SLURM_CONF": f"{self.root}/slurm.conf"}
        if env and "PATH" in env:
            environment["PATH"] = f"{env['PATH']}:{PATH}"
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Submit a job and return its number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip()

    def state(self, job: str) -> str:
        return self._details(job)["JobState"]

    def wait(self, job: str, timeout_s: float = 2 * LIMIT_S) -> Job:
        """Wait until a job has ended on all nodes, and return it."""
        until = time.monotonic() + timeout_s
        while self.state(job) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") or not self.ready():
            assert time.monotonic() < until, f"job {job} did not end: {self._details(job)}"
            time.sleep(0.05)
        details = self._details(job)
        output = Path(details["StdOut"]).read_text(encoding="utf-8")
        return Job(state=details["JobState"], exit_code=details["ExitCode"], output=output, details=details)

    def ready(self) -> bool:
        """Whether all nodes are up and idle."""
        return self.run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", str(NODES)]

    def _details(self, job: str) -> dict[str, str]:
        lines = [line.strip() for line in self.run("scontrol", "show", "job", job).splitlines()]
        words = [word.partition("=") for line in lines for word in line.split()]
        # Some values take the rest of the line.
        whole = [line.partition("=") for line in lines if line.startswith(("Command=", "Comment=", "StdOut="))]
        return {key: value for key, _, value in [*words, *whole]}


@contextlib.contextmanager
def own_slurm() -> Iterator[Slurm]:
    """Start a private Slurm, and end all of its processes. Skip the test if Slurm is not installed."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    # The path of a socket has to be short.
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    root.chmod(0o755)
    for name in ("state", "spool", "log", "dev"):
        (root / name).mkdir()
    slurm, daemons = Slurm(root), []
    try:
        _configure(root)
        munged = ["munged", "--foreground", "--force", f"--key-file={root}/key", f"--socket={root}/munge.sock"]
        munged += [f"--pid-file={root}/munged.pid", f"--log-file={root}/log/munged", f"--seed-file={root}/seed"]
        commands = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"sim{n}"] for n in range(1, NODES + 1))]
        until = time.monotonic() + LIMIT_S
        for command in commands:
            daemons.append(_start(root, command))
            while command is munged and not (root / "munge.sock").exists():
                assert time.monotonic() < until, _logs(root)
                time.sleep(0.02)
        while not _answers(slurm):
            assert all(daemon.poll() is None for daemon in daemons), _logs(root)
            assert time.monotonic() < until, _logs(root)
            time.sleep(0.05)
        yield slurm
    finally:
        with contextlib.suppress(Exception):  # left running by a failed test
            slurm.run("scancel", "--signal=KILL", f"--user={getpass.getuser()}")
            time.sleep(0.5 if slurm.run("squeue", "--noheader") else 0)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path) -> None:
    key = root / "key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o600)
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + NODES)
    text = CONFIG.format(host=host, ports=ports, user=getpass.getuser(), root=root)
    for n in range(1, NODES + 1):
        text += NODE.format(n=n, host=host, port=ports[n], cpus=CPUS, gpus=GPUS)
    (root / "slurm.conf").write_text(text + "PartitionName=gpu Nodes=ALL Default=YES State=UP\n")
    (root / "cgroup.conf").write_text("")
    for gpu in range(GPUS):
        (root / f"dev/gpu{gpu}").touch()
    (root / "gres.conf").write_text(f"Name=gpu File={root}/dev/gpu[0-{GPUS - 1}]\n")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _start(root: Path, command: list[str]) -> subprocess.Popen[bytes]:
    environment = {"PATH": PATH, "HOME": "/", "SLURM_CONF": f"{root}/slurm.conf"}
    with (root / "log/started").open("ab") as log:
        return subprocess.Popen(command, env=environment, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _answers(slurm: Slurm) -> bool:
    try:
        return slurm.ready()
    except AssertionError:
        return False


def _logs(root: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((root / "log").iterdir()))
