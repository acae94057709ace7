"""The progress of a run, read from the lines that its trainer prints (each trainer's `trainers/log.py` describes them).

Tokens per second are computed from the steps and the plan's tokens, not from the `token_per_sec_per_gpu` that
LLaMA-Factory's Megatron trainer prints: that figure adds up the lengths of the padded micro-batches of its own rank, as
if each held one sequence and no other GPU worked on it (mcore_adapter/trainer/trainer.py,
`_get_step_iterator_and_seq_length`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Self

from topoplan.operators.padding import tokens_per_step
from topoplan.planner.effort import STARTS_S, start_up_s
from topoplan.planner.logged import Interval
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers import registry
from topoplan.trainers.log import Log, clock_s, elapsed_s, pieces
from topoplan.trainers.registry import steps_of, trainer_named

_AT_ONCE = 50
"""When more lines arrive at once, only this many last ones update the state; losses in the others are only counted."""
_INTERVALS = 20
_LEAST_S = 2.0
"""Shortest time over which steps are timed: torchrun forwards lines every 0.1 s."""
_LEAST_ELAPSED_S = 10.0
"""Shortest time when the progress bar's clock is used, which shows whole seconds."""
_LATE_S = 1.5
"""If arrival times and the bar's clock differ by more, lines were held up (a lost connection), or the log is old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is known of a run at one moment."""

    step: int
    """Number of completed optimizer steps."""
    total_steps: int | None
    """The step at which the run ends; None if neither the plan nor the trainer gives it."""
    loss: float | None
    """Last loss that was printed, possibly NaN; None before the first."""
    step_s: float | None
    """Seconds per step, the median of the last intervals; None until two steps have been seen."""
    tokens_per_s: float | None
    """Over all GPUs; tokens are counted as in the plan."""
    tokens_per_s_per_gpu: float | None
    left_s: float | None
    """Seconds until the last step at the current speed."""
    predicted_step_s: float | None
    predicted_band_s: tuple[float, float] | None
    ratio: float | None
    """step_s divided by the predicted step time: above 1 is slower."""
    in_band: bool | None


class Progress:
    """Reads the lines of all nodes as they arrive. Ignores what it does not recognize, and never raises."""

    def __init__(
        self,
        *,
        step_s: float | None = None,
        band_s: tuple[float, float] | None = None,
        tokens_per_step: float | None = None,
        total_steps: int | None = None,
        world_size: int = 1,
        logging_steps: int = 1,
        start_up_s: float = STARTS_S,
        logs: tuple[Log, ...] | None = None,
        ends_at: int | None = None,
    ) -> None:
        """Start before the first line.

        `step_s` and `band_s` are the prediction; `world_size` counts GPUs; losses are logged every `logging_steps`
        steps; `start_up_s` is the predicted time until the first step. `logs` are the formats to recognize; None: of
        all trainers. `ends_at` is the step at which the run is ended although the trainer would go on.
        """
        self._logs = logs or tuple(trainer.log for trainer in registry.TRAINERS)
        self._predicted_s, self._band_s = step_s, band_s
        self._tokens, self._world = tokens_per_step, world_size
        self._planned_steps, self._logging_steps = total_steps, logging_steps
        self._ends_at = ends_at
        self.start_up_s = start_up_s
        self._bar_total: int | None = None
        self._losses: dict[int, int] = {}
        self._step = 0
        self._loss: float | None = None
        self._mark: tuple[int, float | None, int | None] | None = None
        self._asides = tuple({log.aside for log in self._logs})
        self._aside = False
        self.intervals: deque[Interval] = deque(maxlen=_INTERVALS)
        """The last intervals that were timed; the first step is in none of them."""

    @classmethod
    def of(cls, spec: Spec, plan: Plan, *, ends_at: int | None = None) -> Self:
        """Return a reader with the prediction of a plan."""
        logging_steps = spec.job.trainer.get("logging_steps", 1)
        return cls(
            step_s=plan.time.step_s,
            band_s=plan.time.band_s,
            tokens_per_step=tokens_per_step(spec.job),
            total_steps=steps_of(spec.job, plan.layout.backend, plan.trainer),
            world_size=spec.cluster.nodes * spec.cluster.gpus_per_node,
            logging_steps=logging_steps if isinstance(logging_steps, int) and logging_steps > 0 else 1,
            start_up_s=start_up_s(spec),
            logs=(trainer_named(plan.trainer).log,) if plan.trainer else None,
            ends_at=ends_at,
        )

    def feed(self, node: int, lines: str, at_s: float | None) -> Status | None:
        """Read lines of a node that arrived at `at_s`, on any monotonic clock; None if they contain nothing new.

        `at_s` is None for lines that were written some time before they arrived, so that only their own clock times
        them."""
        aside = any(form.search(lines) for form in self._asides)
        self._aside = self._aside or aside
        if "%|" not in lines and "loss" not in lines:
            return None
        before = self._step, self._loss
        seen = False
        found = [line for line in lines.split("\n") if "%|" in line or "loss" in line]
        if self._bar_total is None and (passed := "\n".join(found[:-_AT_ONCE])):
            more = max(len(log.loss.findall(passed)) for log in self._logs)
            self._losses[node] = self._losses.get(node, 0) + more
        for line in found[-_AT_ONCE:]:
            for part in pieces(line):
                seen = self._read(node, part, at_s) or seen
        # The line of an evaluation or checkpoint may follow the step that ends an interval: it counts for the next.
        self._aside = self._aside or aside
        return self.status() if seen and (self._step, self._loss) != before else None

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self._step

    @property
    def is_under_way(self) -> bool:
        """Whether there were steps, and more are to come."""
        return self._step > 0 and self._step != self._total

    @property
    def pace_s(self) -> float:
        """The longest expected time from one logged step to the next; 0 if unknown."""
        longest_s: float = max(
            [*(one.each_s for one in self.intervals), *(self._band_s or ()), self._predicted_s or 0.0]
        )
        return self._logging_steps * longest_s

    @property
    def _total(self) -> int | None:
        return self._planned_steps if self._bar_total is None else self._bar_total

    def status(self) -> Status:
        """Return the current status."""
        timed = [one.each_s for one in self.intervals if not one.aside] or [one.each_s for one in self.intervals]
        step_s = median(timed) if timed else None
        total = self._total
        if total is not None and self._ends_at is not None:
            # A step more may be done before the end.
            total = min(total, max(self._ends_at, self._step))
        tokens_per_s = self._tokens / step_s if self._tokens and step_s else None
        return Status(
            step=self._step,
            total_steps=total,
            loss=self._loss,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / self._world if tokens_per_s else None,
            left_s=max(0, total - self._step) * step_s if total is not None and step_s else None,
            predicted_step_s=self._predicted_s,
            predicted_band_s=self._band_s,
            ratio=step_s / self._predicted_s if step_s and self._predicted_s else None,
            in_band=self._band_s[0] <= step_s <= self._band_s[1] if step_s and self._band_s else None,
        )

    def _read(self, node: int, text: str, at_s: float | None) -> bool:
        bar = next((found for log in self._logs if log.bar and (found := log.bar.match(text))), None)
        if bar:
            self._take_bar(int(bar["step"]), int(bar["total"]), at_s, clock_s(bar["clock"]))
        losses = [(log, found) for log in self._logs if (found := log.loss.search(text))]
        if losses:
            log, loss = next((one for one in losses if one[0].steps and one[0].steps.search(text)), losses[0])
            self._take_loss(log, node, text, float(loss["loss"]), at_s)
        return bool(bar or losses)

    def _take_bar(self, step: int, total: int, at_s: float | None, drawn_s: int) -> None:
        if total != self._bar_total:
            # An evaluation draws a bar too. Before the first loss, the right bar is the plan's, or else the longest.
            known = self._bar_total
            better = known is None or (known != self._planned_steps and (total == self._planned_steps or total > known))
            if self._losses or not better:
                self._aside = True
                return
            self._bar_total, self._step, self._mark = total, 0, None
            self.intervals.clear()
        self._take_step(step, at_s, drawn_s)

    def _take_loss(self, log: Log, node: int, text: str, loss: float, at_s: float | None) -> None:
        self._loss = loss
        self._losses[node] = count = self._losses.get(node, 0) + 1
        if log.steps and (found := log.steps.search(text)):
            if total := found.groupdict().get("total"):
                self._bar_total = int(total)
            clock = log.elapsed.search(text) if log.elapsed else None
            self._take_step(int(found["step"]), at_s, elapsed_s(clock) if clock else None)
        elif self._bar_total is None:
            self._take_step(count * self._logging_steps, at_s, None)

    def _take_step(self, step: int, at_s: float | None, clock: int | None) -> None:
        if step <= self._step:
            return
        self._step = step
        if self._mark is None:
            # Not timed from step 0: the first step compiles and allocates.
            self._mark = step, at_s, clock
            return
        marked, marked_at_s, marked_clock = self._mark
        arrived_s = None if at_s is None or marked_at_s is None else at_s - marked_at_s
        drawn_s = None if clock is None or marked_clock is None else float(clock - marked_clock)
        if drawn_s is not None and (arrived_s is None or abs(arrived_s - drawn_s) > _LATE_S):
            span_s, least_s = drawn_s, _LEAST_ELAPSED_S
        elif arrived_s is not None:
            span_s, least_s = arrived_s, _LEAST_S
        else:
            # Nothing tells how long this took: time from here.
            self._mark, self._aside = (step, at_s, clock), False
            return
        if span_s >= least_s:
            self.intervals.append(Interval(step, step - marked, span_s, self._aside))
            self._mark, self._aside = (step, at_s, clock), False
