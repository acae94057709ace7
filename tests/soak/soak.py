"""Short jobs on real sshd hosts, with faults drawn at random: after each, nothing may be left on any host.

    make soak                              or: python tests/soak/soak.py --runs 200 --seed N
    python tests/soak/soak.py --seed N --only 17       repeats run 17 of that seed
    python tests/soak/soak.py --faults offline,cut     only faults with these words in their names

Each run is a `python -m topoplan launch` process on four hosts in network namespaces, with a stand-in for the trainer.
Checked are the exit code, the node that is blamed, and the processes on all hosts, after `runs stop` from another
process if the client was killed or a host was out of reach. The exit code is 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and its tests

from tests.bed.bed import Bed, Hiding, Machine, probe, under_way
from tests.bed.jobs import NAMES, Hosts, hosts_of
from tests.bundle.samples import QWEN3_8B
from tests.bundle.test_node_script import fill

LIMIT_S = 180.0
"""Time limit for one launch: a hang is a violation too."""
GONE_S = 10.0
"""Time for the last process to end."""
WAITS = ("bash --norc -c read -r -t 60 ", "bash --norc -s", "timeout 120 tar ", "tar ")
WAITS_S = 130.0
"""Time for a shell or an upload whose client went away early; it waits for the rest, but not for ever."""
BEGUN = ': > "${BASH_SOURCE[0]}.begun"\n'
LONG = BEGUN + "sleep 600"
INTERRUPTED = (130, -signal.SIGINT)
"""Before the program is loaded, Python ends by the signal; a shell shows 130 for both."""


def last_lines(file: Path, count: int = 8) -> list[str]:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 2**18))
        return stream.read().decode(errors="replace").splitlines()[-count:]


def stacks(pid: int) -> str:
    """Return where the threads of a process are, for a report."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if spy is None:
        return "py-spy is not installed"
    done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def states(hosts: Hosts, name: str) -> dict[str, str]:
    """Return the processes of a host, each with the state in which the kernel has it: T is stopped."""
    found = {}
    for pid, words in hosts.bed.processes(name).items():
        with contextlib.suppress(OSError):
            found[f"{pid} {words}"] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return found


class Client:
    """A launch as a user makes it."""

    def __init__(self, hosts: Hosts, *options: str) -> None:
        self.hosts = hosts
        self.output = hosts.root / "client.out"
        self.started_s = time.monotonic()
        self.stuck_in = ""
        with self.output.open("wb") as out:
            self.process = hosts.client("--grace", "1", *options, "--json", stdout=out)

    def wait(self) -> int | None:
        """Return the exit code; None if the client hangs, which is then ended, and whose stacks are kept."""
        try:
            return self.process.wait(max(0.1, self.started_s + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stuck_in = stacks(self.process.pid)
            self.process.kill()
            self.process.wait()
            return None

    def begun(self, *, detached: bool = False) -> bool:
        """Wait until the job runs on all hosts; return False if the client ended first and did not detach."""
        marks = [self.hosts.root / name / "does.begun" for name in NAMES]
        while not all(mark.exists() for mark in marks):
            has_ended = self.process.poll() is not None and not detached
            if has_ended or time.monotonic() > self.started_s + LIMIT_S:
                return False
            time.sleep(0.01)
        return True

    def says(self, words: str) -> None:
        """Wait until the client has printed these words, or has ended."""
        while words not in self.output.read_text(errors="replace") and self.process.poll() is None:
            time.sleep(0.02)

    def said(self) -> dict[str, Any]:
        """The client's last line, on how the run ended."""
        for line in reversed(last_lines(self.output, 50)):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
        return {}

    def running(self) -> bool:
        """Whether the client said at its end that something may still be running."""
        return any('"event": "end"' in line and json.loads(line)["running"] for line in last_lines(self.output, 50))

    def blamed(self) -> str | None:
        """The node that failed first, or that kept the launch from going on."""
        for line in reversed(last_lines(self.output, 50)):
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                said = json.loads(line)
                if said.get("failure"):
                    return str(said["failure"]["node"])
                if said.get("errors"):
                    return str(next(iter(said["errors"])))
        return None

    def failure(self, key: str) -> object:
        """Return what the report says of the first failure."""
        said = json.loads(last_lines(self.output, 1)[0])
        return (said["failure"] or {}).get(key)


@dataclass
class Result:
    """The result of one run."""

    fault: str
    violations: list[str] = field(default_factory=list)
    took_s: float = 0.0
    orphans: int = 0

    def check(self, what: str, found: object, *expected: object) -> None:
        if found not in expected:
            self.violations.append(f"{what} is {found!r} and not {' or '.join(map(repr, expected))}")


@dataclass
class Draw:
    """What a fault has at its disposal."""

    hosts: Hosts
    chance: random.Random
    result: Result
    index: int = 0

    def victim(self) -> tuple[str, str]:
        """Return a host and the name of its node."""
        place = self.chance.randrange(len(NAMES))
        return NAMES[place], f"node-{place:02d}"

    def ends(self, client: Client, *codes: int, blamed: str | None = None) -> None:
        """Check that the client ends with one of these codes, and blames this node."""
        self.result.check("the exit code", client.wait(), *codes)
        self.result.check("the node that is blamed", client.blamed(), blamed)
        if client.stuck_in:
            self.result.violations.append(f"the client hangs:\n{client.stuck_in}")

    def state(self) -> str | None:
        """State of the run in its record."""
        found = list((self.hosts.state / "topoplan" / "runs").glob("*/run.json"))
        return str(json.loads(found[0].read_text())["state"]) if found else None

    def stop_from_another(self) -> None:
        """Run `topoplan runs stop` in a new process, if there is a run to stop."""
        end_s = time.monotonic() + GONE_S
        while any(under_way(self.hosts.bed, name) for name in NAMES) and time.monotonic() < end_s:
            time.sleep(0.05)  # lets messages that are under way reach the hosts
        command = [sys.executable, "-m", "topoplan"]
        for attempt in ("runs", "stop"):
            options = ["--json"] if attempt == "runs" else ["last", "--grace", "1"]
            done = subprocess.run(
                [*command, attempt, *options], env=self.hosts.environment(), capture_output=True, timeout=120
            )
            if attempt == "runs" and not list((self.hosts.state / "topoplan" / "runs").glob("*/run.json")):
                return
            if done.returncode != 0:
                self.result.violations.append(f"topoplan {attempt}: {done.stderr.decode(errors='replace')[-300:]}")


def none(draw: Draw) -> None:
    draw.hosts.does(BEGUN + f"echo up; sleep {draw.chance.uniform(0, 1):.2f}")
    draw.ends(Client(draw.hosts), 0)


def exit_code(draw: Draw) -> None:
    name, node = draw.victim()
    code = draw.chance.randint(1, 100)
    draw.hosts.does(LONG, **{name: BEGUN + f"echo boom; sleep {draw.chance.uniform(0, 1.5):.2f}; exit {code}"})
    draw.ends(Client(draw.hosts), code, blamed=node)


def rank_killed(draw: Draw) -> None:
    """One of two ranks is killed; the agent sees it, ends the other and fails, as torchrun does."""
    name, node = draw.victim()
    agent = (
        BEGUN + "sleep 600 & a=$!; sleep 600 & b=$!\n"
        f"(sleep {draw.chance.uniform(0, 1):.2f}; kill -KILL $a) &\n"
        "wait $a; code=$?; kill $b; echo rank 0 ended with $code; exit 1"
    )
    draw.hosts.does(LONG, **{name: agent})
    draw.ends(Client(draw.hosts), 1, blamed=node)


def script_killed(draw: Draw) -> None:
    name, node = draw.victim()
    script = BEGUN + f"sleep 600 & sleep {draw.chance.uniform(0, 1):.2f}; kill -KILL $$"
    draw.hosts.does(LONG, **{name: script})
    draw.ends(Client(draw.hosts), 137, blamed=node)


def all_killed(draw: Draw) -> None:
    """All processes of the job on a host are killed, as when the kernel reclaims memory; nothing can report it."""
    name, node = draw.victim()
    draw.hosts.does(LONG)
    client = Client(draw.hosts)
    client.begun()
    time.sleep(draw.chance.uniform(0, 0.5))
    for pid, line in draw.hosts.bed.processes(name).items():
        if not line.startswith(("sshd", "tail ", "bash --norc")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    draw.ends(client, 1, blamed=node)


def deaf_to_sigterm(draw: Draw) -> None:
    name, node = draw.victim()
    draw.hosts.does(BEGUN + "trap '' TERM; while :; do sleep 0.2; done", **{name: BEGUN + "sleep 0.5; exit 7"})
    draw.ends(Client(draw.hosts), 7, blamed=node)


def daemons(draw: Draw) -> None:
    """Ranks leave processes behind in sessions of their own, as data loader workers may."""
    name, node = draw.victim()
    leave = BEGUN + "setsid sleep 600 & (setsid sleep 600 &) ; nohup sleep 600 >/dev/null 2>&1 &\n"
    draw.hosts.does(leave + "sleep 600", **{name: leave + "sleep 0.5; exit 9"})
    draw.ends(Client(draw.hosts), 9, blamed=node)


def cut(draw: Draw) -> None:
    """A host is dead: its peers lose it too, or hang and the user has set a limit for that."""
    name, node = draw.victim()
    address = draw.hosts.bed[name].address
    options: list[str] = []
    if draw.chance.random() < 0.5:
        reach = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{address}/22' 2>/dev/null"
        lost = f"sleep {draw.chance.uniform(0, 10):.2f}; echo 'Connection closed by peer [{address}]:4271'; exit 1"
        draw.hosts.does(BEGUN + f"while {reach}; do sleep 0.5; done; {lost}", **{name: LONG})
    else:
        draw.hosts.does(LONG)
        options = ["--lost-host-after", f"{draw.chance.uniform(2, 10):.1f}s"]
    client = Client(draw.hosts, *options)
    client.begun()
    time.sleep(draw.chance.uniform(0, 0.5))
    draw.hosts.bed.cut(name)
    try:
        draw.ends(client, 1, blamed=node)
    finally:
        draw.hosts.bed.heal(name)
    draw.stop_from_another()


def cut_that_heals(draw: Draw) -> None:
    name, _ = draw.victim()
    draw.hosts.does(BEGUN + "for ((i = 0; i < 80; i++)); do echo line $i; sleep 0.1; done")
    client = Client(draw.hosts)
    client.begun()
    draw.hosts.bed.cut(name)
    healed = threading.Timer(draw.chance.uniform(0.5, 6), draw.hosts.bed.heal, [name])
    healed.start()
    draw.ends(client, 0)
    healed.join()


def frozen(draw: Draw) -> None:
    name, node = draw.victim()
    draw.hosts.does(LONG)
    client = Client(draw.hosts, "--lost-host-after", f"{draw.chance.uniform(2, 8):.1f}s")
    client.begun()
    with draw.hosts.bed.frozen(name):
        draw.ends(client, 1, blamed=node)
        if draw.result.violations:
            draw.result.violations.append(f"on {name}: {states(draw.hosts, name)}")
    draw.stop_from_another()


def out_of_sight(draw: Draw, *hidden: str) -> None:
    """The client does not see some hosts for a while, but their peers do.

    The job ends meanwhile or afterwards: well, or because a node fails, with or without its peers.
    """
    name, node = draw.victim()
    hidden_s = 5 + 115 * draw.chance.random() ** 4  # 5 to 120, half of them below 13
    sleep = f"sleep {draw.chance.uniform(0.2, hidden_s + 8):.2f}"
    how, end = draw.chance.choice(get_args(Hiding)), draw.chance.choice(("well", "alone", "together"))
    code, failed = draw.chance.randint(2, 100), draw.hosts.root / "failed"
    done = [draw.hosts.root / one / "does.done" for one in NAMES]
    for mark in (*done, failed):
        mark.unlink(missing_ok=True)
    if end == "well":
        draw.hosts.does(BEGUN + f'{sleep}; : > "${{BASH_SOURCE[0]}}.done"')
    else:
        follows = f"until [ -e {failed} ]; do sleep 0.1; done; sleep 1; echo 'Connection closed by peer'; exit 1"
        others = LONG if end == "alone" else BEGUN + follows
        draw.hosts.does(others, **{name: BEGUN + f"{sleep}; echo boom; : > {failed}; exit {code}"})
    client = Client(draw.hosts)
    client.begun()
    time.sleep(draw.chance.uniform(0, 0.5))
    # A failure that is seen elsewhere ends the run earlier.
    with draw.hosts.bed.hidden(*hidden, how=how), contextlib.suppress(subprocess.TimeoutExpired):
        client.process.wait(hidden_s)
    if end == "well":
        draw.ends(client, 0)
        draw.result.check("hosts on which the job came to its end", sum(mark.exists() for mark in done), len(NAMES))
        return
    draw.ends(client, *((code,) if name not in hidden or end == "alone" else (code, 1)), blamed=node)
    if client.running():
        # For a host out of sight until the end, the exit code is unknown, and nobody has stopped what runs there.
        draw.result.check("what may run on after all hosts were seen", len(hidden) < len(NAMES), True)
        draw.stop_from_another()
    elif len(hidden) == len(NAMES):
        draw.result.check("the state in the record", draw.state(), "failed")


def offline(draw: Draw) -> None:
    out_of_sight(draw, *NAMES)


def one_invisible(draw: Draw) -> None:
    name, _ = draw.victim()
    out_of_sight(draw, name)


def offline_interrupt(draw: Draw) -> None:
    """Ctrl-C while no host can be reached; nothing may claim that the run was stopped."""
    draw.hosts.does(LONG)
    client = Client(draw.hosts)
    client.begun()
    with draw.hosts.bed.hidden(how=draw.chance.choice(get_args(Hiding))):
        time.sleep(draw.chance.uniform(0, 12))
        client.process.send_signal(signal.SIGINT)
        asked_s = time.monotonic()
        draw.result.check("the exit code", client.wait(), *INTERRUPTED)
        draw.result.check("that it left within 30 s", time.monotonic() - asked_s < 30, True)
        draw.result.check("the state in the record", draw.state(), "starting", "running")
    draw.stop_from_another()
    draw.result.check("the state in the record", draw.state(), "stopped")


BESIDE = """\
exec 9>"{root}/$HOSTNAME.rank"
flock -n 9 || echo an old rank lives on $HOSTNAME >>"{root}/beside"
"""
"""Every process of a job holds the lock, wherever it goes, so that a second start beside it is noticed."""
ENDED_BY_ITSELF_S = 60.0
"""Time for the other hosts to end their nodes while nobody watches."""


def ends_by_itself(draw: Draw, victim: str) -> None:
    """Check that without a watcher the nodes end, each naming the one that failed first."""
    end_s = time.monotonic() + ENDED_BY_ITSELF_S
    while (left := draw.hosts.jobs()) and time.monotonic() < end_s:
        time.sleep(0.1)
    draw.result.check("what runs on by itself", left, {})
    for place, name in enumerate(NAMES):
        for file in draw.hosts.workdir(name).glob("topoplan-runs*/*/*/.topoplan/stopped"):
            said = file.read_text().split()[0]
            draw.result.check(f"for whom node-{place:02d} was ended", said, victim)


def watcher_killed(draw: Draw) -> None:
    """The client is killed, then a node fails: its script, a signal to it, or all its processes. Or it ends well."""
    name, node = draw.victim()
    how = draw.chance.choice(("code", "killed", "all killed", "well", "launch detached"))
    trigger = draw.hosts.root / "trigger"
    trigger.unlink(missing_ok=True)
    wait = BEGUN + f"setsid sleep 600 & until [ -e {trigger} ]; do sleep 0.05; done; kill $!; "
    end = {"code": "exit 7", "killed": "kill -KILL $$", "launch detached": "exit 8", "all killed": "sleep 600"}.get(how)
    if end is None:
        draw.hosts.does(BEGUN + "sleep 8", **{name: wait + "exit 0"})
    else:
        draw.hosts.does(LONG, **{name: wait + end})
    client = Client(draw.hosts, *(["--detach"] if how == "launch detached" else []))
    if how == "launch detached":
        draw.result.check("the exit code", client.wait(), 0)
    else:
        draw.result.check("what had begun", client.begun(), True)
        time.sleep(draw.chance.uniform(0, 0.5))
        client.process.kill()
        client.wait()
    time.sleep(draw.chance.uniform(0, 1))
    if draw.chance.random() < 0.3:
        # All others are connected to it once the job runs. Killed earlier, it cannot be told from a node that is ended
        # before its script began.
        draw.result.check("what had begun", client.begun(detached=how == "launch detached"), True)
        kill_supervisor(draw, NAMES[0])
    if how == "all killed":
        kill_all(draw.hosts, name)
    trigger.touch()
    ends_by_itself(draw, node)
    stopped = [file for one in NAMES for file in draw.hosts.workdir(one).glob("topoplan-runs*/*/*/.topoplan/stopped")]
    draw.result.check("how many were ended for it", len(stopped), 0 if how == "well" else len(NAMES) - 1)


def client_told_to_end(draw: Draw) -> None:
    """SIGTERM to the client: its last line says that the run goes on, and it does; or the run is stopped with it."""
    along = draw.chance.random() < 0.5
    draw.hosts.does(LONG)
    client = Client(draw.hosts, *(["--stop-on-exit"] if along else []))
    draw.result.check("what had begun", client.begun(), True)
    time.sleep(draw.chance.uniform(0, 1))
    client.process.terminate()
    draw.result.check("the exit code", client.wait(), 143)
    # Before all hosts have confirmed their start, there is nothing to leave running.
    ends = ("interrupted",) if along else ("left", "interrupted")
    draw.result.check("how it says that it ended", client.said().get("end"), *ends)
    if client.said().get("end") == "left":
        draw.result.check("where the job runs", set(draw.hosts.jobs()), set(NAMES))
        draw.stop_from_another()


def rebooted(draw: Draw) -> None:
    """A host is rebooted, and its sshd returns after a while; with retries the run is then restarted."""
    name, node = draw.victim()
    retries = draw.chance.random() < 0.6
    first = '[ -e "${BASH_SOURCE[0]}.first" ] || { : > "${BASH_SOURCE[0]}.first"; sleep 600; }\n'
    draw.hosts.does(BESIDE.format(root=draw.hosts.root) + BEGUN + first)
    client = Client(draw.hosts, *(["--retries", "2"] if retries else []))
    draw.result.check("what had begun", client.begun(), True)
    time.sleep(draw.chance.uniform(0, 0.5))
    draw.hosts.bed.reboot(name, draw.chance.choice((0.0, draw.chance.uniform(1, 30))))
    if retries:
        if draw.chance.random() < 0.3:
            client.says("restarting the run")
            draw.hosts.bed.reboot(name, draw.chance.uniform(1, 10))
        draw.result.check("the exit code", client.wait(), 0)
        attempts = client.said().get("attempts") or []
        draw.result.check("who failed in the attempts", {one["node"] for one in attempts}, {node})
    else:
        # Its processes end one after the other: the job's first process may still record how the script ended.
        draw.ends(client, 1, 137, blamed=node)


def started_again(draw: Draw) -> None:
    """Ranks are killed, one to three times, on the same host or others; the rest may ignore signals."""
    times, retries = draw.chance.randint(1, 3), draw.chance.randint(0, 3)
    victims = [draw.victim() for _ in range(times)]
    deaf = draw.chance.choice(("", "trap '' TERM; "))
    left = "setsid sleep 600 & (nohup sleep 600 >/dev/null 2>&1 &)\n"
    lines = []
    for index, (name, _) in enumerate(victims):
        after = draw.chance.uniform(0, 1)
        mine = f'[ "$HOSTNAME" = {name} ] && {{ sleep {after:.2f}; kill -KILL $$; }}'
        mark = f'"${{BASH_SOURCE[0]}}.{index}"'
        lines.append(f"[ -e {mark} ] || {{ : > {mark}; {mine}; sleep 600; }}")
    draw.hosts.does(BESIDE.format(root=draw.hosts.root) + BEGUN + deaf + left + "\n".join(lines))
    client = Client(draw.hosts, "--retries", str(retries))
    enough = retries >= times
    draw.result.check("the exit code", client.wait(), 0 if enough else 137)
    attempts = [one["node"] for one in client.said().get("attempts") or []]
    draw.result.check("who failed in the attempts", attempts, [node for _, node in victims][: min(times, retries)])
    draw.result.check("the node that is blamed", client.blamed(), None if enough else victims[retries][1])
    if enough:
        draw.stop_from_another()  # ends what they left running after a good end


def not_worth_it(draw: Draw) -> None:
    name, node = draw.victim()
    words = draw.chance.choice(("CUDA out of memory", "No space left on device", "KeyError: 'text'"))
    draw.hosts.does(BESIDE.format(root=draw.hosts.root) + LONG, **{name: BEGUN + f'sleep 0.3; echo "{words}"; exit 1'})
    client = Client(draw.hosts, "--retries", "3")
    draw.ends(client, 1, blamed=node)
    draw.result.check("how often it was started again", len(client.said().get("attempts") or []), 0)


def client_signal(number: signal.Signals) -> Callable[[Draw], None]:
    def fault(draw: Draw) -> None:
        draw.hosts.does(LONG)
        client = Client(draw.hosts)
        # Anywhere from its first instruction to the middle of the run.
        if draw.chance.random() < 0.4:
            client.begun()
        else:
            time.sleep(draw.chance.uniform(0, 4))
        time.sleep(draw.chance.uniform(0, 0.3))
        client.process.send_signal(number)
        if number is signal.SIGINT:
            draw.result.check("the exit code", client.wait(), *INTERRUPTED)
            return
        draw.result.check("the exit code", client.wait(), -number, 128 + number)
        draw.stop_from_another()

    return fault


def two_interrupts(draw: Draw) -> None:
    """The second Ctrl-C leaves immediately; what could not be stopped until then is stopped by another client."""
    draw.hosts.does(LONG)
    client = Client(draw.hosts)
    client.begun()
    client.process.send_signal(signal.SIGINT)
    time.sleep(draw.chance.uniform(0, 1))
    client.process.send_signal(signal.SIGINT)
    draw.result.check("the exit code", client.wait(), *INTERRUPTED)
    draw.stop_from_another()


def client_asleep(draw: Draw) -> None:
    """A laptop is closed and opened again; meanwhile a node fails, or nothing happens."""
    name, node = draw.victim()
    well, after = draw.chance.random() < 0.4, draw.chance.uniform(0.5, 20)
    writes = BEGUN + f"for ((i = 0; i < {10 * after:.0f}; i++)); do echo line $i; sleep 0.1; done; "
    draw.hosts.does(writes if well else LONG, **{name: writes + ("" if well else "echo boom; exit 5")})
    client = Client(draw.hosts)
    draw.result.check("what had begun", client.begun(), True)
    client.process.send_signal(signal.SIGSTOP)
    time.sleep(draw.chance.uniform(2, 40))
    client.process.send_signal(signal.SIGCONT)
    draw.ends(client, 0) if well else draw.ends(client, 5, blamed=node)


def disk_full(draw: Draw) -> None:
    """The log is on the full disk too, so that no line says what happened."""
    name, node = draw.victim()
    prints = f"{sys.executable} -c 'for i in range(10**6): print(\"a line of a trainer\", i)'"
    fills, code = draw.chance.choice(
        [
            ("yes topoplan | head -c 3000000 || exit 5", 5),
            ("head -c 3000000 /dev/zero >more || exit 6", 6),
            (prints, 120),
        ]
    )
    draw.hosts.does(LONG, **{name: f"{BEGUN}{fills}\nexit $?"})
    with small_disk(draw.hosts, name) as workdir:
        fill(workdir, model=f"models/{QWEN3_8B.name}")
        client = Client(draw.hosts)
        draw.ends(client, code, 1, blamed=node)
        draw.result.check("the kind of failure", client.failure("kind"), "disk-full")


STEP = 'echo "[default0]:  5%|## | $i/9999 [00:01<59:00, 1.00s/it]"'
RANK_PY = """
import sys, time
def all_reduce(): time.sleep(600)
def wait_for_data(): time.sleep(600)
wait_for_data() if sys.argv[1:] == ["hangs"] else all_reduce()
"""
"""In a file that is named like torch's own; py-spy shows where the rank is."""


def hang(draw: Draw) -> None:
    """A rank hangs, and all others wait for it; without py-spy nothing tells which one it is."""
    name, node = draw.victim()
    hung = 2 * NAMES.index(name) + draw.chance.randrange(2)
    spy, program = shutil.which("py-spy"), draw.hosts.root / "distributed_c10d.py"
    program.write_text(RANK_PY)
    for place, host in enumerate(NAMES):
        link = draw.hosts.root / host / "venv" / "bin" / "py-spy"
        if spy is not None and not link.exists():
            link.symlink_to(spy)
        ranks = "".join(
            f"RANK={rank} {sys.executable} {program} {'hangs' if rank == hung else ''} &\n"
            for rank in (2 * place, 2 * place + 1)
        )
        steps = draw.chance.randint(0, 8)
        draw.hosts.does_on(host, f"{BEGUN}for ((i = 1; i <= {steps}; i++)); do {STEP}; sleep 0.2; done\n{ranks}wait")
    client = Client(draw.hosts, "--hang-after", f"{draw.chance.uniform(3, 8):.1f}s")
    draw.ends(client, 1, blamed=node) if spy else draw.result.check("the exit code", client.wait(), 1)
    draw.result.check("the kind of failure", client.failure("kind"), "hang")
    draw.result.check("the rank", client.failure("rank"), hung, *(() if spy else (None,)))


def cannot_run(draw: Draw) -> None:
    """A rank was stopped or killed without a supervisor, or a node left early: visible without py-spy."""
    name, node = draw.victim()
    left = draw.chance.random() < 0.3
    hung = 2 * NAMES.index(name) + draw.chance.randrange(2)
    steps = f"for ((i = 1; i <= {draw.chance.randint(1, 8)}; i++)); do {STEP}; sleep 0.2; done\n"
    for place, host in enumerate(NAMES):
        ranks = "".join(f"RANK={rank} sleep 600 &\n" for rank in (2 * place, 2 * place + 1))
        end = "exit 0\n" if left and host == name else ranks
        how = draw.chance.choice(("STOP", "KILL"))
        stop = f"sleep 1; kill -{how} %{hung % 2 + 1}; exec sleep 600\n" if not left and host == name else ""
        draw.hosts.does_on(host, f"set -m\n{BEGUN}{steps}{end}{stop}wait")
    draw.ends(Client(draw.hosts, "--hang-after", f"{draw.chance.uniform(3, 8):.1f}s"), 1, blamed=node)
    client = draw.hosts.root / "client.out"
    said = json.loads(last_lines(client, 1)[0])["failure"]
    draw.result.check("the kind of failure", said["kind"], "hang")
    draw.result.check("the rank", said["rank"], None if left else hung)


def pauses(draw: Draw) -> None:
    """Nothing is wrong: each step comes in time."""
    waits = "; ".join(f"i={i}; {STEP}; sleep {draw.chance.uniform(0, 4):.2f}" for i in range(1, 6))
    draw.hosts.does(BEGUN + "sleep 15", **{draw.victim()[0]: BEGUN + waits})
    draw.ends(Client(draw.hosts, "--hang-after", "14s"), 0)


def quiet_but_writing(draw: Draw) -> None:
    """A checkpoint takes longer than a hang may: files grow, and the run is not ended."""
    name, _ = draw.victim()
    write = "for ((k = 0; k < 50; k++)); do head -c 2000000 /dev/zero >>saved; sleep 0.3; done; rm saved"
    step = f"i=1; {STEP}; "
    draw.hosts.does(BEGUN + step + "sleep 16", **{name: f"{BEGUN}{step}{write}"})
    draw.ends(Client(draw.hosts, "--hang-after", f"{draw.chance.uniform(4, 8):.1f}s"), 0)


def supervisor_killed(draw: Draw) -> None:
    """The supervisor alone is killed, on one host: no healthy job is ended, and failures are still noticed."""
    name, node = draw.victim()
    well = draw.chance.random() < 0.5
    draw.hosts.does(BEGUN + "sleep 30" if well else LONG, **{name: BEGUN + f"sleep 30; exit {0 if well else 6}"})
    client = Client(draw.hosts)
    draw.result.check("what had begun", client.begun(), True)
    kill_supervisor(draw, draw.chance.choice(NAMES))
    draw.ends(client, 0) if well else draw.ends(client, 6, blamed=node)


def kill_supervisor(draw: Draw, name: str) -> None:
    for pid, line in draw.hosts.bed.processes(name).items():
        if " -I -c import json" in line:
            os.kill(pid, signal.SIGKILL)


def packets_lost(draw: Draw) -> None:
    """Every third packet is lost in both directions between the client and all hosts, from the start or later."""
    name, node = draw.victim()
    lines, well = draw.chance.randint(20, 120), draw.chance.random() < 0.5
    writes = BEGUN + f"for ((i = 0; i < {lines}; i++)); do echo line $i; sleep 0.1; done; "
    draw.hosts.does(writes if well else LONG, **{name: writes + ("" if well else "echo boom; exit 5")})
    client = Client(draw.hosts)
    if draw.chance.random() < 0.6:
        draw.result.check("what had begun", client.begun(), True)
    else:
        client.says("uploading the bundle")
    with draw.hosts.bed.hidden(how="lossy"):
        draw.ends(client, 0) if well else draw.ends(client, 5, blamed=node)
    if client.running():
        draw.stop_from_another()


def dropped(draw: Draw) -> None:
    """Connections end at some step of the launch: what was under way is repeated, and nothing is started twice."""
    hosts = draw.hosts
    hosts.does(BESIDE.format(root=hosts.root) + BEGUN + "sleep 3")
    client = Client(hosts)
    client.says(draw.chance.choice(("connecting", "uploading the bundle", "starting 4 hosts", "running on")))
    time.sleep(draw.chance.uniform(0, 0.3))
    for name in draw.chance.sample(NAMES, draw.chance.randint(1, len(NAMES))):
        hosts.bed.end_sessions(name)
    draw.ends(client, 0)


TIMED_OUT = (
    "[rank{rank}]:[E602 11:17:52.3 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=2847, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600080 ms",
    "[rank{rank}]: RuntimeError: [unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
)


def timed_out(draw: Draw) -> None:
    """A rank hangs until the collectives of the other ranks time out, one shortly after the other."""
    name, node = draw.victim()
    hung = 2 * NAMES.index(name) + draw.chance.randrange(2)
    text = draw.chance.choice(TIMED_OUT)
    for place, host in enumerate(NAMES):
        said = "".join(
            f"sleep {draw.chance.uniform(0, 0.3):.2f}; echo '[default{rank % 2}]:{text.format(rank=rank)}'\n"
            for rank in (2 * place, 2 * place + 1)
            if rank != hung
        )
        end = (
            LONG
            if host == name and draw.chance.random() < 0.5
            else f"sleep {draw.chance.uniform(0.5, 1.5):.2f}; exit 1"
        )
        draw.hosts.does_on(host, f"{BEGUN}sleep 0.5\n{said}{end}")
    client = Client(draw.hosts)
    draw.ends(client, 1, blamed=node)
    draw.result.check("the rank", client.failure("rank"), hung)


def directory_deleted(draw: Draw) -> None:
    """Somebody deletes or damages the run directory during the run. The job goes on, and can still be stopped."""
    draw.hosts.does(BEGUN + "setsid sleep 600 & (env -i sleep 600 &) ; sleep 600")
    client = Client(draw.hosts)
    begun = client.begun()
    time.sleep(draw.chance.uniform(0, 0.3))
    victims = NAMES if draw.chance.random() < 0.5 else (draw.victim()[0],)
    what = draw.chance.choice(("all", "the record", "sense"))
    for name in victims:
        for place in draw.hosts.workdir(name).glob("topoplan-runs*/*/*"):
            if what == "all":
                shutil.rmtree(place)
            elif what == "the record":
                (place / ".topoplan" / "started.json").unlink()
            else:
                (place / ".topoplan" / "started.json").write_text('{"pid": 1, "start_ticks": 1, "boot_id": "a"}')
    time.sleep(draw.chance.uniform(0.2, 1))
    draw.result.check("what had begun", begun, True)
    draw.result.check("the client's exit code while the job runs", client.process.poll(), None)
    draw.result.check("where the job runs", set(draw.hosts.jobs()), set(NAMES))
    if draw.chance.random() < 0.5:
        client.process.send_signal(signal.SIGINT)
        draw.result.check("the exit code", client.wait(), *INTERRUPTED)
    else:
        client.process.kill()
        draw.result.check("the exit code", client.wait(), -signal.SIGKILL)
        draw.stop_from_another()


OTHER_USER = 4242
"""A user id that does not exist on this machine."""
INTRUDER = """
import itertools, os, sys
taken, evil = sys.argv[1:]
for place in taken.split():
    os.makedirs(place, 0o777)
    os.chmod(place, 0o777)
print("ready", flush=True)
for number in itertools.count():
    for place, folders, files in os.walk("."):
        scripts = [name for name in files if name.endswith(".sh")]
        if "topoplan" in place and place[2:] not in taken.split() and (scripts or place.count("/") == 1):
            try:
                if os.stat(place).st_uid != os.getuid():
                    os.rename(place, f"{place}-away-{number}")
                    os.mkdir(place)
                for name in scripts:
                    with open(f"{place}/new", "w") as file:
                        file.write(evil)
                    os.rename(f"{place}/new", f"{place}/{name}")
            except OSError:
                pass
"""
"""Another user, who moves directories away and puts his own in their place, with scripts of the same names."""


def another_user(draw: Draw) -> None:
    """Another user was first in the same work directory. His scripts are never run: only ours, or nothing."""
    name, node = draw.victim()
    workdir, stolen = draw.hosts.workdir(name), draw.hosts.root / "stolen"
    ours = f"topoplan-runs-{draw.hosts.bed.user}"
    theirs = ["topoplan-runs", *(f"topoplan-runs/node-{index:02d}" for index in range(len(NAMES)))]
    taken = draw.chance.choice(([], theirs, [*theirs, ours], [ours, f"{ours}/{node}"]))
    sticky = draw.chance.random() < 0.7
    draw.hosts.does(BEGUN + f"sleep {draw.chance.uniform(0, 1):.2f}")
    workdir.chmod(0o1777 if sticky else 0o777)
    # It begins in the directory itself: its parents are closed to other users here.
    who = ["setpriv", "--reuid", str(OTHER_USER), "--regid", str(OTHER_USER), "--clear-groups", "--"]
    evil = f"id -u >>{stolen}\n"
    command = [*who, "/usr/bin/python3", "-c", INTRUDER, " ".join(taken), evil]
    with subprocess.Popen(command, cwd=workdir, stdout=subprocess.PIPE, text=True) as intruder:
        try:
            draw.result.check("the other user", intruder.stdout and intruder.stdout.readline(), "ready\n")
            client = Client(draw.hosts)
            if sticky and ours not in taken:
                draw.ends(client, 0)
            else:
                draw.ends(client, 1, blamed=node)
        finally:
            intruder.kill()
            workdir.chmod(0o755)
            for place in workdir.glob("topoplan-runs*"):
                shutil.rmtree(place)
    draw.result.check("whether another's script was run", stolen.exists(), False)
    stolen.unlink(missing_ok=True)


def late(draw: Draw) -> None:
    name, _ = draw.victim()
    draw.hosts.does("exit 0", **{name: f"sleep {draw.chance.uniform(0.5, 3):.2f}; echo late"})
    draw.ends(Client(draw.hosts), 0)


def much_output(draw: Draw) -> None:
    name, _ = draw.victim()
    half = "base64 -w 200 /dev/zero | head -c 100000000"
    draw.hosts.does("exit 0", **{name: f"({half}) & {half} >&2; wait"})
    draw.ends(Client(draw.hosts), 0)


def binary_output(draw: Draw) -> None:
    name, _ = draw.victim()
    draw.hosts.does("exit 0", **{name: r"head -c 2000000 /dev/urandom; printf '\n\e[2J\a\377end'"})
    draw.ends(Client(draw.hosts), 0)


@contextlib.contextmanager
def small_disk(hosts: Hosts, name: str) -> Iterator[Path]:
    """Mount a disk of 1 MB in place of a host's workdir, as that host sees it; yield the path by which we see it."""
    sshd = hosts.bed[name].sshd
    if sshd is None:
        raise RuntimeError(f"{name} has no sshd")
    inside, workdir = ["nsenter", "-t", str(sshd.pid), "-m"], str(hosts.workdir(name))
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", workdir], check=True)
    try:
        yield Path(f"/proc/{sshd.pid}/root{workdir}")
    finally:
        subprocess.run([*inside, "umount", "-l", workdir], check=True)


FAULTS: dict[str, tuple[int, Callable[[Draw], None]]] = {
    "none": (6, none),
    "a node exits with a code": (12, exit_code),
    "a rank is killed": (10, rank_killed),
    "a node's script is killed": (8, script_killed),
    "all of a node is killed": (6, all_killed),
    "ranks deaf to SIGTERM": (6, deaf_to_sigterm),
    "ranks leave daemons": (8, daemons),
    "a host is cut off": (4, cut),
    "a cut that heals": (4, cut_that_heals),
    "sshd is frozen": (3, frozen),
    "watcher killed, then a rank": (10, watcher_killed),
    "a host is started again": (8, rebooted),
    "ranks killed, with retries": (10, started_again),
    "a failure not worth it": (3, not_worth_it),
    "client told to end": (5, client_told_to_end),
    "client offline": (5, offline),
    "client offline, SIGINT": (2, offline_interrupt),
    "one host invisible": (4, one_invisible),
    "client SIGINT": (14, client_signal(signal.SIGINT)),
    "client SIGINT twice": (4, two_interrupts),
    "client SIGTERM": (6, client_signal(signal.SIGTERM)),
    "client SIGKILL": (10, client_signal(signal.SIGKILL)),
    "client asleep": (3, client_asleep),
    "a disk fills up": (6, disk_full),
    "a rank hangs": (8, hang),
    "a rank cannot run": (6, cannot_run),
    "steps with pauses": (3, pauses),
    "quiet but writing": (3, quiet_but_writing),
    "supervisor killed": (3, supervisor_killed),
    "packets lost": (4, packets_lost),
    "connections dropped": (6, dropped),
    "collectives time out": (8, timed_out),
    "run directory deleted": (6, directory_deleted),
    "another user in the workdir": (6, another_user),
    "a node starts late": (4, late),
    "200 MB of output": (1, much_output),
    "binary output": (3, binary_output),
}
"""Name -> (relative frequency, function)."""


def one_run(hosts: Hosts, names: list[str], seed: int, index: int) -> Result:
    """Run one of these faults, and check what is left. The same seed and index draw the same fault."""
    chance = random.Random(f"{seed}/{index}")
    # First one of each, then in random order.
    name = names[index] if index < len(names) else chance.choices(names, [FAULTS[one][0] for one in names])[0]
    result = Result(fault=name)
    for host in NAMES:
        for mark in (hosts.root / host).glob("does.*"):
            mark.unlink(missing_ok=True)
    shutil.rmtree(hosts.state, ignore_errors=True)
    started_s = time.monotonic()
    try:
        FAULTS[name][1](Draw(hosts=hosts, chance=chance, result=result, index=index))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        result.violations.append(f"{type(error).__name__}: {error}")
    hosts.end_clients()
    if (hosts.root / "beside").exists():
        result.violations.append((hosts.root / "beside").read_text())
        (hosts.root / "beside").unlink()
    left = left_behind(hosts)
    result.orphans = sum(len(lines) for lines in left.values())
    result.took_s = time.monotonic() - started_s
    if left:
        result.violations.append(f"left behind: {left}")
        kill_all(hosts)
    for host in NAMES:
        for place in hosts.workdir(host).glob("topoplan-runs*"):
            shutil.rmtree(place, ignore_errors=True)
    return result


def left_behind(hosts: Hosts) -> dict[str, list[str]]:
    """Return what still runs on the hosts after all should have ended and some time has passed."""
    started_s = time.monotonic()
    while left := hosts.jobs():
        waits = all(line.startswith(WAITS) for lines in left.values() for line in lines)
        if time.monotonic() > started_s + (WAITS_S if waits else GONE_S):
            break
        time.sleep(0.05)
    return left


def kill_all(hosts: Hosts, *names: str) -> None:
    for name in names or NAMES:
        for pid, line in hosts.bed.processes(name).items():
            if not line.startswith("sshd"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def lane(number: int, folder: Path, options: argparse.Namespace, work: Iterator[int], results: list[Result]) -> None:
    """Run one fault after the other on a bed."""
    with Bed(folder / f"bed-{number}", [Machine(name=name) for name in NAMES]) as bed:
        hosts = hosts_of(bed, folder / f"hosts-{number}")
        for index in work:
            result = one_run(hosts, options.names, options.seed, index)
            results.append(result)
            if result.violations:
                # The last line says what could not be stopped, and why.
                *lines, end = last_lines(hosts.root / "client.out") or [""]
                said = "\n".join(f"      {line}" for line in [*(line[:200] for line in lines), end[:3000]])
                print(f"run {index} ({result.fault}):", *result.violations, sep="\n    ")
                print(f"    the client's last lines:\n{said}", flush=True)
            elif len(results) % 20 == 0:
                print(f"{len(results)} runs", flush=True)


class Numbers:
    """The remaining indexes, shared by several threads."""

    def __init__(self, numbers: range) -> None:
        self._numbers, self._lock = iter(numbers), threading.Lock()

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._numbers)


def print_table(results: list[Result], took_s: float) -> None:
    """Print counts and times by fault."""
    print(f"\n{'fault':28} {'runs':>5} {'wrong':>6} {'orphans':>8} {'median s':>9} {'longest s':>10}")
    for name in FAULTS:
        some = [result for result in results if result.fault == name]
        if some:
            times = [result.took_s for result in some]
            print(
                f"{name:28} {len(some):5} {sum(bool(result.violations) for result in some):6}"
                f" {sum(result.orphans for result in some):8} {statistics.median(times):9.1f} {max(times):10.1f}"
            )
    wrong = sum(bool(result.violations) for result in results)
    orphans = sum(result.orphans for result in results)
    print(f"{'all':28} {len(results):5} {wrong:6} {orphans:8}   in {took_s / 60:.1f} min")


def main() -> int:
    """Draw, run, and report what was not as it should be."""
    # A shell that starts this in the background ignores SIGINT, and the clients would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N", help="of an earlier soak, to draw the same again")
    parser.add_argument("--only", type=int, metavar="N", help="one run of it")
    parser.add_argument(
        "--lanes", type=int, default=2, metavar="N", help="runs at the same time, each on its own hosts"
    )
    parser.add_argument("--faults", default="", metavar="WORDS", help="parts of the names of those to draw from")
    options = parser.parse_args()
    options.names = [name for name in FAULTS if any(words in name for words in options.faults.split(","))]
    if not options.names:
        parser.error(f"no fault has {options.faults!r} in its name; there are: {', '.join(FAULTS)}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    kind, reason = probe()
    if kind != "namespaces":
        print(f"soak: no network namespaces here: {reason}")
        return 2
    numbers = range(options.runs) if options.only is None else range(options.only, options.only + 1)
    print(f"soak: seed {options.seed}, {len(numbers)} runs", flush=True)
    work, results, started_s = Numbers(numbers), list[Result](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="topoplan-soak-") as folder:
        lanes = [
            threading.Thread(target=lane, args=(number, Path(folder), options, work, results))
            for number in range(min(options.lanes, len(numbers)))
        ]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
    print_table(results, time.monotonic() - started_s)
    faults = f" --faults '{options.faults}'" if options.faults else ""
    print(f"again: python tests/soak/soak.py --runs {options.runs} --seed {options.seed}{faults}")
    return int(len(results) < len(numbers) or any(result.violations for result in results))


if __name__ == "__main__":
    sys.exit(main())
