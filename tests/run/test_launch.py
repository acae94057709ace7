"""Launches in this process on real sshd hosts: interruptions at every step, and what is kept of a run."""

import hashlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.bed.bed import small_disk
from tests.bed.jobs import LABELS, NAMES, SETTINGS, After, Hosts, Once, StopAfter, both, hosts_of
from tests.waiting import LIMIT_S, wait_until
from topoplan.errors import HostError, InputError
from topoplan.hosts.result import Result
from topoplan.planner.plan import Plan
from topoplan.remote.connection import Connection
from topoplan.remote.upload import upload
from topoplan.run import record as records
from topoplan.run.drift import DriftDetector
from topoplan.run.events import Event
from topoplan.run.node import Started, start_node
from topoplan.run.outcome import record_stop_request
from topoplan.run.progress import Progress
from topoplan.run.strain import HostLoad
from topoplan.specs.source import read_source
from topoplan.specs.spec import Spec

LONG = "echo begun; sleep 600"


class At:
    """Interrupts once a step has begun: before it does anything, or at the second check, while it is under way."""

    def __init__(self, step: str, *, at_look: int = 1) -> None:
        self.step, self.at_look = step, at_look
        self.begun, self.checks = False, 0

    def __call__(self, event: Event) -> None:
        self.begun = self.begun or event.data.get("step") == self.step

    def count(self) -> int:
        self.checks += self.begun
        return int(self.checks >= self.at_look)


before_or_within = pytest.mark.parametrize("at_look", [1, 2], ids=["before", "within"])


class TestAnInterruption:
    @before_or_within
    @pytest.mark.parametrize("step", ["connect", "preflight"])
    def test_before_anything_is_put_anywhere_leaves_no_trace(self, hosts: Hosts, step: str, at_look: int) -> None:
        at, held = At(step, at_look=at_look), threading.Event()

        def preflight(connections: object) -> Sequence[Result]:
            held.wait(LIMIT_S)
            return []

        ran = hosts.launch(on=at, interrupts=at.count, preflight=preflight)
        held.set()
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.run) == ("interrupted", 130, "")
        assert records.runs() == []
        assert not [path for name in NAMES for path in hosts.workdir(name).glob("topoplan-runs-*/*")]

    @before_or_within
    @pytest.mark.parametrize("step", ["run", "upload"])
    def test_of_an_upload_removes_what_was_put(self, hosts: Hosts, step: str, at_look: int) -> None:
        at = At(step, at_look=at_look)
        ran = hosts.launch(on=at, interrupts=at.count)
        assert (ran.outcome.end, ran.outcome.code) == ("interrupted", 130)
        record = records.load()
        assert (record.run_id, record.state, record.code) == (ran.outcome.run, "stopped", 130)
        assert not [path for name in NAMES for path in hosts.workdir(name).glob("topoplan-runs-*/*/*")]

    def test_between_upload_and_start_starts_nothing(self, hosts: Hosts) -> None:
        hosts.does("touch begun; sleep 600")
        at = At("start")
        ran = hosts.launch(on=at, interrupts=at.count)
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.running) == ("interrupted", 130, ())
        assert records.load().state == "stopped"
        assert not [path for name in NAMES for path in hosts.workdir(name).rglob("begun")]
        assert not [path for name in NAMES for path in hosts.workdir(name).glob("topoplan-runs-*/*/*")]

    @pytest.mark.parametrize(
        ("step", "at_look", "detach"), [("start", 2, False), ("start", 2, True), ("watch", 1, False)]
    )
    def test_once_jobs_are_started_stops_them(self, hosts: Hosts, step: str, at_look: int, detach: bool) -> None:
        hosts.does(LONG)
        at = At(step, at_look=at_look)
        ran = hosts.launch(settings=replace(SETTINGS, detach=detach), on=at, interrupts=at.count)
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.running) == ("interrupted", 130, ())
        assert (records.load().state, records.load().reason) == ("stopped", "Ctrl-C")

    def test_while_the_others_are_stopped_leaves_at_the_second(self, hosts: Hosts) -> None:
        hosts.does("trap '' TERM; while :; do sleep 0.05; done", three="sleep 0.3; exit 5")
        stop = At("stop")
        ran = hosts.launch(settings=replace(SETTINGS, grace_s=5), on=stop, interrupts=lambda: 2 * stop.count())
        assert (ran.outcome.end, ran.outcome.code) == ("failed", 5)
        assert {"node-00", "node-01", "node-03"} <= set(ran.outcome.running)
        assert "not stopped yet" in str(ran.outcome.errors["node-00"])
        # The hosts still do what they were asked to.


class TestAFailureThatFollowsFromAnother:
    def test_is_not_blamed_where_that_is_told_a_moment_later(
        self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("topoplan.run.failure.ORIGINAL_FAILURE_S", 3 * LIMIT_S)
        ended = hosts.root / "ended"
        hosts.does(
            LONG,
            two=f"echo 'RuntimeError: Connection closed by peer'; touch {ended}; exit 1",
            three=f"until [ -e {ended} ]; do sleep 0.02; done; sleep 1; echo 'CUDA out of memory'; exit 1",
        )
        ran = hosts.launch()
        assert (ran.failure.node, ran.diagnosis.kind) == ("node-02", "gpu-memory")
        assert ran.took_s < 3 * LIMIT_S

    def test_is_told_after_a_while_where_nothing_else_is(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.failure.ORIGINAL_FAILURE_S", 1.0)
        hosts.does(LONG, two="echo 'RuntimeError: Connection closed by peer'; exit 1")
        ran = hosts.launch()
        assert (ran.failure.node, ran.diagnosis.certain) == ("node-01", False)


class TestOutOfMemory:
    def test_is_told_beside_what_was_predicted(self, hosts: Hosts) -> None:
        text = (
            "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.29 GiB"
            " is free. Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory"
            " 74.10 GiB is allocated by PyTorch, and 1.30 GiB is reserved by PyTorch but unallocated."
        )
        hosts.does("sleep 600", one=f"echo '[rank0]: torch.OutOfMemoryError: {text}' >&2; exit 1")
        said = hosts.launch().of("measured")
        assert said[0].startswith("out of memory on GPU 0 of rank 0")
        assert "it needed 78.1 GiB of live tensors at least" in said[1]


class TestAGoodEnd:
    def test_tells_what_a_job_has_left_running(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("topoplan.run.launch._EXITING_S", 8.0)
        hosts.does("sleep 0.1 & exit 0", two="setsid sleep 600 & exit 0")
        ran = hosts.launch()
        assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
        pids = [pid for pid, line in hosts.bed.processes("two").items() if line == "sleep 600"]
        assert ran.of("note", "node-01") == [f"left 1 process running, {pids[0]}; `topoplan runs stop` stops them"]
        hosts.stop_from_another_client()

    def test_leaves_what_was_measured_in_the_record(self, hosts: Hosts) -> None:
        keys = '"current_steps": {step}, "total_steps": 40, "elapsed_time": "0:{step}:00", "vram_reserved": 50.0'
        lines = "\n".join(f"{{{keys.format(step=step)}}}" for step in range(10, 40))
        output = read_source(hosts.bundle_dir / "train.yaml").data["output_dir"]
        hosts.does("exit 0", one=f"mkdir -p {output}; cat >{output}/trainer_log.jsonl <<'E'\n{lines}\nE\nexit 0")
        (said,) = hosts.launch().of("measured")
        found = records.load().measurement
        assert (found.step_s, found.reserved_bytes, found.time_held) == (60.0, 50.0 * 2**30, False)
        assert said.startswith("a step took 60 s (29 steps), ")


class TestAStopByAnotherClient:
    @pytest.mark.parametrize("code", [0, 1])
    def test_leaves_each_node_the_time_that_was_given_there_and_is_no_good_end(self, hosts: Hosts, code: int) -> None:
        """Even though the launch itself would kill half a second after the first node has ended."""
        go = hosts.root / "go"
        saves = f"trap 'until [ -e {go} ]; do sleep 0.02; done; sleep 1.5; echo saved; exit 0' TERM"
        hosts.does(
            f"{saves}; echo begun; while :; do sleep 0.02; done",
            one=f"trap 'exit {code}' TERM; echo begun; while :; do sleep 0.02; done",
        )
        stop = StopAfter(hosts, After("begun", *LABELS), grace_s=LIMIT_S)
        first = (
            Once("another process is stopping the run", go.touch, "") if code else Once("ended", go.touch, LABELS[0])
        )
        ran = hosts.launch(on=both(first, stop))
        stop.join()
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.failure) == ("stopped", 1, None)
        assert [ran.of("line", f"node-{node:02d}")[-1:] for node in (1, 2, 3)] == [["saved"]] * 3
        waits = [text for text in ran.of("step") if text.startswith("another process is stopping the run; wait")]
        assert len(waits) == code
        assert (records.load().state, records.load().reason) == ("stopped", "topoplan runs stop")

    @pytest.mark.parametrize("detach", [False, True])
    def test_while_nodes_are_started_stops_them(self, hosts: Hosts, detach: bool) -> None:
        hosts.does(LONG)

        def on(event: Event) -> None:
            if event.data.get("step") == "start":
                record_stop_request(records.load().run_id, 0.5)

        ran = hosts.launch(settings=replace(SETTINGS, detach=detach), on=on)
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.running) == ("stopped", 1, ())
        assert records.load().state == "stopped"

    @pytest.mark.parametrize("times", [1, 2])
    def test_is_not_waited_for_after_an_interruption(self, hosts: Hosts, times: int) -> None:
        """One interrupt ends the others with the launch's own grace period; two leave that to the hosts."""
        deaf = "trap '' TERM; echo begun; while :; do sleep 0.02; done"
        hosts.does(deaf, one="trap 'exit 1' TERM; echo begun; while :; do sleep 0.02; done")
        stop, waits = (
            StopAfter(hosts, After("begun", *LABELS), grace_s=60),
            After("another process is stopping the run"),
        )
        ran = hosts.launch(on=both(waits, stop), interrupts=lambda: times * waits.count())
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.failure) == ("stopped", 1, None)
        assert bool(ran.outcome.running) == (times == 2)
        stop.join()

    def test_that_reached_no_host_hides_no_later_failure(self, hosts: Hosts) -> None:
        hosts.does("echo begun; sleep 600", three="echo begun; sleep 0.5; exit 8")

        def on(event: Event) -> None:
            if event.data.get("step") == "watch":
                records.update(records.load().run_id, stop_asked="2020-01-01T00:00:00.000+00:00", stop_grace_s=3600.0)

        ran = hosts.launch(on=on)
        assert (ran.outcome.end, ran.outcome.code) == ("failed", 8)
        assert ran.failure.node == "node-02"
        assert records.load().state == "failed"


class TestARunInWhichNothingMoves:
    def test_is_told_and_ended_where_that_is_wanted(self, hosts: Hosts) -> None:
        go = hosts.root / "go"
        hosts.does(LONG, two=f"until [ -e {go} ]; do sleep 0.02; done; sleep 2; seq 5; sleep 600")
        begun = Once("begun", go.touch, "node-00", "node-02", "node-03")
        ran = hosts.launch(on=begun, settings=replace(SETTINGS, hang_after_s=8))
        hosts.assert_nothing_is_left()
        [said] = ran.of("silence")
        first, *_, last = said.split("\n")
        assert re.fullmatch(r"no output for \d+ s, and no step yet; the last lines:", first)
        assert re.fullmatch(r"  node-01, \d+ s ago: 5", last)
        assert (ran.outcome.end, ran.outcome.code, ran.outcome.running) == ("failed", 1, ())
        assert (ran.diagnosis.kind, ran.diagnosis.rank, ran.failure.stacks) == ("hang", None, ())
        assert records.load().state == "failed"
        assert ": no step for " in records.load().reason


class TestStepsThatAreLongerThanPredicted:
    STEPS = """for i in $(seq 16); do
        echo "[default0]:  1%|1 | $i/4688 [00:$(printf %02d $i)<1:00:00, 1.0s/it]"; sleep 0.4
    done"""

    def test_are_told_with_what_the_hosts_say_and_kept_with_the_run(
        self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("topoplan.run.progress._LEAST_S", 0.3)
        monkeypatch.setattr("topoplan.run.drift._LEAST_S", 1.0)
        of = DriftDetector.of

        def with_shorter_steps(progress: Progress, spec: Spec, plan: Plan, **more: Any) -> DriftDetector:
            return of(progress, spec, replace(plan, time=replace(plan.time, step_s=0.1, band_s=(0.09, 0.11))), **more)

        monkeypatch.setattr(DriftDetector, "of", with_shorter_steps)
        asked = threading.Event()

        def conspicuous(strains: Mapping[str, HostLoad]) -> list[str]:
            assert sorted(strains) == ["node-00", "node-01", "node-02", "node-03"]
            assert all(one.cpus == os.cpu_count() and one.load > 0.0 for one in strains.values())
            asked.set()
            return ["node-02: a stand-in"]

        monkeypatch.setattr("topoplan.run.strain.conspicuous", conspicuous)
        hosts.does(self.STEPS)
        ran = hosts.launch()
        assert (ran.outcome.code, asked.is_set()) == (0, True)
        [said] = ran.of("drift")
        assert re.fullmatch(
            r"steps take \d\S* s since step \d+; 0.09 to 0.1 s were predicted\n  node-02: a stand-in", said
        )
        [noted] = records.load().drifts
        assert (noted.what, noted.state, noted.reasons) == ("step", "out", ("node-02: a stand-in",))


class TestAStartThatFails:
    def test_on_one_host_stops_what_the_others_started(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        hosts.does(LONG)

        def with_a_job_there(host: Connection, files: dict[str, Any], directory: str, **options: Any) -> None:
            upload(host, files, directory, **options)
            if "/node-01/" in directory:
                (Path(directory) / ".topoplan").mkdir()

        monkeypatch.setattr("topoplan.run.launch.upload", with_a_job_there)
        ran = hosts.launch()
        assert (ran.outcome.end, ran.outcome.code) == ("failed", 1)
        assert ran.failure.node == "node-01"
        assert ran.failure.what.startswith("not started: a job of this run is already in ")
        assert (records.load().state, ran.outcome.running) == ("failed", ())


class TestAStartThatIsNotSeenToItsEnd:
    """The connection to a host is lost between the start command and the answer."""

    @pytest.fixture(params=[True, False])
    def lost(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        """The host has started the job by then, or not."""
        does: list[bool] = [request.param]

        def start(connection: Connection, *, run_dir: str, **options: Any) -> Started:
            if "/node-01/" not in run_dir or not does:
                return start_node(connection, run_dir=run_dir, **options)
            if does.pop():
                start_node(connection, run_dir=run_dir, **options)
            connection.close()
            raise HostError("the connection was lost", host="two", problem="lost")

        monkeypatch.setattr("topoplan.run.launch.start_node", start)
        monkeypatch.setattr("topoplan.run.following._STARTING_S", 0.1)

    def test_is_made_up_for_where_it_is_none(self, hosts: Hosts, lost: None) -> None:
        hosts.does("sleep 1; echo done")
        ran = hosts.launch()
        assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
        assert ran.of("line", "node-01")[-1] == "done"
        assert not ran.of("failure")

    def test_is_waited_for_by_who_leaves_it_running(self, hosts: Hosts, lost: None) -> None:
        hosts.does(LONG)
        ran = hosts.launch(settings=replace(SETTINGS, detach=True))
        assert (ran.outcome.end, records.load().state) == ("detached", "running")
        hosts.assert_jobs_are_on(*NAMES)
        hosts.stop_from_another_client()


class TestASecondRun:
    """Of the same bundle on the same hosts."""

    def test_is_refused_before_anything_is_put_anywhere(self, hosts: Hosts) -> None:
        hosts.does(LONG)
        first = hosts.launch(settings=replace(SETTINGS, detach=True)).outcome.run
        with pytest.raises(InputError) as refused:
            hosts.launch(preflight=lambda connections: pytest.fail("the hosts were checked"))
        said = str(refused.value)
        assert f"run {first} of this bundle is still running on" in said
        assert f"`topoplan runs attach {first}`" in said
        assert f"`topoplan runs stop {first}`" in said
        assert [record.run_id for record in records.runs()] == [first]
        assert not [event for event in hosts.events if event.data.get("step") == "upload"]
        hosts.assert_jobs_are_on(*NAMES)
        hosts.stop_from_another_client()

    def test_is_refused_while_a_single_node_still_runs(self, hosts: Hosts) -> None:
        hosts.does("exit 0", three=LONG)
        hosts.launch(settings=replace(SETTINGS, detach=True))
        wait_until(lambda: set(hosts.jobs()) == {"three"}, "the others have ended")
        with pytest.raises(InputError, match="still running on"):
            hosts.launch()
        hosts.stop_from_another_client()

    def test_starts_where_the_first_has_ended_and_nobody_recorded_it(self, hosts: Hosts) -> None:
        hosts.does("exit 0")
        first = hosts.launch(settings=replace(SETTINGS, detach=True)).outcome.run
        hosts.assert_nothing_is_left()
        assert records.load(first).state == "running"
        assert hosts.launch().outcome.end == "ended"
        assert records.load(first).state == "ended"


class TestTheRecord:
    def test_that_is_gone_ends_no_launch(self, hosts: Hosts) -> None:
        hosts.does("sleep 0.3")

        def on(event: Event) -> None:
            if event.data.get("step") == "watch":
                (records.load().directory() / "run.json").unlink()

        ran = hosts.launch(on=on)
        assert (ran.outcome.end, ran.outcome.code) == ("ended", 0)
        assert "no record in it" in ran.of("note")[-1]

    @pytest.mark.parametrize("code", [0, 5])
    def test_says_that_the_disk_was_full(self, hosts: Hosts, code: int) -> None:
        """The copies of the logs fill that disk."""
        hosts.does("seq 40000", two=f"seq 40000; exit {code}")
        hosts.state.mkdir(exist_ok=True)
        with small_disk(hosts.state, "size=256k"):
            ran = hosts.launch()
            record = records.load()
        assert (ran.outcome.code, record.state, record.code) == (code, "failed" if code else "ended", code)
        assert re.search(
            r"the local copy of the log of node-0\d is incomplete: No space left on device", record.trouble
        )
        assert record.trouble.endswith("the disk of this machine was full when the run ended")
        assert record.trouble in ran.of("note")


class TestSecrets:
    VALUES: ClassVar = {"HF_TOKEN": "hf_Zq7'\"$x 9\\n\u00e9", "WANDB_API_KEY": "first-line\nlines-of-it"}

    @pytest.fixture
    def given(self, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
        for name, value in self.VALUES.items():
            monkeypatch.setenv(name, value)
        return hosts_of(hosts.bed, tmp_path / "with", secrets=tuple(self.VALUES))

    def test_arrive_in_the_process_and_are_in_no_file_argument_or_record(self, given: Hosts, tmp_path: Path) -> None:
        given.does('printf "%s|%s" "$HF_TOKEN" "$WANDB_API_KEY" | sha256sum >got; until [ -e go ]; do sleep 0.1; done')
        process = given.start()
        digest = hashlib.sha256("|".join(self.VALUES.values()).encode()).hexdigest()
        for name in NAMES:
            got = given.workdir(name) / "got"
            wait_until(lambda got=got: got.exists() and digest in got.read_text(), "it has arrived")  # type: ignore[misc]
        lines = [line for name in NAMES for line in given.bed.processes(name).values()]
        assert any("node-00.sh" in line for line in lines)
        for name in NAMES:
            (given.workdir(name) / "go").touch()
        said, _ = process.communicate(timeout=3 * LIMIT_S)
        assert process.returncode == 0, said
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        for value in ("hf_Zq7", "lines-of-it"):
            assert not [line for line in (*lines, said) if value in line]
            assert not [data for data in files if value.encode() in data]

    def test_are_hidden_where_a_job_shows_them(self, given: Hosts) -> None:
        given.does('echo "with $HF_TOKEN and $WANDB_API_KEY"; exit 3')
        ran = given.launch(secrets=self.VALUES)
        shown = "\n".join(ran.of("line", "node-00"))
        # The lines of a multi-line value are masked as one if they arrive together, otherwise each by itself.
        assert shown.endswith(("with *** and ***", "with *** and ***\n***"))
        assert "hf_Zq7" not in repr((ran.outcome, ran.events, records.load()))

    def test_that_are_missing_stop_the_launch_before_anything(
        self, given: Hosts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_TOKEN")
        process = given.start()
        said, _ = process.communicate(timeout=3 * LIMIT_S)
        assert (process.returncode, said.count("\n")) == (2, 1)
        assert said.startswith("topoplan: secrets: HF_TOKEN is not set here")
        assert not records.runs()
