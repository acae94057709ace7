"""Jobs on hosts over SSH connections."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed, under_way
from tests.bed.logins import log_in
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.remote.connection import Chunk, Connection, Stream, StreamEnd
from topoplan.remote.upload import upload
from topoplan.run.node import Started, follow_node, node_state, read_log, start_node, stop_node, tail_offsets


@pytest.fixture
def home(bed: Bed, request: pytest.FixtureRequest) -> str:
    """A directory on the hosts for one test. (The sessions of a bed begin in the real home of the user.)"""
    return f"{bed['alpha'].directory}/home/{request.node.name.partition('[')[0]}-{time.monotonic_ns()}"


@pytest.fixture
def run_dir(alpha: Connection, home: str) -> Iterator[str]:
    place = f'{home}/it\'s a "run" é {time.monotonic_ns()}'
    yield place
    stop_node(alpha, place, grace_s=0, deadline_s=LIMIT_S)


def start(host: Connection, run_dir: str, script: str, **environment: str) -> Started:
    files = {"node 0.sh": script.encode()}
    upload(host, files, run_dir, deadline_s=LIMIT_S)
    return start_again(host, run_dir, files=files, environment=environment)


def start_again(host: Connection, run_dir: str, **options: Any) -> Started:
    words = {"script": "node 0.sh", "environment": {}, "deadline_s": LIMIT_S} | options
    return start_node(host, run_dir=run_dir, **words)


def collected(stream: Stream) -> tuple[bytes, StreamEnd]:
    data = b""
    for item in stream.read(LIMIT_S):
        if isinstance(item, StreamEnd):
            return data, item
        if item.source == "stdout":
            data += item.data
    raise AssertionError("no end")


CLIENT = """\
import sys
from pathlib import Path
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.ssh_config import Target
address, port, user, key, hosts, *places = sys.argv[1:]
target = Target(name="alpha", alias="alpha", hostname=address, port=int(port), user=user,
                identity_files=(Path(key),), user_known_hosts_files=(Path(hosts),))
connection = connect(target, Access())
"""


def client_program(bed: Bed, does: str, *places: str) -> list[str]:
    """Return the command of another client of alpha, whose program knows `connection` and `places`."""
    host = bed["alpha"]
    words = [host.address, str(host.port), bed.user, str(bed.key), str(bed.known_hosts), *places]
    return [sys.executable, "-c", CLIENT + does, *words]


def followers(bed: Bed, before: Mapping[int, str]) -> list[str]:
    """Return the processes on alpha that follow a log, except those that earlier tests left behind a cut network."""
    found = (line for pid, line in bed.processes("alpha").items() if before.get(pid) != line)
    return [line for line in found if line.startswith("tail") or "--norc" in line]


LOGIN_SHELL = r"""#!/bin/bash
echo "Welcome to this machine"
printf '\033]0;a title, and no end of a line\007'
case $SSH_ORIGINAL_COMMAND in *$'\n'* | *[\!\\]*) echo "Unmatched quote." >&2; exit 1 ;; esac
exec bash -c "$SSH_ORIGINAL_COMMAND"
"""
# Start-up files that print, and a shell such as tcsh that quotes differently than bash.


@pytest.fixture
def strange(bed: Bed, tmp_path: Path) -> Iterator[Connection]:
    """A host with such a login shell."""
    shell = tmp_path / "shell"
    shell.write_text(LOGIN_SHELL)
    shell.chmod(0o755)
    with bed.restarted("beta", f"ForceCommand {shell}"), log_in(bed.target("beta")) as connection:
        yield connection


class TestALoginShell:
    def test_may_print_and_quote_in_its_own_way(self, strange: Connection, home: str) -> None:
        place = f"{home}/it's a \\ r!n {time.monotonic_ns()}"
        said = b"a\nb !x \\\n"
        start(strange, place, 'printf "%s\\n" "$VALUE"; sleep 600', VALUE=said.decode().rstrip())
        log = Path(place) / ".topoplan" / "log"
        assert eventually(lambda: log.read_bytes() == said)
        first = next(item for item in follow_node(strange, place) if isinstance(item, Chunk))
        assert first.data == said
        assert collected(read_log(strange, place, tail_lines=1))[0] == b"b !x \\\n"
        state = node_state(strange, place, deadline_s=LIMIT_S)
        assert (state.state, state.log_bytes) == ("running", len(said))
        assert tail_offsets(strange, place, [1], log_bytes=state.log_bytes, deadline_s=LIMIT_S) == [2]
        assert stop_node(strange, place, grace_s=0, deadline_s=LIMIT_S).left == ()


class TestAJob:
    def test_runs_in_its_directory_with_its_environment_to_its_end(self, alpha: Connection, run_dir: str) -> None:
        value = "a b\n'c' \"$d\" `e` é"
        began = time.monotonic()
        started = start(alpha, run_dir, 'pwd; printf "%s\\n" "$VALUE"; echo "$TOPOPLAN_RUN"; exit 6', VALUE=value)
        data, end = collected(follow_node(alpha, run_dir))
        mark = f"{run_dir.rpartition('/')[2]}/{started.pid}/{started.start_ticks}"
        assert data.decode() == f"{run_dir}\n{value}\n{mark}\n"
        assert end == StreamEnd(code=6)
        state = node_state(alpha, run_dir, deadline_s=LIMIT_S)
        assert (state.state, state.code, state.log_bytes, state.started) == ("ended", 6, len(data), started)
        for seconds in (state.elapsed_s, state.ended_s_ago):
            assert seconds < time.monotonic() - began + 1

    def test_never_started_is_no_error(self, alpha: Connection, run_dir: str) -> None:
        state = node_state(alpha, run_dir, deadline_s=LIMIT_S)
        assert (state.state, state.started, state.pids) == ("never-started", None, ())
        stopped = stop_node(alpha, run_dir, grace_s=0, deadline_s=LIMIT_S)
        assert (stopped.was_running, stopped.left, stopped.code) == (False, (), None)

    def test_goes_on_without_the_connection_that_started_it(self, bed: Bed, alpha: Connection, run_dir: str) -> None:
        with log_in(bed.target("alpha")) as first:
            started = start(first, run_dir, "for i in $(seq 200); do echo $i; sleep 0.01; done; exit 8")
            stream = follow_node(first, run_dir)
            next(iter(stream))
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).started == started
        data, end = collected(follow_node(alpha, run_dir))
        assert data == b"".join(b"%d\n" % number for number in range(1, 201))
        assert end.code == 8

    def test_a_second_one_of_the_same_run_is_refused(self, alpha: Connection, run_dir: str) -> None:
        start(alpha, run_dir, "sleep 600")
        with pytest.raises(HostError, match="a job of this run is already in ") as caught:
            start_again(alpha, run_dir)
        assert (caught.value.problem, caught.value.host) == ("command", "alpha")
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).state == "running"

    def test_no_variable_has_a_name_that_is_code(self, alpha: Connection, run_dir: str) -> None:
        with pytest.raises(ValueError, match="is not the name of a variable"):
            start_node(alpha, run_dir=run_dir, script="x", environment={"A;id": "1"}, deadline_s=LIMIT_S)

    @pytest.mark.parametrize("name", ["-n", "$(touch gone)", "~", "...", "\\", "größe"])
    @pytest.mark.parametrize("relative", [False, True])
    def test_lives_in_any_directory(self, alpha: Connection, home: str, name: str, relative: bool) -> None:
        place = f"{home}/{name}"
        if relative:
            place = os.path.relpath(place, alpha.run(["pwd"], deadline_s=LIMIT_S).stdout.decode().strip())
        start(alpha, place, "echo here; exit 2")
        assert collected(follow_node(alpha, place)) == (b"here\n", StreamEnd(code=2))
        assert node_state(alpha, place, deadline_s=LIMIT_S).code == 2
        assert collected(read_log(alpha, place)) == (b"here\n", StreamEnd(code=0))

    def test_is_recorded_or_does_not_run_when_the_client_is_killed(
        self, bed: Bed, alpha: Connection, home: str
    ) -> None:
        starts = textwrap.dedent("""\
            from topoplan.run.node import start_node
            print("in", flush=True)
            for place in places:
                start_node(connection, run_dir=place, script="n.sh", environment={}, deadline_s=60)
                print(place, flush=True)
            """)
        before = set(bed.processes("alpha"))  # earlier tests have left commands that go on for a while
        batches, size = 6, 8
        places = [f"{home}-{number}" for number in range(batches * size)]
        for place in places:
            upload(alpha, {"n.sh": b"touch ran; exec sleep 3000"}, place, deadline_s=LIMIT_S)
        alpha.close()
        for batch in range(batches):
            mine = places[batch * size :][:size]
            with subprocess.Popen(client_program(bed, starts, *mine), stdout=subprocess.PIPE) as process:
                assert process.stdout.readline() == b"in\n"
                for _ in range(batch // 2):
                    process.stdout.readline()
                time.sleep(0.02 + 0.017 * batch)
                process.send_signal(signal.SIGKILL)
        assert eventually(lambda: not under_way(bed, "alpha", before)), under_way(bed, "alpha", before)
        recorded = [place for place in places if Path(place, ".topoplan", "started.json").exists()]
        assert recorded
        assert eventually(lambda: all(Path(place, "ran").exists() for place in recorded))
        assert not [place for place in places if place not in recorded and Path(place, "ran").exists()]
        with log_in(bed.target("alpha")) as other:
            for place in recorded:
                assert node_state(other, place, deadline_s=LIMIT_S).state == "running"
                assert stop_node(other, place, grace_s=0, deadline_s=LIMIT_S).left == ()
        assert not [line for line in bed.processes("alpha").values() if line.startswith("sleep 3000")]


class TestFollowing:
    def test_lags_by_less_than_50_ms(self, alpha: Connection, run_dir: str) -> None:
        """At least once: others may have the processor for long. Each line is written when the last one has arrived."""
        start(alpha, run_dir, "while :; do date +%s.%N; until [ -e seen ]; do sleep 0.01; done; rm seen; done")
        stream, lags = follow_node(alpha, run_dir), [1.0]
        for item in stream.read(LIMIT_S):
            if isinstance(item, Chunk) and item.source == "stdout":
                lags.append(time.time() - float(item.data.split()[-1]))
                Path(run_dir, "seen").touch()
            if min(lags) < 0.05:
                break
        stream.close()
        assert min(lags) < 0.05

    def test_begins_where_it_is_told_to(self, alpha: Connection, run_dir: str) -> None:
        start(alpha, run_dir, "printf '0123456789\\nabc\\n'; until [ -e go ]; do sleep 0.02; done; echo end")
        assert eventually(lambda: node_state(alpha, run_dir, deadline_s=LIMIT_S).log_bytes == 15)
        stream = follow_node(alpha, run_dir, offset=4)
        late = follow_node(alpha, run_dir, offset=15)
        assert next(stream.read(LIMIT_S)) == Chunk(source="stdout", data=b"456789\nabc\n")
        alpha.run(["touch", f"{run_dir}/go"], deadline_s=LIMIT_S)
        assert collected(stream) == (b"end\n", StreamEnd(code=0))
        assert collected(late) == (b"end\n", StreamEnd(code=0))

    def test_knows_where_the_last_lines_begin(self, alpha: Connection, run_dir: str) -> None:
        start(alpha, run_dir, "printf 'one\\ntwo\\nthr'; until [ -e go ]; do sleep 0.02; done; printf 'ee\\n'")
        assert eventually(lambda: node_state(alpha, run_dir, deadline_s=LIMIT_S).log_bytes == 11)
        alpha.run(["touch", f"{run_dir}/go"], deadline_s=LIMIT_S)
        assert eventually(lambda: node_state(alpha, run_dir, deadline_s=LIMIT_S).state == "ended")
        # Whatever has arrived since is not counted.
        offsets = tail_offsets(alpha, run_dir, (0, 1, 2, 9), log_bytes=11, deadline_s=LIMIT_S)
        assert offsets == [11, 8, 4, 0]
        assert tail_offsets(alpha, f"{run_dir}/absent", (1, 2), log_bytes=0, deadline_s=LIMIT_S) == [0, 0]

    def test_loses_nothing_of_much_and_binary_output(self, alpha: Connection, run_dir: str) -> None:
        seed = bytes(range(256)) * 4096
        script = b"i=0; while [ $i -lt 100 ]; do cat block; cat block >&2; i=$((i + 1)); done; exit 3"
        upload(alpha, {"block": seed, "node 0.sh": script}, run_dir, deadline_s=LIMIT_S)
        start_again(alpha, run_dir)
        digest, expected, size = hashlib.sha256(), hashlib.sha256(), 0
        for _ in range(200):
            expected.update(seed)
        before = _peak_kib()
        for item in follow_node(alpha, run_dir).read(3 * LIMIT_S):
            if isinstance(item, Chunk):
                digest.update(item.data)
                size += len(item.data)
            else:
                assert item == StreamEnd(code=3)
        assert size == 200 * len(seed)
        assert digest.digest() == expected.digest()
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).log_bytes == size
        assert _peak_kib() - before < 64 * 1024
        data, _ = collected(follow_node(alpha, run_dir, offset=size - 10))
        assert data == seed[-10:]

    def test_ends_on_the_host_when_the_client_is_killed(self, bed: Bed, alpha: Connection, run_dir: str) -> None:
        before = bed.processes("alpha")
        start(alpha, run_dir, "while :; do echo x; sleep 0.01; done")
        follows = "from topoplan.run.node import follow_node\nlist(follow_node(connection, places[0]))"
        with subprocess.Popen(client_program(bed, follows, run_dir)) as client:
            assert eventually(lambda: any(line.startswith("tail") for line in followers(bed, before)))
            client.kill()
        assert eventually(lambda: not followers(bed, before)), followers(bed, before)
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).state == "running"

    def test_ends_on_the_host_when_the_stream_is_closed(self, bed: Bed, alpha: Connection, run_dir: str) -> None:
        before = bed.processes("alpha")
        start(alpha, run_dir, "sleep 600")
        stream = follow_node(alpha, run_dir)
        assert eventually(lambda: any(line.startswith("tail") for line in followers(bed, before)))
        stream.close()
        assert eventually(lambda: not followers(bed, before)), followers(bed, before)

    def test_ends_when_the_job_was_killed_as_a_whole(self, alpha: Connection, run_dir: str) -> None:
        started = start(alpha, run_dir, "echo up; exec sleep 600")
        stream = follow_node(alpha, run_dir)
        assert eventually(lambda: node_state(alpha, run_dir, deadline_s=LIMIT_S).log_bytes == 3)
        os.killpg(started.pid, signal.SIGKILL)
        assert collected(stream)[0] == b"up\n"
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).state == "gone"

    def test_of_many_at_once_each_has_its_end(self, alpha: Connection, home: str) -> None:
        places = [f"{home}-{number}" for number in range(6)]
        for number, place in enumerate(places):
            start(alpha, place, f"echo {number}; sleep 0.{number}; exit {number}")
        streams = {place: follow_node(alpha, place) for place in places}
        for number, place in enumerate(places):
            assert collected(streams[place]) == (f"{number}\n".encode(), StreamEnd(code=number))


def _peak_kib() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class TestStopping:
    def test_ends_all_of_a_job_that_resists(self, bed: Bed, alpha: Connection, run_dir: str) -> None:
        start(
            alpha,
            run_dir,
            """\
            trap '' TERM
            setsid sleep 4100 &
            env -i setsid sleep 4200 &
            (setsid setsid sleep 4300 &) &
            echo up
            while :; do sleep 0.05; done
            """,
        )
        assert eventually(lambda: len([x for x in bed.processes("alpha").values() if x.startswith("sleep 4")]) == 3)
        stopped = stop_node(alpha, run_dir, grace_s=0.3, deadline_s=LIMIT_S)
        assert (stopped.was_running, stopped.left, stopped.code) == (True, (), 137)
        assert not [line for line in bed.processes("alpha").values() if line.startswith("sleep 4")]
        assert node_state(alpha, run_dir, deadline_s=LIMIT_S).state == "ended"
        again = stop_node(alpha, run_dir, grace_s=0.3, deadline_s=LIMIT_S)
        assert (again.was_running, again.left, again.code) == (False, (), 137)

    def test_leaves_a_run_of_the_same_name_on_another_host_alone(self, bed: Bed, alpha: Connection, home: str) -> None:
        # The hosts of the bed share one process table, as containers of one machine may.
        with log_in(bed.target("beta")) as beta:
            for host, place in ((alpha, "a"), (beta, "b")):
                start(host, f"{home}/{place}/run", "setsid sleep 4400 & sleep 4500")
            assert stop_node(alpha, f"{home}/a/run", grace_s=LIMIT_S / 2, deadline_s=LIMIT_S).was_running
            assert node_state(beta, f"{home}/b/run", deadline_s=LIMIT_S).state == "running"
            assert eventually(lambda: len(node_state(beta, f"{home}/b/run", deadline_s=LIMIT_S).pids) >= 3)
            assert stop_node(beta, f"{home}/b/run", grace_s=LIMIT_S / 2, deadline_s=LIMIT_S).left == ()


class TestRefusals:
    """Each refusal has one clear message."""

    def test_no_such_directory(self, alpha: Connection, home: str) -> None:
        with pytest.raises(HostError) as caught:
            start_node(alpha, run_dir=f"{home}/absent", script="x", environment={}, deadline_s=LIMIT_S)
        assert str(caught.value) == (
            f"alpha: cannot enter the run directory {home}/absent: No such file or directory; "
            "check `workdir` of the host in the spec"
        )

    def test_no_such_script(self, alpha: Connection, home: str) -> None:
        upload(alpha, {"a": b""}, home, deadline_s=LIMIT_S)
        with pytest.raises(HostError, match=r"^alpha: no script x in .*; upload the bundle first$"):
            start_node(alpha, run_dir=home, script="x", environment={}, deadline_s=LIMIT_S)

    def test_a_record_that_was_edited(self, alpha: Connection, home: str) -> None:
        upload(alpha, {".topoplan/started.json": b"{}\n"}, home, deadline_s=LIMIT_S)
        for ask in (node_state, lambda *a, **k: stop_node(*a, grace_s=0, **k)):
            with pytest.raises(HostError, match=r"/\.topoplan/started\.json is damaged"):
                ask(alpha, home, deadline_s=LIMIT_S)  # type: ignore[operator]

    @pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
    @pytest.mark.parametrize(
        ("options", "reason"), [("size=64k", "No space left on device"), ("size=1m,ro", "Read-only file system")]
    )
    def test_a_place_that_cannot_be_written(self, alpha: Connection, home: str, options: str, reason: str) -> None:
        place = f"{home}/small-{time.monotonic_ns()}"
        Path(place).mkdir(parents=True)
        # On the host: each host of the bed has mounts of its own.
        made = alpha.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", place], deadline_s=LIMIT_S)
        if made.code != 0:
            pytest.skip("no mounts here")
        try:
            fill = 'cd "$1"; echo \'touch ../ran\' >n.sh; head -c 65536 /dev/zero >ballast; mount -o remount,$2 "$1"'
            assert alpha.run(fill, place, options, deadline_s=LIMIT_S).code == 0
            with pytest.raises(HostError) as caught:
                start_node(alpha, run_dir=place, script="n.sh", environment={}, deadline_s=LIMIT_S)
            assert str(caught.value) == (
                f"alpha: the job was not started, because {place}/.topoplan cannot be written: {reason}; "
                "make room, or name another `workdir` for the host in the spec"
            )
            assert node_state(alpha, place, deadline_s=LIMIT_S).state == "never-started"
            assert not Path(home, "ran").exists()
        finally:
            alpha.run(["umount", "-l", place], deadline_s=LIMIT_S)
