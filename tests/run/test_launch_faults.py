"""Launches on real sshd hosts with faults: the right host is blamed, the others are stopped, nothing is left behind."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Hiding, new_key, small_disk, under_way
from tests.bed.jobs import LABELS, NAMES, SETTINGS, After, Hosts, Once, Ran, both, read_until
from tests.bundle.samples import QWEN3_8B
from tests.bundle.test_node_script import fill
from tests.waiting import LIMIT_S, wait_until
from topoplan.hosts.result import Result
from topoplan.remote.connection import Connection
from topoplan.run import record as records
from topoplan.run.events import Event
from topoplan.run.node import start_node
from topoplan.run.record import Started

LONG = "echo begun; sleep 600"


@contextlib.contextmanager
def released(job: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Yield a function that does a job once; it is done at the end if it was not called."""
    left = [job]

    def once() -> None:
        if left:
            left.pop()()

    try:
        yield once
    finally:
        once()


def states(ran: Ran) -> list[str]:
    return [event.data["state"] for event in ran.events if event.kind == "connection"]


class TestAJobThatEndsWell:
    def test_shows_the_output_of_all_nodes_and_keeps_it_byte_for_byte(self, hosts: Hosts) -> None:
        hosts.does("printf 'out\\n'; printf 'err\\n' >&2; printf 'no end'")
        ran = hosts.launch()
        assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
        record = records.load()
        assert (record.state, record.code) == ("ended", 0)
        for index in range(4):
            lines = ran.of("line", f"node-{index:02d}")
            assert lines[-3:] == ["out", "err", "no end"]
            log = (record.directory() / f"node-{index:02d}.log").read_bytes()
            assert log == (Path(record.nodes[index].run_dir) / ".topoplan" / "log").read_bytes()
            assert log.endswith(b"out\nerr\nno end")

    def test_writes_what_it_wants_for_as_long_as_it_wants(self, hosts: Hosts) -> None:
        """More than anybody reads, invalid text, and long after the others have ended."""
        hosts.does(
            "exit 0",
            two="(base64 -w 200 /dev/urandom | head -c 12000000) & base64 /dev/urandom | head -c 8000000 >&2; wait",
            three=f"until [ -e {hosts.root}/go ]; do sleep 0.02; done; echo late",
            four=r"head -c 300000 /dev/urandom; printf '\n\e[31mred\e[0m \a\xff\n'",
        )
        ran = hosts.launch(
            on=Once("ended with exit code 0", (hosts.root / "go").touch, "node-00", "node-01", "node-03")
        )
        assert ran.outcome.code == 0
        record = records.load()
        there = (Path(record.nodes[1].run_dir) / ".topoplan" / "log").read_bytes()
        assert len(there) >= 20_000_000
        here = (record.directory() / "node-01.log").read_bytes()
        assert hashlib.sha256(here).digest() == hashlib.sha256(there).digest()
        assert (ran.of("line", "node-02")[-1], ran.events[-1].node) == ("late", "node-02")
        lines = ran.of("line", "node-03")
        assert all(line.isprintable() for line in lines)
        assert lines[-1] == "red \\x07\\xff"
        assert (record.directory() / "node-03.log").stat().st_size > 300_000

    def test_shares_a_work_directory_with_somebody_who_was_there_first(self, hosts: Hosts) -> None:
        hosts.does("exit 0")
        for name in NAMES:
            hosts.workdir(name).chmod(0o1777)
            theirs = hosts.workdir(name) / "topoplan-runs"
            theirs.mkdir()
            theirs.chmod(0o777)
            os.chown(theirs, 4242, 4242)
        assert hosts.launch().outcome.code == 0
        for node, name in zip(records.load().nodes, NAMES, strict=True):
            assert not list((hosts.workdir(name) / "topoplan-runs").iterdir())
            run_dir = Path(node.run_dir)
            assert run_dir.is_relative_to(hosts.workdir(name))
            files = {path.name for path in run_dir.iterdir()}
            assert files == {".topoplan", "train.yaml", "hosts.json", "plan.json", "README.md", node.script}
            assert re.fullmatch(rf"{records.load().run_id}-[0-9a-f]{{16}}", run_dir.name)
            assert {stat.S_IMODE(place.stat().st_mode) for place in (run_dir, *run_dir.parents[:2])} == {0o700}


class TestAJobThatFails:
    def test_blames_the_first_node_and_stops_the_others(self, hosts: Hosts) -> None:
        hosts.does(LONG, three="echo boom; sleep 0.3; exit 3")
        ran = hosts.launch()
        hosts.assert_nothing_is_left()
        assert (ran.failure.node, ran.failure.what, ran.failure.tail[-1]) == (
            "node-02",
            "ended with exit code 3",
            "boom",
        )
        assert ran.failure.host == hosts.bed["three"].address
        assert (ran.outcome.end, ran.outcome.code) == ("failed", 3)
        record = records.load()
        assert (record.state, record.code, record.nodes[2].code) == ("failed", 3, 3)

    def test_notices_that_all_processes_of_a_node_were_killed(self, hosts: Hosts) -> None:
        hosts.does(LONG)

        def kill_all() -> None:
            # All at one moment, or the first process still records how the others ended.
            started = Path(records.load().nodes[3].run_dir) / ".topoplan" / "started.json"
            os.killpg(json.loads(started.read_text())["session"], signal.SIGKILL)

        ran = hosts.launch(on=Once("begun", kill_all, "node-03"))
        assert (ran.failure.node, ran.outcome.code) == ("node-03", 1)
        assert "killed" in ran.failure.what

    def test_says_what_the_script_of_the_node_says_about_a_port_that_is_taken(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        code = (
            f"import socket, time; s = socket.create_server(('0.0.0.0', {hosts.bundle.draft.master_port}));"
            " print(1, flush=True); time.sleep(600)"
        )
        inside = ["ip", "netns", "exec", hosts.bed._namespace("one"), sys.executable, "-c", code]
        with subprocess.Popen(inside, stdout=subprocess.PIPE) as listener:
            try:
                listener.stdout.readline()
                ran = hosts.launch()
            finally:
                listener.kill()
        assert (ran.failure.node, ran.outcome.code) == ("node-00", 2)
        assert "is in use on this machine" in ran.failure.tail[-1]

    def test_ends_when_a_disk_fills_up_during_the_run(self, hosts: Hosts) -> None:
        hosts.does(LONG, three="yes topoplan | head -c 3000000 || exit 5")
        with small_disk(hosts.workdir("three"), inside=hosts.bed, name="three") as workdir:
            fill(workdir, model=f"models/{QWEN3_8B.name}")
            ran = hosts.launch()
        assert (ran.failure.node, ran.outcome.code) == ("node-02", 5)
        assert (ran.diagnosis.kind, ran.diagnosis.certain) == ("disk-full", True)
        assert ran.diagnosis.cause == f"the disk is full: {hosts.workdir('three')}, 1 MiB"
        assert (records.load().directory() / "node-02.log").stat().st_size > 900_000


class TestAHostThatCannotBeUsed:
    def test_is_blamed_before_anything_is_put_anywhere(self, hosts: Hosts, tmp_path: Path) -> None:
        known = tmp_path / "known_hosts"
        known.write_text(f"{hosts.bed['two'].key_name} {new_key(tmp_path / 'other')}\n")
        faults: list[dict[str, tuple[str, dict[str, object]]]] = [
            {"two": ("key-changed", {"user_known_hosts_files": (known,)})},
            {
                "two": ("key-unknown", {"user_known_hosts_files": ()}),
                "three": ("auth", {"identity_files": ()}),
                "four": ("refused", {"port": 9}),
            },
        ]
        for by_name in faults:
            ran = hosts.launch(targets=hosts.targets(**{name: changes for name, (_, changes) in by_name.items()}))
            assert (ran.outcome.end, ran.outcome.code) == ("refused", 1)
            found = {name: error.problem for name, error in ran.outcome.errors.items()}
            assert found == {LABELS[NAMES.index(name)]: problem for name, (problem, _) in by_name.items()}
            self.assert_nothing_was_put(hosts)

    def test_is_frozen(self, hosts: Hosts) -> None:
        with hosts.bed.frozen("four"):
            ran = hosts.launch(settings=replace(SETTINGS, connect_s=10))
        assert ran.outcome.code == 1
        assert list(ran.outcome.errors) == ["node-03"]
        assert ran.took_s < LIMIT_S
        self.assert_nothing_was_put(hosts)

    @pytest.mark.parametrize(("options", "words"), [("size=4k", "No space left"), ("ro", "Read-only file system")])
    def test_takes_no_files(self, hosts: Hosts, options: str, words: str) -> None:
        with small_disk(hosts.workdir("two"), options, inside=hosts.bed, name="two") as workdir:
            ran = hosts.launch()
            assert not [*workdir.glob("topoplan-runs-*/*/*")]
        assert ran.outcome.code == 1
        assert list(ran.outcome.errors) == ["node-01"]
        assert words in str(ran.outcome.errors["node-01"])
        assert records.load().state == "failed"
        self.assert_nothing_was_put(hosts)

    def test_fails_a_check_that_is_made_first(self, hosts: Hosts) -> None:
        failed = Result(name="gpus-free", host="two", outcome="failure", what="2 of 8 GPUs are in use", remedy="wait")
        warned = [Result(name="mtu", host=name, outcome="warning", what="1500") for name in NAMES]
        ran = hosts.launch(preflight=lambda connections: [failed, *warned, replace(failed, outcome="ok")])
        assert (ran.outcome.end, ran.outcome.code) == ("refused", 1)
        assert ran.of("check") == [
            "failure: gpus-free: two: 2 of 8 GPUs are in use; wait",
            "warning: mtu: all 4 hosts: 1500",
        ]
        self.assert_nothing_was_put(hosts)

    def assert_nothing_was_put(self, hosts: Hosts) -> None:
        hosts.assert_nothing_is_left()
        for name in NAMES:
            assert not list(hosts.workdir(name).glob("topoplan-runs-*/*/*"))


class TestAScript:
    def test_that_somebody_put_in_its_place_is_not_run(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaced between the upload and the start, by anybody."""
        hosts.does("echo begun; sleep 600")
        stolen = hosts.root / "stolen"

        def start(connection: Connection, *, run_dir: str, **words: Any) -> Started:
            if connection.name == "three":
                script = Path(run_dir) / words["script"]
                script.unlink()
                script.write_text(f"touch {stolen}")
            return start_node(connection, run_dir=run_dir, **words)

        monkeypatch.setattr("topoplan.run.launch.start_node", start)
        ran = hosts.launch()
        assert (ran.outcome.end, ran.outcome.code) == ("failed", 1)
        assert re.fullmatch(
            r"three: nothing was started: node-02\.sh in .* differs from what was uploaded; check who can write there,"
            " and launch again",
            str(ran.outcome.errors["node-02"]),
        )
        assert not stolen.exists()


class TestARunDirectory:
    """The run directory is deleted while the job runs, for example by somebody who tidies up."""

    def delete(self, hosts: Hosts) -> None:
        for name in NAMES:
            shutil.rmtree(hosts.workdir(name) / f"topoplan-runs-{hosts.bed.user}")

    def test_is_not_needed_to_go_on_nor_to_stop(self, hosts: Hosts) -> None:
        hosts.does("echo begun; sleep 600")
        begun, deleted_s, interrupted = After("begun", *LABELS), [], []

        def on(event: Event) -> None:
            begun(event)
            if begun.seen and not deleted_s:
                self.delete(hosts)
                deleted_s.append(time.monotonic())

        def interrupts() -> int:
            if deleted_s and time.monotonic() - deleted_s[0] > 1:
                interrupted.append(set(hosts.jobs()))
            return int(bool(interrupted))

        ran = hosts.launch(on=on, interrupts=interrupts)
        assert interrupted[0] == set(NAMES)
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.errors) == ("interrupted", 130, {})
        assert records.load().state == "stopped"

    @pytest.mark.parametrize("noted", [True, False])
    def test_is_not_needed_by_another_client_that_stops_the_run(self, hosts: Hosts, noted: bool) -> None:
        hosts.does("echo begun; setsid sleep 600 & sleep 600")
        hosts.launch(settings=replace(SETTINGS, detach=True))
        hosts.wait_for_all("begun")  # a script that is deleted before it is read is not run
        assert all(node.started is not None for node in records.load().nodes)
        if not noted:  # as if the client had died before it could
            nodes = tuple(replace(node, started=None) for node in records.load().nodes)
            records.update(records.load().run_id, nodes=nodes)
        self.delete(hosts)
        hosts.assert_jobs_are_on(*NAMES)
        hosts.stop_from_another_client()


class TestTheNetwork:
    def test_is_cut_to_one_host_which_is_given_up_and_blamed_by_who_wants_that(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        try:
            ran = hosts.launch(
                on=Once("begun", lambda: hosts.bed.cut("three")), settings=replace(SETTINGS, lost_after_s=2)
            )
        finally:
            hosts.bed.heal("three")
        hosts.assert_jobs_are_on("three")
        assert (ran.failure.node, ran.outcome.code, ran.outcome.running) == ("node-02", 1, ("node-02",))
        assert ran.failure.what == "its host was unreachable for 2 s"
        assert ran.took_s < LIMIT_S
        hosts.stop_from_another_client()

    def test_is_cut_and_heals_without_a_line_lost(self, hosts: Hosts) -> None:
        hosts.does("exit 0", two="for ((i = 0; i < 60; i++)); do echo line $i; sleep 0.1; done")
        begun = Once("line 5", lambda: hosts.bed.cut("two"), "node-01")

        def on(event: Event) -> None:
            begun(event)
            if event.data.get("state") == "lost":
                hosts.bed.heal("two")

        try:
            ran = hosts.launch(on=on)
        finally:
            hosts.bed.heal("two")
        assert ran.outcome.code == 0
        assert [line for line in ran.of("line", "node-01") if line.startswith("line")] == [
            f"line {i}" for i in range(60)
        ]
        assert states(ran) == ["lost", "back"]

    @pytest.mark.parametrize("how", ["drop", "unreachable"])
    def test_is_gone_for_the_client_alone_while_the_job_ends_well(self, hosts: Hosts, how: Hiding) -> None:
        hidden = hosts.root / "hidden"
        hosts.does(f"echo begun; until [ -e {hidden} ]; do sleep 0.02; done; seq 100")

        def hide() -> None:
            hosts.bed.hide(how=how)
            hidden.touch()

        with released(lambda: hosts.bed.show(how=how)) as show:
            ran = hosts.launch(on=both(Once("begun", hide), Once("be offline", show, "")))
        assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
        assert states(ran) == ["offline", "online"]
        assert not ran.of("failure")
        record = records.load()
        assert (record.state, record.code) == ("ended", 0)
        for node in record.nodes:
            assert record.log(node).read_bytes() == (Path(node.run_dir) / ".topoplan" / "log").read_bytes()
            assert ran.of("line", node.label)[-100:] == [str(number) for number in range(1, 101)]

    def test_is_gone_while_a_node_fails_which_is_blamed_once_it_is_back(self, hosts: Hosts) -> None:
        """Even though its peers, whose hosts are seen first, have ended because of it."""
        failed, hidden = hosts.root / "failed", hosts.root / "hidden"
        echo = (
            f"echo begun; until [ -e {failed} ]; do sleep 0.02; done; sleep 1; echo 'Connection closed by peer'; exit 1"
        )
        hosts.does(echo, three=f"echo begun; until [ -e {hidden} ]; do sleep 0.02; done; touch {failed}; exit 7")
        with released(lambda: hosts.bed.show("three")) as show_three, released(hosts.bed.show) as show:

            def hide() -> None:
                hosts.bed.hide()
                hosts.bed.hide("three")  # once more, for longer
                hidden.touch()

            ran = hosts.launch(
                on=both(
                    Once("begun", hide),
                    Once("be offline", lambda: (wait_until(failed.exists, "it fails"), time.sleep(2), show()), ""),
                    Once("the cause may be on", show_three, ""),
                )
            )
        assert (ran.failure.node, ran.failure.what, ran.outcome.code) == ("node-02", "ended with exit code 7", 7)
        assert (records.load().state, records.load().reason) == ("failed", "node-02: ended with exit code 7")

    def test_is_gone_to_a_host_whose_peers_lose_it_too(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.failure.REACHABLE_S", 1.0)
        address, lost = hosts.bed["three"].address, hosts.root / "lost"
        fails = f"echo 'Connection closed by peer [{address}]:4'; exit 1"
        hosts.does(f"echo begun; until [ -e {lost} ]; do sleep 0.02; done; {fails}", three=LONG)
        cut, seen = Once("begun", lambda: hosts.bed.cut("three")), Once("is unreachable", lost.touch, "node-02")
        try:
            ran = hosts.launch(on=both(cut, seen))
        finally:
            hosts.bed.heal("three")
        assert (ran.failure.node, ran.outcome.code, ran.outcome.running) == ("node-02", 1, ("node-02",))
        assert (ran.diagnosis.kind, ran.diagnosis.certain) == ("lost", True)
        assert records.load().reason == f"{ran.failure.reason}; not stopped: node-02"
        hosts.assert_jobs_are_on("three")
        hosts.stop_from_another_client()

    def test_is_gone_when_the_user_wants_to_stop_which_is_not_said_to_be_done(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        offline = After("be offline")
        with released(hosts.bed.show):
            ran = hosts.launch(on=both(Once("begun", hosts.bed.hide), offline), interrupts=offline.count)
        assert (ran.outcome.end, ran.outcome.code, list(ran.outcome.running)) == ("interrupted", 130, LABELS)
        assert records.load().state == "running"
        assert ran.took_s < LIMIT_S
        hosts.stop_from_another_client()

    def test_is_gone_for_as_long_as_is_waited_for_any_host(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        with released(hosts.bed.show):
            ran = hosts.launch(on=Once("begun", hosts.bed.hide), settings=replace(SETTINGS, lost_after_s=6))
        assert (ran.outcome.end, ran.outcome.code, list(ran.outcome.running)) == ("unknown", 1, LABELS)
        assert records.load().state == "running"
        hosts.assert_jobs_are_on(*NAMES)
        hosts.stop_from_another_client()

    def test_is_parted_between_two_hosts_and_the_job_hangs_until_it_is_stopped(self, hosts: Hosts) -> None:
        address = hosts.bed["one"].address
        hosts.does("echo up; sleep 600", two=f"echo up; exec 3<>/dev/tcp/{address}/22")
        up = After("up", "node-00", "node-01", "node-02", "node-03")
        with hosts.bed.partition("one", "two"):
            ran = hosts.launch(on=up, interrupts=up.count)
        assert (ran.outcome.end, ran.outcome.code) == ("interrupted", 130)
        assert records.load().state == "stopped"

    def test_answers_no_more_when_sshd_is_frozen(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.remote.wire._PROBE_S", 0.5)
        monkeypatch.setattr("topoplan.remote.wire._SSH_SILENT_S", 4.0)
        hosts.does(LONG)
        with contextlib.ExitStack() as stack:
            freeze = Once("begun", lambda: stack.enter_context(hosts.bed.frozen("one")))
            ran = hosts.launch(on=freeze, settings=replace(SETTINGS, lost_after_s=1))
        assert (ran.failure.node, ran.outcome.running) == ("node-00", ("node-00",))
        hosts.stop_from_another_client()


class TestTheClient:
    @pytest.mark.parametrize("moment", ["connecting", "starting", "begun"])
    def test_stops_all_on_ctrl_c_at_any_moment(self, hosts: Hosts, moment: str) -> None:
        hosts.does(LONG)
        process = hosts.start("--grace", "1")
        said = read_until(process, moment)
        process.send_signal(signal.SIGINT)
        text = "".join(said) + process.stdout.read()
        assert process.wait(LIMIT_S) == 130, text
        assert "Traceback" not in text

    def test_leaves_at_once_on_the_second_ctrl_c(self, hosts: Hosts) -> None:
        hosts.does("trap '' TERM; echo begun; while :; do sleep 0.1; done")
        process = hosts.start("--grace", "600")
        for words, count in (("begun", 4), ("stopping", 1)):
            read_until(process, words, count)
            process.send_signal(signal.SIGINT)
        started = time.monotonic()
        rest = process.stdout.read()
        assert process.wait(LIMIT_S) == 130
        assert time.monotonic() - started < LIMIT_S
        assert "topoplan runs stop" in rest
        hosts.assert_jobs_are_on(*NAMES)
        hosts.stop_from_another_client()

    def test_can_be_killed_at_any_moment_and_another_one_stops_the_run(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        for words in ("uploading", "starting", "running"):
            process = hosts.start()
            read_until(process, words)
            time.sleep(random.uniform(0, 0.15))
            process.kill()
            process.communicate()
            wait_until(lambda: not any(under_way(hosts.bed, name) for name in NAMES), "what was asked for is done")
            hosts.stop_from_another_client()
            hosts.assert_nothing_is_left()

    @pytest.mark.parametrize(("options", "runs_on"), [((), True), (("--stop-on-exit", "--grace", "1"), False)])
    def test_says_that_the_job_goes_on_when_it_is_ended_or_takes_it_along(
        self, hosts: Hosts, options: tuple[str, ...], runs_on: bool
    ) -> None:
        hosts.does(LONG)
        process = hosts.start(*options)
        read_until(process, "begun", len(NAMES))
        process.terminate()
        *_, last = process.stdout
        assert process.wait(LIMIT_S) == 143
        assert ("goes on on its hosts" in last, "stopped" in last) == (runs_on, not runs_on)
        hosts.assert_jobs_are_on(*(NAMES if runs_on else ()))
        assert hosts.record().state == ("running" if runs_on else "stopped")
        hosts.stop_from_another_client()

    def test_is_held_up_by_no_terminal_that_is_halted(self, hosts: Hosts) -> None:
        hosts.does(LONG, two="yes a line of output | head -c 8000000; echo all is written >> done; sleep 600")
        process = hosts.start("--grace", "1")
        try:
            written = hosts.workdir("two") / "done"
            wait_until(written.exists, "the job writes on while nobody reads")
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130
        finally:
            process.kill()
            process.communicate()

    def test_gives_the_exit_code_of_the_job_and_json_of_all_that_happened(self, hosts: Hosts) -> None:
        hosts.does(LONG, three="echo boom; sleep 0.2; exit 9")
        process = hosts.start("--json")
        text, _ = process.communicate(timeout=3 * LIMIT_S)
        assert process.returncode == 9
        rows = [json.loads(line) for line in text.splitlines()]
        assert {row["schema"] for row in rows} == {"topoplan.launch/1"}
        assert rows[-1]["event"] == "end"
        assert (rows[-1]["failure"]["node"], rows[-1]["code"], rows[-1]["running"]) == ("node-02", 9, [])
        assert {"event": "line", "node": "node-02", "text": "boom", "schema": "topoplan.launch/1"} in rows
