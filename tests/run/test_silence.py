"""When a run has gone quiet, and what is reported, on a manual clock."""

import pytest

from topoplan.run.events import Event
from topoplan.run.progress import Progress
from topoplan.run.silence import SilenceDetector


class Run:
    """Two nodes with two ranks each that take 20 s per step."""

    def __init__(self, **progress: float) -> None:
        self.now_s = 1000.0
        self.progress = Progress(**{"step_s": 20.0, "total_steps": 100, "start_up_s": 90.0, **progress})  # type: ignore[arg-type]
        self.silence = SilenceDetector(self.progress, ranks_per_node=2, clock=lambda: self.now_s)

    def says(self, node: int, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self.progress.feed(node, text, self.now_s)
        self.silence.read(node, f"node-{node:02d}", text)

    def steps(self, step: int) -> None:
        self.says(0, f"[default0]:  1%|1 | {step}/100 [00:01<00:10, 1.0s/it]")

    def passes(self, seconds: float, *, at_most_s: float | None = None) -> list[Event]:
        """Let time pass with a check each second; return the events."""
        found = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            if (event := self.silence.look(at_most_s=at_most_s)) is not None:
                found.append(event)
        return found


def test_it_is_said_once_with_the_last_line_of_each_rank_and_its_age() -> None:
    run = Run()
    run.says(1, "[default0]:[rank2]: ready", "[default1]:loading", "a note of torchrun")
    run.passes(30)
    run.steps(3)
    run.says(1, "[default1]:step 3 done, " + "x" * 80)
    assert run.passes(99) == []
    [event] = run.passes(1000)
    assert event.data["quiet_s"] == 100.0
    assert [(one["node"], one["rank"], one["age_s"]) for one in event.data["ranks"]] == [
        ("node-01", 2, 129.0),
        ("node-00", 0, 99.0),
        ("node-01", 3, 99.0),
    ]
    assert event.text.splitlines() == [
        "no step for 100 s (after step 3; one takes 20 s); the last lines:",
        "  node-01 rank 2, 2 min ago: ready",
        "  node-00 rank 0, 99 s ago: 1%|1 | 3/100 [00:01<00:10, 1.0s/it]",
        "  node-01 rank 3, 99 s ago: step 3 done, xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...",
    ]
    assert max(map(len, event.text.splitlines())) <= 80


def test_a_pause_that_healed_makes_it_wait_longer_the_next_time() -> None:
    run = Run()
    run.steps(1)
    assert len(run.passes(150)) == 1
    run.steps(2)
    assert not run.silence.is_reported
    assert run.passes(299) == []
    assert len(run.passes(10)) == 1


@pytest.mark.parametrize("line", ["Saving", "[default1]:warning: waiting"])
def test_before_the_first_step_any_line_is_a_sign_of_life_and_then_none_but_steps_and_bars(line: str) -> None:
    run = Run()
    for _ in range(20):
        run.says(0, line)
        assert run.passes(60) == []
    [event] = run.passes(60)
    assert event.text.startswith("no output for 90 s, and no step yet; the last lines:")
    run.steps(1)
    for _ in range(5):
        assert run.passes(60) == []
        run.says(1, "  5%|## | 2/40 [00:07<00:10, 1.0s/it]")  # an evaluation
    assert sum(len((run.says(0, line), run.passes(60))[1]) for _ in range(5)) == 1


def test_after_the_last_step_files_are_written() -> None:
    run = Run(start_up_s=600.0)
    run.steps(100)
    assert run.passes(590) == []
    assert len(run.passes(20)) == 1


def test_a_process_that_was_stopped_has_not_heard_and_says_nothing() -> None:
    run = Run()
    run.steps(1)
    run.now_s += 3600
    assert run.passes(90) == []
    assert len(run.passes(20)) == 1


def test_who_wants_it_sooner_hears_it_sooner() -> None:
    run = Run()
    run.steps(1)
    assert run.passes(4, at_most_s=5.0) == []
    assert len(run.passes(1, at_most_s=5.0)) == 1


def test_who_stopped_to_write_before_the_others_is_the_suspect() -> None:
    run = Run()
    run.says(1, "torchrun begins", "[default0]:once")
    run.passes(1)
    for _ in range(10):
        run.says(0, "[default0]:a", "[default1]:b")
        run.says(1, "[default0]:c", "[default1]:d")
        run.passes(1)
    assert run.silence.suspect() is None
    for _ in range(10):
        run.says(0, "[default0]:a", "[default1]:b")
        run.says(1, "[default0]:c")
        run.passes(1)
    late = run.silence.suspect()
    assert (late.name, late.rank, late.line) == ("node-01", 3, "d")
    run.passes(300)
    assert run.silence.suspect() is None
