"""Trials on real sshd hosts, with a stand-in for the trainer whose speed and memory follow a hidden model."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bed.jobs import SETTINGS, After, Hosts
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, predicted_s
from topoplan.planner.predict import memory_of
from topoplan.planner.search import rank
from topoplan.planner.tuning import Tuning, expected
from topoplan.remote.identities import Access
from topoplan.run import record as records
from topoplan.run.events import Event, Tell
from topoplan.run.tune import Trials, Why, tried_before
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.units import GIB

HIDDEN = {KNOBS[0].name: 1.25, KNOBS[1].name: 1.4, KNOBS[2].name: 2.6, KNOBS[3].name: 0.8}
"""Factors by which the machines are slower than the catalog says."""
MORE_MEMORY, CARD = 1.19, 79.1 * GIB
"""PyTorch's memory relative to the prediction, and the memory of the card."""
TRAINER = r"""
bundle=$(printf '%s\n' "$@" | grep train.yaml)
bundle=${bundle%/train.yaml}
output=$(sed -n 's/^output_dir: \([^ ]*\).*/\1/p' "$bundle/train.yaml")
IFS='|' read -r step_s fault <ROOT/hidden
[[ "$HOSTNAME" == one ]] || sleep 600
echo "${fault:=begins}"
[[ "$fault" != *memory* ]] || exit 1
[[ "$fault" == begins ]] || sleep 600
mkdir -p "$output"
awk -v step_s="$step_s" -v log_file="$output/trainer_log.jsonl" 'BEGIN {
  for (step = 1; step <= 40; step++) {
    clock = int(60 + step_s * step)
    printf "{\"current_steps\": %d, \"total_steps\": 40, \"loss\": 1.5, \"elapsed_time\": \"%d:%02d:%02d\"}\n", \
      step, clock / 3600, clock / 60 % 60, clock % 60 > log_file
    printf "\r[default0]: %d%%|#| %d/40 [%02d:%02d<00:00, %.2fs/it]", step, step, clock / 60, clock % 60, step_s
  }
  printf "\n"
}'
sleep 600
"""
"""Logs like LLaMA-Factory. A step takes long on its clock, but no real time."""


class Bench:
    """The hosts, and the hidden truth about them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.spec: Spec = hosts.bundle.draft.spec
        self.tuning = Tuning(self.spec, rank(self.spec))
        self.faults: dict[int, str] = {}
        """By trial: what its trainer prints instead of steps."""
        self.hung: set[str] = set()
        hosts.does(TRAINER.replace("ROOT", str(hosts.root)))

    def true_s(self, layout: Layout) -> float:
        return predicted_s(self.spec, layout, HIDDEN)

    def tell(self, event: Event) -> None:
        """Tell the stand-ins how the trial that begins will behave."""
        if "trial" not in event.data:
            return
        standing, number = self.tuning.standing, event.data["trial"]
        said = self.faults.get(number) or out_of_memory(self.spec, standing.next.layout)
        (self.hosts.root / "hidden").write_text(f"{self.true_s(standing.next.layout):.6f}|{said}\n")

    def tune(self, plans: int, *, tell: Tell = lambda event: None, interrupts: Callable[[], int] = lambda: 0) -> Why:
        def both(event: Event) -> None:
            self.tell(event)
            tell(event)

        return Trials(
            spec=self.spec,
            directory=self.hosts.root / "trials",
            steps=20,
            made_up=True,
            targets=self.hosts.targets(),
            access=Access(),
            settings=replace(SETTINGS, hang_after_s=15.0, back_s=5 * 60.0),
            tell=both,
            interrupts=interrupts,
        ).run(self.tuning, plans)

    def lost(self) -> float:
        """Return how much slower the chosen plan is than the truly best one that was not found to hang or overflow."""
        standing = self.tuning.standing
        assert standing.leader.is_measured
        rest = [self.true_s(one) for one in self.tuning.ranking.plans.layouts if one.id not in self.hung]
        return self.true_s(standing.leader.plan.layout) / min(rest) - 1.0


def out_of_memory(spec: Spec, layout: Layout) -> str:
    """Return PyTorch's message for a layout that does not fit although it was predicted to."""
    memory, tried = memory_of(case_of(spec, layout.backend), layout), 4.0
    held = memory.reserved_bytes * MORE_MEMORY
    if memory.device_bytes - memory.reserved_bytes + held <= CARD:
        return ""
    worst = max(memory.by_stage, key=lambda one: one.allocated_bytes).stage
    rank = worst * layout.world_size // layout.pp
    live = memory.allocated_bytes / GIB
    free = held / GIB - tried - live
    return (
        f"[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a"
        f" total capacity of {CARD / GIB:.2f} GiB of which 1.29 GiB is free. Including non-PyTorch memory, this process"
        f" has 77.80 GiB memory in use. Of the allocated memory {live:.2f} GiB is allocated by PyTorch,"
        f" and {free:.2f} GiB is reserved by PyTorch but unallocated."
    )


@pytest.fixture
def bench(hosts: Hosts) -> Bench:
    return Bench(hosts)


def test_finds_the_hidden_best(bench: Bench) -> None:
    why, tried = bench.tune(4), bench.tuning.tried
    assert bench.lost() <= 0.02
    assert why == "clear" or len(tried) == 4
    first, *others = tried
    assert first.ended is not None
    assert "out of memory" in first.why
    for one in others:
        assert one.step_s == pytest.approx(bench.true_s(one.plan.layout), rel=0.02)
        assert one.gpu_hours == pytest.approx(one.took_s * 8 / 3600)
        assert "save_steps: 1000000" in (bench.hosts.root / "trials" / one.plan.id / "train.yaml").read_text()
    bench.hosts.assert_nothing_is_left()
    states = [record.state for record in records.runs() if isinstance(record, records.RunRecord)]
    assert states == ["failed", *("stopped" for _ in others)]
    before = list(tried_before(bench.hosts.root / "trials", bench.spec))
    assert [one.step_s for one in before] == [one.step_s for one in tried]
    other = replace(bench.spec, job=replace(bench.spec.job, seq_len=1024))
    assert not list(tried_before(bench.hosts.root / "trials", other))


def test_a_trial_that_fails_is_a_result(bench: Bench) -> None:
    """The first runs out of memory, the second hangs, and a host of the third dies."""
    bench.faults = {2: "hangs", 3: "dies"}

    def on(event: Event) -> None:
        if event.text.startswith("running on") and len(bench.tuning.tried) == 2:
            threading.Timer(0.5, bench.hosts.bed.reboot, ("three", 1.0)).start()

    bench.tune(5, tell=on)
    memory, hang, died = bench.tuning.tried[:3]
    assert memory.ended is not None
    assert "no step for" in hang.why
    assert died.is_lost
    assert "node-02" in died.why
    bench.hung = {hang.plan.id}
    standing = bench.tuning.standing
    assert {memory.plan.id, hang.plan.id}.isdisjoint(one.plan.id for one in standing.contenders)
    assert bench.lost() <= 0.02


def test_steps_are_counted_to_the_one_at_which_the_trial_ends(bench: Bench) -> None:
    slow = 'if (step == 10) { printf "\\n"; fflush(); system("sleep 0.3") }\n  }\n  printf "\\n"'
    paused = TRAINER.replace('}\n  printf "\\n"', slow)
    assert paused != TRAINER
    bench.hosts.does(paused.replace("ROOT", str(bench.hosts.root)))
    shown: list[tuple[int, int | None]] = []
    wanted: list[int] = []

    def tell(event: Event) -> None:
        if event.status is not None:
            shown.append((event.status.step, event.status.total_steps))
        if "trial" in event.data and (standing := bench.tuning.standing) and standing.next is not None:
            wanted.append(expected(bench.spec, standing.next, 20).steps)

    bench.tune(2, tell=tell)
    assert {total for step, total in shown if step == 10} <= set(wanted)  # and not the 40 of the trainer's bar
    assert 10 in dict(shown)


def test_ctrl_c_ends_the_trial_and_keeps_what_was_measured(bench: Bench) -> None:
    bench.faults = {3: "hangs"}
    seen = After("hangs", "node-00")
    assert bench.tune(4, tell=seen, interrupts=lambda: int(seen.seen)) == "interrupted"
    bench.hosts.assert_nothing_is_left()
    assert bench.tuning.learnt is not None
    assert [one.step_s is None for one in bench.tuning.tried] == [True, False, True]
    again = Tuning(bench.spec, rank(bench.spec))
    for one in tried_before(bench.hosts.root / "trials", bench.spec):
        again.add(one)
    assert [one.step_s for one in again.tried] == [one.step_s for one in bench.tuning.tried[:2]]
    assert again.ranking.plans.layouts == bench.tuning.ranking.plans.layouts


def test_as_a_process_with_ctrl_c_and_going_on(bench: Bench) -> None:
    """What a user sees and types, from --dry-run to the bundle of the best plan."""
    hosts, hidden = bench.hosts, bench.hosts.root / "hidden"
    words = ["--plans", "3", "--synthetic", "-o", "mine.yaml"]
    command = [sys.executable, "-m", "topoplan", "tune", str(hosts.bundle_dir), *words]
    how = {"cwd": hosts.root, "env": {**hosts.environment(), "COLUMNS": "80"}, "text": True}

    ahead = subprocess.run([*command, "--dry-run"], capture_output=True, check=True, **how).stdout
    assert "GPU hours together" in ahead
    assert max(map(len, ahead.splitlines())) <= 80
    assert not (hosts.root / "generated").exists()

    hidden.write_text("3.000000|\n")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    said = list[str]()
    with subprocess.Popen([*command, "--no-preflight"], **both, **how) as tune:
        for line in tune.stdout:
            said.append(line)
            if "trial 2 of at most 3" in line:
                hidden.write_text("3.000000|waits\n")
            if "running on" in line and len([one for one in said if "running on" in one]) == 2:
                tune.send_signal(signal.SIGINT)
    text = " ".join("".join(said).split())
    assert tune.returncode == 130, text
    assert "steps are enough: ending the trial" in text
    assert "3 s per step" in text
    assert "interrupted before all plans were tried; 2 trials took" in text
    assert text.endswith("-o mine.yaml --synthetic --go-on")
    hosts.assert_nothing_is_left()
    assert "time_band: " in (hosts.root / "mine.yaml").read_text()

    hidden.write_text("2.900000|\n")
    go_on = [*command, "--no-preflight", "--go-on", "--plans", "1"]
    again = subprocess.run(go_on, capture_output=True, check=True, **how).stdout
    shown = " ".join(again.split())
    assert "The best plan is " in shown
    assert "2 trials took" in shown
    assert f"topoplan launch {next(hosts.root.glob('generated/*-trials/best')).relative_to(hosts.root)}" in shown
    assert max(len(line) for line in again.splitlines() if "topoplan" not in line) <= 80
