"""Ending a job with the host programs themselves, without SSH in between: all of it, and nothing else."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.this_host import (
    AS_ROOT,
    OTHER_USER,
    Host,
    host,
    in_each_shell,
    instead,
    is_alive,
    processes_in,
    programs_in,
    somebody_elses,
    stat_field,
    told,
)
from tests.waiting import LIMIT_S, eventually
from topoplan.run import programs
from topoplan.run.programs import ExitCode

__all__ = ["host"]


REFORKER = """
import os, signal, sys, time
if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "leaves" in sys.argv:
    os.fork() and os._exit(0)
    os.setsid()
for beat in range(1000):
    with open("beats", "a") as file:
        file.write(".")
    time.sleep(0.02)
    if os.path.exists("over") or os.fork():
        os._exit(0)
"""


@contextlib.contextmanager
def _reforker(host: Host, *, ignores: bool, leaves: bool) -> Iterator[str]:
    """Yield the command of a process that continues as its child, 50 times a second, for 20 s."""
    host.run_dir.mkdir()
    (host.run_dir / "refork.py").write_text(REFORKER)
    try:
        yield f"{sys.executable} refork.py {'ignores' if ignores else ''} {'leaves' if leaves else ''}"
    finally:
        (host.run_dir / "over").touch()


def _beats(host: Host) -> int:
    path = host.run_dir / "beats"
    return path.stat().st_size if path.exists() else 0


LOST: dict[str, Callable[[Path], object]] = {
    "all": shutil.rmtree,
    "the record": lambda place: (place / ".topoplan" / "started.json").unlink(),
    "sense": lambda place: (place / ".topoplan" / "started.json").write_text("{}"),
}


class TestWithoutWhatItNotedThere:
    """The run directory is deleted, or its contents are not what the job wrote."""

    def job(self, host: Host) -> tuple[str, str, str]:
        record = host.start("setsid sleep 3100 & sleep 3000")
        # The first process, the script and these two, but nothing that is still about to become one of them.
        sleepers = {"sleep 3000", "sleep 3100"}
        assert eventually(lambda: sleepers <= set(programs_in(host.run_dir)) and len(processes_in(host.run_dir)) == 4)
        return told(record)

    @pytest.mark.parametrize("lost", LOST)
    @pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
    def test_a_job_is_seen_and_ended(self, host: Host, lost: str, known: bool) -> None:
        words = self.job(host)
        pids = {str(pid) for pid in processes_in(host.run_dir)}
        LOST[lost](host.run_dir)
        said = host.state(*(words if known else ()))
        assert (said["state"], set(said["pids"].split())) == ("running", pids)
        assert said["directory"] == ("gone" if lost == "all" else "damaged")
        assert known or json.loads(said["started"])["pid"] == int(words[0])
        said = host.stop(LIMIT_S, *(words if known else ()))
        assert (set(said["found"].split()), said["left"]) == (pids, "")
        assert not [pid for pid in pids if is_alive(int(pid))]
        assert said["code"] == ("" if lost == "all" else "143")
        if known:
            assert host.state(*words)["state"] == ("gone" if lost == "all" else "ended")

    @pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
    def test_a_job_is_found_by_its_mark_where_its_first_process_is_gone_too(self, host: Host, known: bool) -> None:
        words = self.job(host)
        os.kill(int(words[0]), signal.SIGKILL)
        assert eventually(lambda: not is_alive(int(words[0])))
        shutil.rmtree(host.run_dir)
        said = host.stop(LIMIT_S, *(words if known else ()))
        assert (len(said["found"].split()), said["left"]) == (3, "")

    def test_what_the_client_knows_counts_more_than_a_file_that_names_another(self, host: Host) -> None:
        words = self.job(host)
        with somebody_elses() as foreign:
            host.recorded(pid=foreign.pid, start_ticks=int(stat_field(foreign.pid, 22)))
            assert host.state(*words)["directory"] == "damaged"
            assert words[0] in host.stop(LIMIT_S, *words)["found"].split()
            assert foreign.poll() is None

    @AS_ROOT
    @pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
    def test_what_somebody_else_put_in_its_place_counts_for_nothing(self, host: Host, known: bool) -> None:
        words = self.job(host)
        host.run_dir.rename(host.run_dir.with_name("elsewhere"))
        with somebody_elses() as foreign:
            (host.run_dir / ".topoplan").mkdir(parents=True)
            record = {"pid": foreign.pid, "start_ticks": int(stat_field(foreign.pid, 22)), "boot_id": words[2]}
            (host.run_dir / ".topoplan" / "started.json").write_text(json.dumps(record))
            (host.run_dir / ".topoplan" / "exit").write_text("0")
            os.chown(host.run_dir, OTHER_USER, -1)
            said = host.state(*(words if known else ()))
            assert (said["state"], said["directory"], said["code"]) == ("running", "foreign", "")
            said = host.stop(LIMIT_S, *(words if known else ()))
            assert (len(said["found"].split()), said["left"], said["code"]) == (4, "", "")
            assert foreign.poll() is None
            if not known:
                done = host.program(programs.STOP, str(host.run_dir), host.run_dir.name, "0", "0")
                assert (done.returncode, b"belongs to UNKNOWN" in done.stderr) == (ExitCode.NOT_OURS, True)

    @AS_ROOT
    def test_a_mark_that_somebody_else_puts_on_himself_leads_nowhere(self, host: Host) -> None:
        with contextlib.ExitStack() as stack:
            foreign = stack.enter_context(subprocess.Popen(["sleep", "3000"], start_new_session=True))
            mark = f"{host.run_dir.name}/{foreign.pid}/{stat_field(foreign.pid, 22)}"
            words = ["setpriv", "--reuid", str(OTHER_USER), "--clear-groups", "sleep", "3100"]
            liar = stack.enter_context(subprocess.Popen(words, env=os.environ | {"TOPOPLAN_RUN": mark}))
            try:
                assert eventually(lambda: b"sleep\x003100" in Path(f"/proc/{liar.pid}/cmdline").read_bytes())
                assert host.stop(0)["found"] == ""
                assert (foreign.poll(), liar.poll()) == (None, None)
            finally:
                foreign.kill()
                liar.kill()


DAEMON = """
import mmap, os, sys, time

how, place = sys.argv[1], os.getcwd()
if os.fork():
    os._exit(0)
os.setsid()
middle = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == middle:  # which holds the directory too
    time.sleep(0.01)
held, null = os.open("held", os.O_RDWR | os.O_CREAT), os.open("/dev/null", os.O_RDWR)
os.truncate(held, 4096)
kept = mmap.mmap(held, 4096) if how == "mapped" else None
if how != "cwd":
    os.chdir("/")
for number in range(3):
    os.dup2(held if (how, number) == ("fd", 1) else null, number)
os.closerange(3, 100)
with open(f"{place}/pid.part", "w") as file:
    print(os.getpid(), file=file)
os.rename(f"{place}/pid.part", f"{place}/pid")
if how != "mapped":
    os.execve("/bin/sleep", ["sleep", "3300"], {})
time.sleep(3300)
"""


class TestWhatMayBeOfIt:
    """A process that has left session, parents and environment behind, and holds a file of the run or a GPU."""

    @contextlib.contextmanager
    def daemon(self, host: Host, how: str) -> Iterator[int]:
        """Start a job that leaves such a process, and yield its id. The mark is dropped before Python starts."""
        host.run_dir.mkdir()
        (host.run_dir / "daemon.py").write_text(DAEMON)
        host.finish(f"env -i {sys.executable} daemon.py {how}; exit 3")
        assert eventually((host.run_dir / "pid").exists)
        pid = int((host.run_dir / "pid").read_text())
        words = b"daemon.py" if how == "mapped" else b"sleep\x003300"
        assert eventually(lambda: words in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert eventually(lambda: host.state()["pids"] == "")
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @pytest.mark.parametrize("how", ["fd", "cwd", "mapped"])
    @pytest.mark.parametrize("deleted", [False, True])
    def test_is_named_and_gets_no_signal(self, host: Host, how: str, deleted: bool) -> None:
        with self.daemon(host, how) as pid:
            words = told(json.loads((host.run_dir / ".topoplan" / "started.json").read_text()))
            if deleted:
                shutil.rmtree(host.run_dir)
            said = host.stop(0, *words)
            assert (said["found"], said["left"]) == ("", "")
            since, holds, command = said[f"may_be.{pid}"].split(" ", 2)
            assert (abs(int(since) - time.time()) < 2 * LIMIT_S, holds) == (True, "file")
            assert command.startswith("sleep 3300" if how != "mapped" else sys.executable)
            assert [key for key in said if key.startswith("may_be")] == [f"may_be.{pid}"]
            assert is_alive(pid)

    def test_is_not_what_a_client_looks_with(self, host: Host) -> None:
        host.finish("exit 0")
        assert eventually(lambda: not processes_in(host.run_dir))
        look = f"cd {host.run_dir} && exec 5<.topoplan/log && tail -f .topoplan/log"
        with subprocess.Popen(["bash", "--norc", "-s"], stdin=subprocess.PIPE, start_new_session=True) as client:
            client.stdin.write(look.encode() + b"\n")
            client.stdin.flush()
            try:
                assert eventually(lambda: len(processes_in(host.run_dir)) == 2)
                assert not [key for key in host.stop(0) if key.startswith("may_be")]
            finally:
                os.killpg(client.pid, signal.SIGKILL)

    def test_is_nothing_that_ends_while_it_is_looked_at(self, host: Host, tmp_path: Path) -> None:
        """A process that is ending shows neither a mark nor a parent."""
        with self.daemon(host, "fd") as pid:
            ends = f'case $* in *"^TOPOPLAN_RUN= {pid}/environ") kill -KILL {pid}; sleep 0.1 ;; esac'
            grep = f'{ends}\nexec {shutil.which("grep")} "$@"'
            said = host.stop(0, env=instead(tmp_path / "bin", grep=grep))
            assert (is_alive(pid), [key for key in said if key.startswith("may_be")]) == (False, [])

    def test_is_who_holds_a_gpu_unless_it_is_older_or_of_somebody_else(self, host: Host, tmp_path: Path) -> None:
        with contextlib.ExitStack() as stack:

            def sleeper(*before: str, **options: Any) -> int:
                process = stack.enter_context(
                    subprocess.Popen([*before, "sleep", "3400"], start_new_session=True, **options)
                )
                stack.callback(process.kill)
                assert eventually(lambda: b"sleep\x003400" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
                return process.pid

            older = sleeper()
            time.sleep(0.05)
            host.start("sleep 3000")
            ours = sleeper()
            of_another_run = sleeper(env=os.environ | {"TOPOPLAN_RUN": "other/1/2"})
            gpus = [older, ours, of_another_run, 2**22]
            if os.getuid() == 0:
                gpus.append(sleeper("setpriv", "--reuid", str(OTHER_USER), "--clear-groups"))
            smi = f"printf '%s\\n' {' '.join(map(str, gpus))} '[Not Supported]'"
            said = host.stop(LIMIT_S, env=instead(tmp_path / "bin", **{"nvidia-smi": smi}))
            assert said[f"may_be.{ours}"].split(" ", 1)[1] == "GPU sleep 3400"
            assert [key for key in said if key.startswith("may_be")] == [f"may_be.{ours}"]
            assert said["left"] == ""

    def test_is_not_known_where_nvidia_smi_does_not_say(self, host: Host, tmp_path: Path) -> None:
        host.start("sleep 3000")
        said = host.stop(LIMIT_S, env=instead(tmp_path / "bin", **{"nvidia-smi": "exit 9"}))
        assert (said["gpus_unseen"], said["left"]) == ("9", "")


SLOW_MV = """#!/bin/bash
[[ "$1" == */starting ]] || for ((end = SECONDS + {seconds}; SECONDS < end; )); do :; done
exec /bin/mv "$@"
"""


class TestStop:
    def test_ends_a_job_that_does_as_it_is_told_long_before_the_grace_is_over(self, host: Host) -> None:
        host.begin("trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done")
        began = time.monotonic()
        said = host.stop(grace_s=LIMIT_S)
        assert (said["left"], said["code"]) == ("", "5")
        assert said["found"]
        assert host.log().endswith(b"bye\n")
        assert time.monotonic() - began < LIMIT_S / 2

    @in_each_shell
    def test_kills_what_ignores_being_told(self, host: Host) -> None:
        host.begin("trap '' TERM; echo up; while :; do sleep 0.02; done")
        began = time.monotonic()
        said = host.stop(grace_s=0.5)
        assert (said["left"], said["code"]) == ("", "137")
        assert time.monotonic() - began > 0.45

    @pytest.mark.parametrize(("seconds", "code"), [(2, "137"), (600, "")])
    def test_leaves_the_first_process_some_time_to_record_the_end(
        self, host: Host, tmp_path: Path, seconds: int, code: str
    ) -> None:
        """On a busy machine, what it starts for that takes seconds."""
        slow = instead(tmp_path / "bin")
        (tmp_path / "bin" / "mv").write_text(SLOW_MV.format(seconds=seconds))
        (tmp_path / "bin" / "mv").chmod(0o755)
        host.try_to_start("trap '' TERM; echo up; while :; do sleep 0.02; done", env=slow)
        assert eventually(lambda: host.log() == b"up\n")
        said = host.stop(grace_s=0)
        assert (said["left"], said["code"]) == ("", code)

    def test_finds_what_left_the_session_or_dropped_its_environment(self, host: Host) -> None:
        host.start(
            """\
            sleep 3100 &
            setsid sleep 3200 &
            ( setsid sh -c 'trap "" TERM HUP; sleep 3300 & wait' & )
            env -i setsid sleep 3400 &
            env -i sh -c 'sleep 3500 & wait' &
            echo up
            wait
            """
        )
        sleepers = {f"sleep {number}00" for number in range(31, 36)}
        # These, what waits for them, and nothing that is still about to become one of them.
        assert eventually(lambda: sleepers <= set(programs_in(host.run_dir)) and len(processes_in(host.run_dir)) == 9)
        assert set(host.state()["pids"].split()) == {str(pid) for pid in processes_in(host.run_dir)}
        assert host.stop(grace_s=0.3)["left"] == ""
        assert processes_in(host.run_dir) == []

    def test_ends_what_a_job_has_left_running(self, host: Host) -> None:
        host.finish("setsid sleep 3000 & exit 4")
        assert eventually(lambda: len(processes_in(host.run_dir)) == 1)
        said = host.state()
        assert (said["state"], said["pids"]) == ("ended", str(processes_in(host.run_dir)[0]))
        said = host.stop()
        assert (said["left"], said["code"]) == ("", "4")
        assert processes_in(host.run_dir) == []

    def test_ends_what_is_stopped(self, host: Host) -> None:
        record = host.begin("echo up; while :; do sleep 0.02; done")
        os.killpg(record["pid"], signal.SIGSTOP)
        assert host.stop(grace_s=LIMIT_S)["left"] == ""
        assert host.state()["code"] == "143"

    def test_keeps_up_with_a_job_that_starts_processes_all_the_time(self, host: Host) -> None:
        host.start(
            "trap '' TERM; f() { (sleep 0.3; f) & (sleep 0.4) & }; f; while :; do (sleep 0.01) & sleep 0.01; done"
        )
        time.sleep(0.3)
        assert host.stop(grace_s=0.2)["left"] == ""
        assert processes_in(host.run_dir) == []

    # Each pair of the three in each combination.
    @pytest.mark.parametrize(
        ("ignores", "leaves", "beside"),
        [(False, False, ""), (True, True, ""), (True, False, "sleep 3000"), (False, True, "sleep 3000")],
    )
    def test_ends_a_process_that_replaces_itself_all_the_time(
        self, host: Host, ignores: bool, leaves: bool, beside: str
    ) -> None:
        with _reforker(host, ignores=ignores, leaves=leaves) as command:
            host.start(f"{command} {'&' if beside else ''} {beside}")
            assert eventually(lambda: _beats(host) > 5)
            said = host.stop(grace_s=0.3)
            assert said["found"]
            assert said["left"] == ""
            beats = _beats(host)
            time.sleep(0.3)
            assert _beats(host) == beats

    @in_each_shell
    def test_keeps_the_exit_code_of_a_script_that_is_killed_with_one(self, host: Host) -> None:
        with _reforker(host, ignores=True, leaves=False) as command:
            host.start(f"trap '' TERM; {command} & wait; while :; do :; done")
            assert eventually(lambda: _beats(host) > 5)
            said = host.stop(grace_s=0.1)
            assert (said["left"], said["code"]) == ("", "137")

    def test_leaves_alone_a_session_with_a_leader_of_its_own_that_one_process_with_the_mark_is_in(
        self, host: Host
    ) -> None:
        """For example the shell of somebody who has copied the environment of a job for debugging."""
        record = host.start("sleep 3000")
        mark = f"{host.run_dir.name}/{record['pid']}/{record['start_ticks']}"
        shell = f"env TOPOPLAN_RUN={mark} sleep 3000 & echo up; sleep 3000"
        with subprocess.Popen(["sh", "-c", shell], start_new_session=True, stdout=subprocess.PIPE) as foreign:
            assert foreign.stdout.readline() == b"up\n"
            try:
                assert host.stop(grace_s=0.1)["left"] == ""
                assert foreign.poll() is None
            finally:
                os.killpg(foreign.pid, signal.SIGKILL)

    def test_leaves_other_runs_alone(self, host: Host) -> None:
        other = Host(host.run_dir.with_name(f"{host.run_dir.name}0"))
        same_name = Host(host.run_dir.parent / "else" / host.run_dir.name)
        for one in (host, other, same_name):
            one.start("setsid sleep 3000 & sleep 3000")
        assert host.stop()["left"] == ""
        for one in (other, same_name):
            assert one.state()["state"] == "running"
            assert eventually(lambda one=one: len(one.state()["pids"].split()) >= 3)
            one.stop(0)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_leaves_a_process_alone_that_came_by_the_recorded_id(self, host: Host, change: int) -> None:
        host.finish("exit 0")
        with somebody_elses() as foreign:
            ticks = int(stat_field(foreign.pid, 22))
            host.recorded(pid=foreign.pid, session=foreign.pid, start_ticks=ticks + change)
            (host.run_dir / ".topoplan" / "exit").unlink()
            said = host.state()
            assert (said["state"], said["pids"]) == ("gone", "")
            assert host.stop(0)["found"] == ""
            assert foreign.poll() is None

    def test_leaves_a_session_alone_whose_leader_it_cannot_prove(self, host: Host) -> None:
        """The recorded leader has gone, and a session of that id has members without the mark."""
        host.finish("exit 0")
        leader = subprocess.Popen(["sh", "-c", "sleep 3000 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
        member = int(leader.stdout.readline())
        leader.wait()
        try:
            assert stat_field(member, 6) == str(leader.pid)
            host.recorded(pid=leader.pid, session=leader.pid)
            assert host.stop(0)["found"] == ""
            assert is_alive(member)
        finally:
            os.kill(member, signal.SIGKILL)

    def test_goes_on_when_the_one_who_asked_goes(self, host: Host) -> None:
        host.begin("trap '' TERM; echo up; while :; do sleep 0.02; done")
        words = [str(host.run_dir), host.run_dir.name, "30", "500"]
        stopper = subprocess.Popen(["bash", "-c", programs.STOP, "bash", *words], stdout=subprocess.PIPE)
        stopper.stdout.close()
        assert eventually(lambda: processes_in(host.run_dir) in ([], [stopper.pid]))
        stopper.wait()
