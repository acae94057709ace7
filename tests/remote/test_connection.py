import os
import threading
import time

import pytest

from tests.bed.bed import Bed
from tests.bed.logins import log_in
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.remote.connection import SHELL, Bell, Chunk, Connection, Stream, StreamEnd
from topoplan.remote.fanout import connect_all
from topoplan.remote.identities import Access
from topoplan.remote.upload import upload

NOISE = 24 * 2**20
"""Bytes on each output: many windows of the channel."""


def collected(stream: Stream, deadline_s: float = LIMIT_S) -> tuple[bytes, bytes, StreamEnd]:
    out = {"stdout": b"", "stderr": b""}
    for item in stream.read(deadline_s):
        if isinstance(item, StreamEnd):
            return out["stdout"], out["stderr"], item
        out[item.source] += item.data
    raise AssertionError("no end")


def put(connection: Connection, *, deadline_s: float = LIMIT_S) -> None:
    upload(connection, {"file": b"x"}, "no-such-place", deadline_s=deadline_s)


class TestRun:
    def test_keeps_the_outputs_and_the_exit_code_apart(self, alpha: Connection) -> None:
        done = alpha.run("echo out; echo err >&2; exit 3", deadline_s=LIMIT_S)
        assert (done.code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")

    def test_passes_words_on_as_they_are(self, alpha: Connection) -> None:
        words = ["a b", "$HOME", "'", '"', "`id`", "new\nline", "", "*", "-n", "\\", "é", "!x"]
        shown = b"".join(word.encode() + b"\0" for word in words)
        assert alpha.run(["printf", "%s\\0", *words], deadline_s=LIMIT_S).stdout == shown
        assert alpha.run('printf "%s\\0" "$@"', *words, deadline_s=LIMIT_S).stdout == shown

    def test_leaves_no_shell_on_the_host_that_waits_for_ever(self, alpha: Connection) -> None:
        """As if the network is cut before the script has arrived: there is a timeout, but no end of the input."""
        session = alpha.transport.open_session(timeout=LIMIT_S)
        session.exec_command(SHELL.replace("60", "0.2"))
        assert session.status_event.wait(LIMIT_S)
        assert session.recv_exit_status() > 128

    def test_gives_a_script_the_rest_of_its_standard_input(self, alpha: Connection) -> None:
        data = bytes(range(256)) * 64 + b"\necho not a command\n"
        assert alpha.run("cat", stdin=data, deadline_s=LIMIT_S).stdout == data
        assert alpha.run(["cat"], stdin=data, deadline_s=LIMIT_S).stdout == data

    def test_tells_a_script_with_a_mistake_from_one_that_fails(self, alpha: Connection) -> None:
        with pytest.raises(HostError, match=r"it did not run topoplan's script: bash: .*if then"):
            alpha.run("echo before; if then", deadline_s=LIMIT_S)

    def test_takes_much_on_both_outputs_at_once(self, alpha: Connection) -> None:
        script = "head -c $1 /dev/zero >&2 & head -c $1 /dev/zero; wait"
        done = alpha.run(script, str(NOISE), deadline_s=LIMIT_S, keep_bytes=2 * NOISE)
        assert (len(done.stdout), len(done.stderr)) == (NOISE, NOISE)

    def test_takes_all_of_one_output_before_the_other(self, alpha: Connection) -> None:
        done = alpha.run("head -c $1 /dev/zero >&2; echo end", str(2**23), deadline_s=LIMIT_S, keep_bytes=2**24)
        assert (len(done.stderr), done.stdout) == (2**23, b"end\n")

    def test_sends_and_takes_binary_data_that_is_larger_than_a_window(self, alpha: Connection) -> None:
        data = os.urandom(5 * 2**20)
        assert alpha.run(["cat"], stdin=data, deadline_s=LIMIT_S, keep_bytes=2**24).stdout == data

    def test_keeps_the_first_and_the_last_part_of_too_much(self, alpha: Connection) -> None:
        done = alpha.run("echo first; head -c 1000000 /dev/zero; echo last", deadline_s=LIMIT_S, keep_bytes=1000)
        assert done.stdout.startswith(b"first\n")
        assert done.stdout.endswith(b"last\n")
        assert len(done.stdout) == 1000

    def test_ends_by_the_deadline_and_says_what_was_last_said(self, alpha: Connection) -> None:
        started = time.monotonic()
        with pytest.raises(HostError, match=r"^alpha: the script did not end within 2 s: still waiting; ") as caught:
            alpha.run("echo still waiting; sleep 600", deadline_s=2)
        assert time.monotonic() - started < LIMIT_S
        assert caught.value.problem == "deadline"
        assert alpha.run(["true"], deadline_s=LIMIT_S).code == 0

    def test_does_not_wait_for_standard_input_that_nobody_reads(self, alpha: Connection) -> None:
        assert alpha.run(["true"], stdin=b"x" * 2**23, deadline_s=LIMIT_S).code == 0
        with pytest.raises(HostError, match="`sleep 600` did not end"):
            alpha.run(["sleep", "600"], stdin=b"x" * 2**23, deadline_s=2)

    def test_knows_the_end_by_a_signal(self, alpha: Connection) -> None:
        assert alpha.run(["sh", "-c", "kill -9 $$"], deadline_s=LIMIT_S).code in (None, 137)
        assert alpha.run("kill -9 $$", deadline_s=LIMIT_S).code in (None, 137)

    def test_names_a_command_that_is_not_there(self, alpha: Connection) -> None:
        done = alpha.run(["no-such-command"], deadline_s=LIMIT_S)
        assert done.code == 127
        assert b"no-such-command" in done.stderr

    def test_starts_nothing_on_a_connection_that_is_closed(self, bed: Bed) -> None:
        connection = log_in(bed.target("alpha"))
        connection.close()
        connection.close()
        with pytest.raises(HostError, match="the connection was lost"):
            connection.run(["true"], deadline_s=LIMIT_S)

    def test_is_told_when_the_host_starts_no_more_commands(self, bed: Bed) -> None:
        with bed.restarted("beta", "MaxSessions 1"), log_in(bed.target("beta")) as connection:
            held = connection.start(["sleep", "600"])
            with pytest.raises(HostError, match="MaxSessions") as caught:
                connection.run(["true"], deadline_s=LIMIT_S)
            held.close()
        assert caught.value.problem == "command"

    def test_comes_after_another_where_the_host_allows_one_at_a_time(self, bed: Bed) -> None:
        with bed.restarted("beta", "MaxSessions 1"), log_in(bed.target("beta")) as connection:
            assert [connection.run("true", deadline_s=LIMIT_S).code for _ in range(30)] == [0] * 30

    def test_shows_what_a_host_says_that_starts_no_shell(self, bed: Bed) -> None:
        with (
            bed.restarted("beta", "ForceCommand echo This account is for backups only; exit 3"),
            log_in(bed.target("beta")) as connection,
        ):
            for use in (lambda: connection.run("echo out", deadline_s=LIMIT_S), lambda: put(connection)):
                with pytest.raises(
                    HostError, match="it did not run topoplan's script: This account is for backups"
                ) as no:
                    use()
                assert no.value.remedy == f"check whether `ssh {bed.user}@beta bash` works"

    def test_tells_a_login_shell_that_waits(self, bed: Bed) -> None:
        with bed.restarted("beta", "ForceCommand sleep 6000"), log_in(bed.target("beta")) as connection:
            with pytest.raises(HostError, match="its login shell did not start topoplan's script within 2 s"):
                connection.run("echo out", deadline_s=2)
            with pytest.raises(HostError, match="its login shell did not start topoplan's script within 2 s"):
                put(connection, deadline_s=2)

    def test_does_not_wait_for_a_host_that_stopped_answering(self, bed: Bed) -> None:
        with log_in(bed.target("beta")) as connection, bed.frozen("beta"):
            started = time.monotonic()
            with pytest.raises(HostError, match=r"^beta: `true` was not started within 0\.5 s") as caught:
                connection.run(["true"], deadline_s=0.5)
        assert time.monotonic() - started < LIMIT_S
        assert caught.value.problem == "deadline"


class TestStream:
    def test_shows_output_when_it_comes(self, alpha: Connection) -> None:
        stream = alpha.start("echo one; read -r word; echo got $word; exit 4", hold_stdin=True)
        items = stream.read(LIMIT_S)
        assert next(items) == Chunk(source="stdout", data=b"one\n")
        stream.write(b"two\n")
        assert next(items) == Chunk(source="stdout", data=b"got two\n")
        assert list(items) == [StreamEnd(code=4)]
        assert list(stream) == []

    def test_stops_at_the_deadline_and_goes_on_after_it(self, alpha: Connection) -> None:
        stream = alpha.start("read -r word; echo $word", hold_stdin=True)
        assert list(stream.read(0.1)) == []
        stream.write(b"on\n")
        assert collected(stream) == (b"on\n", b"", StreamEnd(code=0))

    def test_lets_the_command_run_when_it_is_closed(self, bed: Bed) -> None:
        with log_in(bed.target("alpha")) as connection:
            stream = connection.start(["sleep", "4170"])
            assert eventually(lambda: "sleep 4170" in bed.processes("alpha").values())
            stream.close()
        assert not eventually(lambda: "sleep 4170" not in bed.processes("alpha").values(), 0.3)
        with log_in(bed.target("alpha")) as connection:
            pid = next(pid for pid, line in bed.processes("alpha").items() if line == "sleep 4170")
            connection.run(["kill", str(pid)], deadline_s=LIMIT_S)
        assert eventually(lambda: "sleep 4170" not in bed.processes("alpha").values())

    def test_ends_what_looks_at_its_standard_input(self, bed: Bed) -> None:
        watched = "sleep 4180 & pid=$!; { cat >/dev/null; kill $pid; } & wait $pid"
        for end in ("stream", "connection"):
            connection = log_in(bed.target("alpha"))
            # A script's standard input is the rest of what bash reads, also for what it starts in the background.
            stream = connection.start(f"exec 3<&0; {watched.replace('cat', 'cat <&3')}", hold_stdin=True)
            assert eventually(lambda: "sleep 4180" in bed.processes("alpha").values())
            (stream if end == "stream" else connection).close()
            assert eventually(lambda: "sleep 4180" not in bed.processes("alpha").values())
            connection.close()

    def test_rings_one_bell_for_many_hosts(self, bed: Bed) -> None:
        connections = {name: log_in(bed.target(name)) for name in ("alpha", "bare")}
        script = "while read -r word; do echo $word; done; exit $1"
        streams = {
            name: one.start(script, str(code), hold_stdin=True) for code, (name, one) in enumerate(connections.items())
        }
        bell = Bell()
        for stream in streams.values():
            stream.ring(bell)

        def heard() -> list[tuple[str, Chunk | StreamEnd]]:
            found: list[tuple[str, Chunk | StreamEnd]] = []
            while not found:
                bell.listen(LIMIT_S)
                found = [(name, item) for name, stream in streams.items() for item in stream.poll()]
            return found

        for name in ("bare", "alpha", "alpha", "bare"):
            streams[name].write(b"hello\n")
            assert heard() == [(name, Chunk(source="stdout", data=b"hello\n"))]
        for code, (name, stream) in enumerate(streams.items()):
            stream.end_stdin()
            assert heard() == [(name, StreamEnd(code=code))]
        for connection in connections.values():
            connection.close()


class TestAConnectionThatBreaks:
    def test_by_a_cut_cable_is_noticed_after_some_seconds(self, cables: Bed) -> None:
        name = "beta"
        with log_in(cables.target(name)) as connection:
            stream = connection.start("echo up; sleep 600")
            assert next(stream.read(LIMIT_S)) == Chunk(source="stdout", data=b"up\n")
            cables.cut(name)
            started = time.monotonic()
            try:
                _, _, end = collected(stream)
                assert time.monotonic() - started < LIMIT_S / 2  # long before TCP by itself would
            finally:
                cables.heal(name)
            assert (end.lost.host, end.lost.problem) == (name, "lost")
            assert "may still be running" in end.lost.remedy
            assert not connection.is_alive
        cables.restart(name)

    def test_behind_a_jump_host_is_noticed_too(self, cables: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.remote.wire._PROBE_S", 0.3)
        monkeypatch.setattr("topoplan.remote.wire._SSH_SILENT_S", 3.0)
        with log_in(cables.target("inside", "jump")) as connection:
            time.sleep(4)  # sshd answers, so the connection is kept
            assert connection.run(["true"], deadline_s=LIMIT_S).code == 0
            with cables.partition("jump", "inside"):
                started = time.monotonic()
                with pytest.raises(HostError, match="the connection was lost"):
                    connection.run(["sleep", "600"], deadline_s=600)
                assert time.monotonic() - started < LIMIT_S
        cables.restart("inside")

    def test_by_the_end_of_its_sshd_is_noticed_at_once(self, bed: Bed) -> None:
        with log_in(bed.target("beta")) as connection:
            stream = connection.start("echo up; sleep 600")
            next(stream.read(LIMIT_S))
            bed.restart("beta")
            assert collected(stream)[2].lost is not None

    def test_for_two_seconds_only_loses_nothing(self, cables: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.remote.wire._TCP_SILENT_S", LIMIT_S)  # the cut may last longer on a busy machine
        monkeypatch.setattr("topoplan.remote.wire._SSH_SILENT_S", LIMIT_S)
        with log_in(cables.target("beta")) as connection:
            stream = connection.start("for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done")
            first = next(stream.read(LIMIT_S))
            cables.cut("beta")
            time.sleep(1.5)
            cables.heal("beta")
            assert (first.data + collected(stream)[0]).split() == [b"%d" % number for number in range(1, 7)]


def test_a_command_that_ends_while_it_is_fed_does_no_harm(bed: Bed) -> None:
    with log_in(bed.target("alpha")) as connection:
        for _ in range(30):
            assert connection.run(["true"], stdin=b"x" * 2**18, deadline_s=90).code == 0
        assert connection.is_alive


def test_connections_that_end_together_leave_their_jump_host_to_the_others(bed: Bed) -> None:
    names = [f"node{index}" for index in range(8)]
    targets = {name: bed.target("inside", "jump", name=name) for name in names}
    connections = connect_all(targets, Access(), deadline_s=90)
    last = connections.pop(names[-1])
    threads = [threading.Thread(target=one.close) for one in connections.values() if isinstance(one, Connection)]
    assert len(threads) == len(names) - 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(5):
        assert last.run(["true"], deadline_s=90).code == 0
    last.close()
