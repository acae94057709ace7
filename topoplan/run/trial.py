"""A launch that ends its run itself: once there are enough steps to measure, or when it takes too long."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

from topoplan.run.attempts import RetryingLaunch
from topoplan.run.reachability import duration_text
from topoplan.run.session import Outcome
from topoplan.run.watch import Watch


class TrialSession(RetryingLaunch):
    """A session that ends its run before the trainer finishes, when it would save the model."""

    WAIT_REASON: ClassVar[str] = "the next trial waits until nothing of this one can be left"

    def __init__(self, *launch: Any, steps: int, at_most_s: float, **options: Any) -> None:
        """`launch` and `options` are those of a launch; the trial may take `at_most_s` from its start on the hosts."""
        super().__init__(*launch, **options)
        self._wanted_steps, self._at_most_s = steps, at_most_s
        self._started_s: float | None = None
        self._watched: Watch | None = None
        self.took_s = 0.0
        """Seconds for which the trial occupied the hosts."""

    def go(self) -> Outcome:
        """Perform the session and return its outcome. Raises what a launch raises."""
        try:
            return super().go()
        finally:
            self.took_s = self._age_s

    @property
    def _age_s(self) -> float:
        return 0.0 if self._started_s is None else time.monotonic() - self._started_s

    def _start_all(self) -> Outcome | None:
        self._started_s = time.monotonic()
        return super()._start_all()

    def _may_detach(self, watch: Watch) -> bool:
        self._watched = watch
        return watch.status.step >= self._wanted_steps or self._age_s >= self._at_most_s

    def _detached(self) -> Outcome:
        """Stop the run instead of leaving it running: it has enough steps, or has taken too long."""
        watch = self._watched
        step = watch.status.step if watch is not None else 0
        enough = step >= self._wanted_steps
        reason = f"{step} steps are enough" if enough else f"{step} steps after {duration_text(self._at_most_s)}"
        self._step("stop", f"{reason}: ending the trial")
        left = self._stop_all(watch)
        if not left:
            self._update_record(
                "stopped", 0, reason=f"topoplan tune: {reason}", nodes=watch.nodes if watch is not None else ()
            )
        return Outcome(end="stopped", code=0, run=self._run, errors=left, running=tuple(left))

    def _watch(self) -> Outcome:
        """Watch the run.

        If a host was lost, wait until nothing of this trial is left there, before the next trial starts.
        """
        outcome = super()._watch()
        if outcome.end not in ("failed", "stopped") or not outcome.errors:
            return outcome
        return self._wait_until_nothing_is_left(outcome) or replace(outcome, errors={}, running=())
