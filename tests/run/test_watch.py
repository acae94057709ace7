"""Watching jobs on real sshd hosts; a broken connection is one whose sshd has ended."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.bed import small_disk
from tests.bed.watched import Jobs, ends, sees
from tests.waiting import LIMIT_S, wait_until
from topoplan.errors import HostError
from topoplan.run.following import LogCopy
from topoplan.run.progress import Progress


class TestAConnectionThatBreaks:
    def test_again_and_again_misses_and_doubles_no_byte(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.reachability.REPORT_AFTER_S", LIMIT_S)
        jobs.start(alpha="for ((i = 0; i < 400; i++)); do printf 'line %d \\377\\n' $i; sleep 0.002; done; exit 6")
        with jobs.watch(jobs.node("alpha")) as watch:
            for count in (50, 150, 250):
                assert sees(watch, lambda count=count: len(jobs.of("line")) >= count)
                jobs.bed.end_sessions("alpha")
            assert ends(watch)
        assert jobs.of("line") == [f"line {number} \\xff" for number in range(400)]
        assert jobs.copy("alpha").read_bytes() == jobs.log("alpha")
        assert jobs.of("connection") == []
        assert (watch.nodes[0].code, watch.nodes[0].failure) == (6, "ended with exit code 6")

    def test_hides_no_end_that_comes_meanwhile(self, jobs: Jobs) -> None:
        jobs.start(alpha="echo up; until [ -e go ]; do sleep 0.02; done; echo last; exit 3")
        with jobs.watch(jobs.node("alpha")) as watch:
            assert sees(watch, lambda: jobs.of("line"))
            jobs.let_in.clear()
            jobs.bed.end_sessions("alpha")
            assert sees(watch, lambda: watch.nodes[0].unreachable)
            jobs.go("alpha")
            jobs.ended("alpha")
            assert (jobs.of("line"), watch.nodes[0].is_over) == (["up"], False)
            jobs.let_in.set()
            assert ends(watch)
        assert jobs.of("line") == ["up", "last"]
        assert (watch.nodes[0].code, watch.nodes[0].unreachable, jobs.of("ended")) == (
            3,
            None,
            ["ended with exit code 3"],
        )

    def test_while_its_host_is_asked_is_told_too(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs.start(alpha="echo up; exit 3")
        jobs.ended("alpha")
        node = jobs.node("alpha")
        node.connection.close()
        with jobs.watch(node) as watch:
            assert ends(watch)
        assert (jobs.of("line"), watch.nodes[0].code) == (["up"], 3)

    def test_for_long_is_told_and_no_failure(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.reachability.REPORT_AFTER_S", 0.1)
        jobs.start(alpha="echo up; until [ -e go ]; do sleep 0.02; done", beta="echo up; sleep 600")
        with jobs.watch(jobs.node("alpha"), jobs.node("beta")) as watch:
            assert sees(watch, lambda: len(jobs.of("line")) == 2)
            jobs.let_in.clear()
            jobs.bed.end_sessions("alpha")
            assert sees(watch, lambda: jobs.of("connection", "alpha"))
            assert not watch.until(lambda: any(node.is_over for node in watch.nodes), deadline_s=1)
            jobs.let_in.set()
            jobs.go("alpha")
            assert sees(watch, lambda: watch.nodes[0].is_over)
        states = [event.data["state"] for event in jobs.events if event.kind == "connection"]
        assert (states, jobs.of("connection")[0]) == (
            ["lost", "back"],
            f"{jobs.bed['alpha'].address} is unreachable (nobody is let in); its job may still be running there."
            " Retrying",
        )
        assert jobs.of("ended", "alpha") == ["ended with exit code 0"]

    def test_for_longer_than_is_wanted_is_a_host_that_is_given_up(self, jobs: Jobs) -> None:
        jobs.start(alpha="printf 'no end'; sleep 600", beta="exit 0")
        jobs.let_in.clear()
        with jobs.watch(jobs.node("alpha"), jobs.node("beta"), lost_after_s=0.2) as watch:
            assert sees(watch, lambda: jobs.copy("alpha").read_bytes() == b"no end" and watch.nodes[1].is_over)
            jobs.bed.end_sessions("alpha")
            assert ends(watch)
        alpha, beta = watch.nodes
        assert (alpha.ended, alpha.failure) == (False, "its host was unreachable for 0.2 s")
        assert str(alpha.given_up) == "alpha: nobody is let in"
        assert jobs.of("failure") == [f"{alpha.failure}: {alpha.given_up}"]
        assert jobs.of("line", "alpha") == ["no end"]
        assert (beta.ended, beta.failed) == (True, False)

    def test_to_all_hosts_gives_none_up(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        lost = HostError("no answer", host="it", problem="timeout")
        monkeypatch.setattr("tests.bed.watched.NOT_LET_IN", lost)
        jobs.start(alpha="echo up; sleep 600", beta="echo up; sleep 600")
        with jobs.watch(jobs.node("alpha"), jobs.node("beta"), lost_after_s=3) as watch:
            assert sees(watch, lambda: len(jobs.of("line")) == 2)
            jobs.let_in.clear()
            jobs.bed.end_sessions("alpha")
            jobs.bed.end_sessions("beta")
            wait_until(lambda: not any(node.connection.is_alive for node in watch.nodes), "both connections are lost")
            assert sees(watch, lambda: watch.is_offline)
            assert [node.is_over for node in watch.nodes] == [False, False]
            jobs.let_in.set()
            assert sees(watch, lambda: not any(node.unreachable for node in watch.nodes))
            assert not watch.is_offline

    def test_shows_ends_that_come_meanwhile_in_the_order_in_which_they_were(self, jobs: Jobs) -> None:
        wait = "echo up; until [ -e go ]; do sleep 0.02; done; exit {}"
        jobs.start(alpha=wait.format(4), beta=wait.format(5))
        with jobs.watch(jobs.node("alpha"), jobs.node("beta")) as watch:
            assert sees(watch, lambda: len(jobs.of("line")) == 2)
            jobs.let_in.clear()
            jobs.bed.end_sessions("alpha")
            assert sees(watch, lambda: watch.nodes[0].unreachable)
            jobs.bed.end_sessions("beta")
            for name in ("beta", "alpha"):
                jobs.go(name)
                jobs.ended(name)
            jobs.ended_before("beta", 60)
            jobs.let_in.set()
            assert ends(watch)
        alpha, beta = (node.ended_at_s for node in watch.nodes)
        assert beta < alpha

    def test_to_a_host_without_the_run_directory_makes_no_job_that_runs_one_that_was_never_started(
        self, jobs: Jobs
    ) -> None:
        jobs.start(alpha="echo up; until [ -e go ]; do sleep 0.02; done; echo last; exit 3")
        run_dir = Path(jobs.run_dir("alpha"))
        with jobs.watch(jobs.node("alpha")) as watch:
            assert sees(watch, lambda: jobs.of("line"))
            run_dir.rename(run_dir.with_name("elsewhere"))
            jobs.bed.end_sessions("alpha")
            assert sees(watch, lambda: jobs.of("note"))
            [node] = watch.nodes
            assert (node.state and node.state.state, node.unreachable, node.is_over) == ("running", None, False)
            run_dir.with_name("elsewhere").rename(run_dir)
            jobs.go("alpha")
            assert ends(watch)
        assert (jobs.of("line"), node.code) == (["up", "last"], 3)
        assert jobs.of("note") == ["its run directory is missing: its job goes on, but its log cannot be read"]


class TestAnEnd:
    def test_is_not_hidden_by_what_the_job_has_left_running(self, jobs: Jobs) -> None:
        noise = "import time\nwhile True:\n    print('noise', flush=True)\n    time.sleep(0.001)"
        jobs.start(alpha=f"{sys.executable} -c {shlex.quote(noise)} & echo up; sleep 0.5; exit 3")
        with jobs.watch(jobs.node("alpha")) as watch:
            assert ends(watch)
            jobs.stop("alpha")
        assert (watch.nodes[0].failure, watch.nodes[0].code) == ("ended with exit code 3", 3)
        assert jobs.log("alpha").startswith(jobs.copy("alpha").read_bytes())


class TestTheCopy:
    def test_is_given_up_when_the_disk_is_full_and_stays_a_beginning(self, jobs: Jobs) -> None:
        jobs.start(alpha="seq 20000; until [ -e go ]; do sleep 0.02; done; seq 20000")
        with small_disk(jobs.logs, "size=16k"):
            with jobs.watch(jobs.node("alpha")) as watch:
                assert sees(watch, lambda: jobs.of("note"))
                jobs.go("alpha")
                assert ends(watch)
            kept = jobs.copy("alpha").read_bytes()
        assert len(jobs.of("line")) == 40_000
        assert 0 < len(kept) <= 16 * 1024
        assert jobs.log("alpha").startswith(kept)
        [note] = jobs.of("note")
        assert note == (
            f"the local copy of its log ends here, {jobs.copy('alpha')}: No space left on device;"
            " the whole log is on its host"
        )

    def test_is_not_kept_where_it_cannot_be(self, jobs: Jobs) -> None:
        jobs.start(alpha="echo up")
        with jobs.watch(jobs.node("alpha", log=jobs.logs / "absent" / "log")) as watch:
            assert ends(watch)
        assert jobs.of("line") == ["up"]
        assert "its log is not copied to this machine, " in jobs.of("note")[0]

    def test_is_continued_by_the_next_watch(self, jobs: Jobs) -> None:
        jobs.start(alpha="seq 500; until [ -e go ]; do sleep 0.02; done; seq 501 600")
        with jobs.watch(jobs.node("alpha")) as watch:
            assert sees(watch, lambda: len(jobs.of("line")) == 500)
        with jobs.copy("alpha").open("r+b") as file:
            file.truncate(1000)  # as if a client had been killed there
        with jobs.watch(jobs.node("alpha", tail_lines=2)) as watch:
            assert sees(watch, lambda: jobs.of("line"))
            jobs.go("alpha")
            assert ends(watch)
        assert jobs.of("line") == [str(number) for number in range(499, 601)]
        assert jobs.copy("alpha").read_bytes() == jobs.log("alpha")
        with jobs.watch(jobs.node("alpha", tail_lines=1)) as watch:
            assert ends(watch)
        assert jobs.of("line") == ["600"]
        assert watch.nodes[0].tail.lines() == [str(number) for number in range(201, 601)]

    def test_that_another_process_continues_is_left_to_it(self, jobs: Jobs) -> None:
        jobs.start(alpha="seq 3")
        jobs.ended("alpha")
        other = LogCopy.open(jobs.copy("alpha"))
        with jobs.watch(jobs.node("alpha", tail_lines=1)) as watch:
            assert ends(watch)
        assert (jobs.of("line"), jobs.of("note"), other.size_bytes) == (["3"], [], 0)
        other.close()

    def test_that_has_more_than_the_log_is_not_of_it(self, jobs: Jobs) -> None:
        jobs.copy("alpha").write_bytes(b"x" * 100)
        jobs.start(alpha="echo up")
        jobs.ended("alpha")
        with jobs.watch(jobs.node("alpha", tail_lines=1)) as watch:
            assert ends(watch)
        assert jobs.of("line") == ["up"]
        assert jobs.of("note")[0].endswith("it has more than the log on its host")
        assert jobs.copy("alpha").read_bytes() == b"x" * 100

    def test_that_lacks_much_is_not_waited_for(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.following.MOST_BEHIND_BYTES", 1000)
        jobs.start(alpha="seq 1000")
        jobs.ended("alpha")
        with jobs.watch(jobs.node("alpha", tail_lines=1)) as watch:
            assert ends(watch)
        assert jobs.of("line") == ["1000"]
        assert "0 MiB are missing; `topoplan runs logs` has them" in jobs.of("note")[0]
        assert jobs.copy("alpha").read_bytes() == b""


class TestWhatIsSaid:
    def test_output_as_it_is_for_who_takes_it(self, jobs: Jobs) -> None:
        jobs.start(alpha="printf 'a\\nb\\r\\n\\377'; until [ -e go ]; do sleep 0.02; done; printf '\\0c'")
        jobs.said("alpha", b"a\nb\r\n\xff")
        taken: list[tuple[str, bytes]] = []
        node = jobs.node("alpha", log=None, tail_lines=2)
        with jobs.watch(node, on_data=lambda *data: taken.append(data)) as watch:
            assert sees(watch, lambda: taken)
            jobs.bed.end_sessions("alpha")
            jobs.go("alpha")
            assert ends(watch)
        assert b"".join(data for _, data in taken) == b"b\r\n\xff\0c"
        assert jobs.of("line") == []

    def test_where_training_is_also_from_lines_that_are_not_shown(self, jobs: Jobs) -> None:
        jobs.start(alpha='for i in 1 2 3; do echo "  $i%|#| $i/100 [00:0$i<01:00, 1.00s/it]"; done; echo end')
        jobs.ended("alpha")
        with jobs.watch(jobs.node("alpha", tail_lines=1), progress=Progress()) as watch:
            assert ends(watch)
        statuses = [event.status for event in jobs.events if event.status is not None]
        assert [(status.step, status.total_steps) for status in statuses] == [(3, 100)]
        assert jobs.of("line") == ["end"]

    @pytest.mark.parametrize("tail_lines", [0, 10, None])
    def test_no_rate_from_steps_that_were_made_before(self, jobs: Jobs, tail_lines: int | None) -> None:
        step = """echo "{'loss': 1.5, 'epoch': 0.1}";"""
        waits = "until [ -e go ]; do sleep 0.05; done;"
        jobs.start(alpha=f"for i in $(seq 30); do {step} done; echo up; {waits} {step} sleep 600")
        wait_until(lambda: jobs.log("alpha").endswith(b"up\n"), "alpha has made 30 steps")
        progress = Progress(total_steps=300)
        with jobs.watch(jobs.node("alpha", tail_lines=tail_lines), progress=progress) as watch:
            assert sees(watch, lambda: progress.step == 30)
            watch.until(lambda: False, deadline_s=2.2)
            jobs.go("alpha")
            assert sees(watch, lambda: progress.step == 31)
        assert (progress.status().step_s, progress.status().left_s) == (None, None)

    def test_who_is_waited_for_once_the_others_have_ended(self, jobs: Jobs) -> None:
        jobs.start(alpha="exit 0", beta="sleep 600")
        with jobs.watch(jobs.node("alpha"), jobs.node("beta"), note_after_s=0.05) as watch:
            assert sees(watch, lambda: jobs.of("note"))
            watch.until(lambda: False, deadline_s=0.3)
        [note] = jobs.of("note")
        assert re.fullmatch(r"alpha ended \d+ s ago; waiting for beta", note)

    def test_ends_in_the_order_in_which_they_were_whatever_the_clocks_say(self, jobs: Jobs) -> None:
        jobs.start(alpha="exit 4", beta="exit 5")
        jobs.ended("alpha", "beta")
        for name, ago_s, clock in (("alpha", 60, "3 hours ago"), ("beta", 120, "tomorrow")):
            end = jobs.ended_before(name, ago_s)
            subprocess.run(["touch", "-d", clock, str(end)], check=True)  # with a wrong modification time on the host
        with jobs.watch(jobs.node("alpha"), jobs.node("beta")) as watch:
            assert ends(watch)
        alpha, beta = (node.ended_at_s for node in watch.nodes)
        assert 30 < alpha - beta < 90

    def test_a_job_that_is_stopped_has_not_failed(self, jobs: Jobs) -> None:
        jobs.start(alpha="sleep 600", beta="sleep 610")
        with jobs.watch(jobs.node("alpha"), jobs.node("beta")) as watch:
            assert sees(watch, lambda: all(node.state for node in watch.nodes))
            watch.stopping = True
            jobs.stop("alpha")
            jobs.stop("beta")
            assert ends(watch)
        assert jobs.of("ended") == ["stopped, exit code 143"] * 2
        assert not any(node.failed for node in watch.nodes)
