import threading
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from tests.waiting import LIMIT_S, wait_until


def test_lines_of_several_nodes_begin_with_the_node(cli: Cli, live: LiveRun) -> None:
    live.start("echo a; printf b", "echo c >&2")
    live.wait_for(["ended", "ended"])
    shown = cli("logs")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == "[node-00] a\n[node-00] b\n[node-01] c\n"
    assert cli("logs", "--tail", "1").out == "[node-00] b\n[node-01] c\n"


def test_a_terminal_obeys_nothing_in_a_log_unless_it_is_asked_for_raw(
    live: LiveRun, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    live.start("printf '\\377\\000 \\033[31mred\\n10%%\\r20%%\\r\\nx'")
    live.wait_for(["ended"])
    from topoplan.cli.main import main

    def logs(*options: str) -> bytes:
        with pytest.raises(SystemExit) as stop:
            main(["logs", "--node", "0", *options])
        assert stop.value.code == 0
        return capfdbinary.readouterr().out

    assert logs() == logs("-f") == b"\\xff\\x00 red\n20%\nx\n"
    assert logs("--raw") == logs("--raw", "-f") == b"\xff\x00 \x1b[31mred\n10%\r20%\r\nx"


def test_follows_until_the_jobs_have_ended(cli: Cli, live: LiveRun) -> None:
    live.start("echo one; until [ -e go ]; do sleep 0.02; done; echo two; exit 3")
    live.wait_for_log(0, b"one\n")
    with live.host(0) as host:
        timer = threading.Timer(0.3, lambda: host.run(["touch", f"{live.record.nodes[0].run_dir}/go"], deadline_s=30))
        timer.start()
        shown = cli("logs", "-f", "--node", "0")
        timer.join()
    assert (shown.code, shown.out) == (0, "one\ntwo\n")


def test_follows_on_where_the_connection_is_lost(
    live: LiveRun, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topoplan.run.reachability.REPORT_AFTER_S", LIMIT_S)
    live.start("seq 5; printf '\\377\\r'; until [ -e go ]; do sleep 0.02; done; printf 'two'; exit 3")
    live.wait_for_log(0, b"1\n2\n3\n4\n5\n\xff\r")
    from topoplan.cli.main import main

    def break_off() -> None:
        wait_until(
            lambda: any(line.startswith("tail -c") for line in live.bed.processes("alpha").values()), "it follows"
        )
        live.bed.end_sessions("alpha")
        Path(live.record.nodes[0].run_dir, "go").touch()

    breaker = threading.Thread(target=break_off)
    breaker.start()
    with pytest.raises(SystemExit) as stop:
        main(["logs", "-f", "--node", "0", "--tail", "2", "--raw"])
    breaker.join()
    shown = capfdbinary.readouterr()
    assert (stop.value.code, shown.out, shown.err) == (0, b"5\n\xff\rtwo", b"")


def test_follows_several_nodes_by_whole_lines(cli: Cli, live: LiveRun) -> None:
    live.start("printf a; sleep 0.3; printf 'b\\nc'", "printf 1; sleep 0.2; printf '2\\n3'")
    shown = cli("logs", "-f")
    assert (shown.code, shown.err) == (0, "")
    assert sorted(shown.out.splitlines()) == ["[node-00] ab", "[node-00] c", "[node-01] 12", "[node-01] 3"]


def test_a_host_that_cannot_be_reached_is_shown_from_the_copy(cli: Cli, live: LiveRun) -> None:
    live.start("echo here", "echo there")
    live.wait_for(["ended", "ended"])
    with live.unreachable(1):
        shown = cli("logs")
        assert (shown.code, shown.out) == (1, "[node-00] here\n")
        assert "nothing listens on port 9" in shown.err
        assert "there is no copy of its log on this machine" in shown.err
        live.record.log(live.record.nodes[1]).write_bytes(b"old\ncopy\n")
        shown = cli("logs", "--tail", "1")
        assert (shown.code, shown.out) == (1, "[node-01] copy\n[node-00] here\n")
        assert "which may lack the end" in shown.err


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_a_node_that_was_never_started_has_none(cli: Cli, live: LiveRun, follow: tuple[str, ...]) -> None:
    shown = cli("logs", *follow, "--node", "1")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == "topoplan: node-01: no log on beta; its job was not started, or was removed\n"


def test_a_node_that_there_is_not(cli: Cli, live: LiveRun) -> None:
    shown = cli("logs", "--node", "2")
    assert (shown.code, shown.err) == (2, "topoplan: --node: no node 2 in run live-1; expected 0 to 1\n")
