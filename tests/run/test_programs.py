"""The host programs themselves, in the shells that hosts have, without SSH in between."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.bed.bed import fill_disk, small_disk
from tests.run.this_host import (
    AS_ROOT,
    OTHER_USER,
    WHOLE,
    Host,
    host,
    in_each_shell,
    instead,
    processes_in,
    programs_in,
    stat_field,
)
from tests.waiting import eventually
from topoplan.remote.upload import sums
from topoplan.run import programs
from topoplan.run.node import NO_PEERS
from topoplan.run.programs import ExitCode

__all__ = ["host"]


@in_each_shell
class TestStart:
    def test_records_the_leader_of_a_session_of_its_own(self, host: Host) -> None:
        began = time.time()
        record = host.start("sleep 3000")
        pid = record["pid"]
        assert stat_field(pid, 6) == str(pid) == str(record["session"])
        assert stat_field(pid, 22) == str(record["start_ticks"])
        assert record["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert began - 1 < record["unix_s"] < time.time() + 1

    def test_exports_the_environment_and_shows_it_to_nobody_else(self, host: Host) -> None:
        record = host.start('printf "%s" "$SECRET"; sleep 3000', b"export SECRET='a b\nhush-7 \"$c'\n")
        assert eventually(lambda: host.log() == b'a b\nhush-7 "$c')
        for words in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert b"hush-7" not in words.read_bytes()
        assert b"SECRET" not in Path(f"/proc/{record['pid']}/environ").read_bytes()
        files = [path.read_bytes() for path in (host.run_dir / ".topoplan").iterdir() if path.name != "log"]
        assert not [data for data in files if b"hush-7" in data]

    def test_writes_both_outputs_into_the_log_and_gives_no_input(self, host: Host) -> None:
        host.finish("echo out; echo err >&2; cat; echo end")
        assert host.log() == b"out\nerr\nend\n"

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            ("exit 0", 0),
            ("exit 7", 7),
            ("exit 255", 255),
            ("kill -KILL $$", 137),
            ("kill -TERM $$", 143),
            ("kill -SEGV $$", 139),
            ("no-such-command", 127),
            ("if", 2),
            ("trap 'exit 3' TERM; kill -TERM $PPID $$; sleep 5 & wait", 3),
        ],
    )
    def test_keeps_the_exit_code(self, host: Host, script: str, code: int) -> None:
        host.finish(script)
        assert host.state()["code"] == str(code)

    @pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
    def test_lets_every_signal_to_the_group_through_to_the_job(self, host: Host, name: str) -> None:
        number = signal.Signals[f"SIG{name}"]
        # `sleep` traps nothing and ends by the signal, so no parent ignores it. (bash itself ignores QUIT.)
        record = host.start("exec sleep 3000")
        assert eventually(lambda: "sleep 3000" in programs_in(host.run_dir))
        os.killpg(record["pid"], number)
        assert eventually(host.ended)
        assert host.state()["code"] == str(128 + number)

    def test_refuses_a_directory_and_a_script_that_are_not_there(self, host: Host, tmp_path: Path) -> None:
        words = ("node.sh", host.run_dir.name, programs.LEADER)
        assert host.program(programs.START, str(tmp_path / "absent"), *words).returncode == ExitCode.NO_DIRECTORY
        assert host.program(programs.START, str(tmp_path), *words).returncode == ExitCode.NO_SCRIPT
        assert not (tmp_path / ".topoplan").exists()

    def test_is_told_all_or_starts_nothing(self, host: Host) -> None:
        done = host.try_to_start("touch ran", b"export SECRET='half of", whole=b"")
        assert done.returncode == ExitCode.NOT_STARTED
        assert {file.name for file in host.run_dir.iterdir()} == {"node.sh"}

    def test_a_job_is_recorded_whenever_the_starter_is_killed(self, host: Host) -> None:
        host.run_dir.mkdir()
        (host.run_dir / "node.sh").write_text("touch ran; sleep 3000")
        told = host.run_dir / "told"
        told.write_bytes(NO_PEERS.encode() + WHOLE)
        for number in range(25):
            place = host.run_dir / f"{host.run_dir.name}-{number}-run"
            place.mkdir()
            shutil.copy(host.run_dir / "node.sh", place)
            words = [str(place), "node.sh", place.name, host.keeper]
            starter = subprocess.Popen(
                ["bash", "-c", programs.START, "bash", *words],
                stdin=told.open("rb"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            time.sleep(number * 0.0004)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)
            starter.communicate()
        # A process that was not killed gets to the end of its work.
        places = list(host.run_dir.glob("*-run"))
        assert eventually(lambda: all((place / "ran").exists() or not processes_in(place) for place in places))
        ran = [place for place in places if (place / "ran").exists()]
        for place in ran:
            other = Host(place, host.sh)
            assert other.state()["state"] == "running"
            assert other.stop(0)["left"] == ""
        assert not processes_in(host.run_dir)

    @pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
    def test_says_that_the_disk_is_full_and_starts_nothing(self, host: Host) -> None:
        host.run_dir.mkdir()
        with small_disk(host.run_dir, "size=1m,mode=700"):
            (host.run_dir / "node.sh").write_text("touch /proc/self/cwd/ran")
            fill_disk(host.run_dir)
            words = (str(host.run_dir), "node.sh", host.run_dir.name, programs.LEADER)
            done = host.program(programs.START, *words, stdin=NO_PEERS.encode() + WHOLE)
            assert done.returncode == ExitCode.NOT_STARTED
            assert b"No space left" in done.stderr or b"I/O error" in done.stderr
            assert not (host.run_dir / "ran").exists()
            assert not (host.run_dir / ".topoplan").exists()

    @pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
    def test_keeps_the_exit_code_where_the_disk_is_full_by_then(self, host: Host) -> None:
        host.run_dir.mkdir()
        with small_disk(host.run_dir, "size=1m,mode=700"):
            host.finish("cat /dev/zero; exit 9")
            assert host.state()["code"] == "9"


class TestWhatRunsIsWhatWasPut:
    SCRIPT = "touch ran; sleep 3000"
    SUMS = sums({"node.sh": SCRIPT.encode(), "train.yaml": b"a: 1"})

    def test_each_file_is_compared(self, host: Host) -> None:
        host.run_dir.mkdir()
        (host.run_dir / "train.yaml").write_text("a: 1")
        assert host.try_to_start(self.SCRIPT, sums=self.SUMS).returncode == 0
        assert eventually((host.run_dir / "ran").exists)

    @pytest.mark.parametrize("kind", ["script", "other content", "missing", "link", "directory"])
    def test_nothing_is_started_where_one_is_another(self, host: Host, tmp_path: Path, kind: str) -> None:
        (tmp_path / "same").write_text("a: 1")
        train = host.run_dir / "train.yaml"
        host.run_dir.mkdir()
        if kind == "link":
            train.symlink_to(tmp_path / "same")
        elif kind == "directory":
            train.mkdir()
        elif kind != "missing":
            train.write_text("a: 2" if kind == "other content" else "a: 1")
        done = host.try_to_start("touch ran" if kind == "script" else self.SCRIPT, sums=self.SUMS)
        name = b"node.sh" if kind == "script" else b"train.yaml"
        assert (done.returncode, done.stderr) == (ExitCode.CHANGED, name + b"\n")
        assert not (host.run_dir / ".topoplan").exists()

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
    def test_nothing_is_started_where_others_can_write(self, host: Host, mode: int) -> None:
        host.run_dir.mkdir()
        host.run_dir.chmod(mode)
        done = host.try_to_start(self.SCRIPT)
        assert (done.returncode, done.stderr) == (
            ExitCode.NOT_OURS,
            f"others can write in it (mode {mode:o})\n".encode(),
        )
        assert {path.name for path in host.run_dir.iterdir()} == {"node.sh"}

    @AS_ROOT
    def test_nothing_is_started_where_somebody_else_made_the_directory(self, host: Host) -> None:
        host.run_dir.mkdir()
        os.chown(host.run_dir, OTHER_USER, -1)
        done = host.try_to_start(self.SCRIPT)
        assert (done.returncode, done.stderr) == (ExitCode.NOT_OURS, b"it belongs to UNKNOWN (uid 4242)\n")

    @AS_ROOT
    @pytest.mark.parametrize("what", ["chown 65534", "chmod 777"])
    def test_what_a_file_system_makes_of_owners_and_modes_is_not_held_against_it(
        self, host: Host, tmp_path: Path, what: str
    ) -> None:
        """NFS maps root to nobody; some volumes keep no modes. A directory created there shows it."""
        host.run_dir.mkdir()
        subprocess.run([*what.split(), str(host.run_dir)], check=True)
        made = f'made=$({shutil.which("mktemp")} "$@") && {what} "$made" && echo "$made"'
        done = host.try_to_start(self.SCRIPT, env=instead(tmp_path / "bin", mktemp=made))
        assert (done.returncode, done.stderr) == (0, b"")


class TestState:
    def test_tells_apart_what_a_job_can_be(self, host: Host) -> None:
        assert host.state() == {"state": "never-started", "directory": "gone"}
        host.run_dir.mkdir()
        assert host.state() == {"state": "never-started", "directory": "there"}
        record = host.start("echo four; until [ -e go ]; do sleep 0.02; done")
        assert eventually(lambda: host.log() == b"four\n")
        said = host.state()
        assert (said["state"], said["code"], said["log_bytes"]) == ("running", "", "5")
        assert str(record["pid"]) in said["pids"].split()
        (host.run_dir / "go").touch()
        assert eventually(host.ended)
        assert eventually(lambda: host.state()["pids"] == "")
        assert host.state()["state"] == "ended"

    def test_sees_that_all_of_it_was_killed(self, host: Host) -> None:
        record = host.begin("echo up; exec sleep 3000")
        os.killpg(record["pid"], signal.SIGKILL)
        assert eventually(lambda: host.state()["pids"] == "")
        assert host.state()["state"] == "gone"

    def test_names_what_is_left_where_only_the_leader_was_killed(self, host: Host) -> None:
        record = host.begin("echo up; exec sleep 3000")
        os.kill(record["pid"], signal.SIGKILL)
        assert eventually(lambda: host.state()["state"] == "gone")
        assert host.state()["pids"] != ""
        assert host.stop()["left"] == ""

    def test_sees_that_the_machine_was_started_again(self, host: Host) -> None:
        host.start("sleep 3000")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host.recorded(boot_id="00000000-0000-4000-8000-000000000000")
        assert host.state()["state"] == "rebooted"
        # Whatever has these process ids now is somebody else's.
        assert host.stop()["found"] == ""
        host.recorded(boot_id=boot)
        assert host.state()["state"] == "running"

    @pytest.mark.parametrize(
        "text", ["", "{}", "null", '{"pid": "x"}', '{"pid": -1, "start_ticks": 1, "boot_id": "a"}']
    )
    def test_a_damaged_record_is_no_job(self, host: Host, text: str) -> None:
        host.finish("exit 0")
        assert eventually(lambda: not processes_in(host.run_dir))
        (host.run_dir / ".topoplan" / "started.json").write_text(text)
        for program in (programs.STATE, programs.STOP):
            times = ("0", "0") if program is programs.STOP else ()
            done = host.program(program, str(host.run_dir), host.run_dir.name, *times)
            assert done.returncode == ExitCode.DAMAGED
