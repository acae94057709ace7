"""The prediction for one configuration: its plan, the best plan of its job, and the keys that lead there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topoplan.lint.best import FittingChange, any_samples
from topoplan.lint.translate import Translation
from topoplan.planner.plan import Plan
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration
from topoplan.trainers.codec import shown
from topoplan.trainers.recognizers import trainer_of
from topoplan.trainers.registry import training_path_of

RULES = read_rules(__package__, "predictions.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key to change on the way from a configuration to the best plan."""

    key: str
    now: Any
    """The value in effect; None if the key is left out."""
    best: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one configuration."""

    configuration: Configuration
    translation: Translation | None = None
    """None if the trainer is not predicted or the configuration cannot be translated."""
    plan: Plan | None = None
    """None if the layout is illegal."""
    best: Plan | None = None
    """None if no layout fits."""
    best_of_backend: Plan | None = None
    """The best plan of the configuration's own backend."""
    fixes: tuple[FittingChange, ...] = ()
    """If nothing fits: changes with which the job would."""
    is_reported: bool = False
    """True if a finding says why there is no plan."""
    reason: str = ""
    """Why there is no plan."""
    no_best: str = ""
    """Why there is no best plan."""

    @property
    def speedup(self) -> float | None:
        """Throughput of the best plan divided by that of the configuration."""
        if self.plan is None or self.best is None:
            return None
        return self.best.tokens_per_s_per_gpu / self.plan.tokens_per_s_per_gpu

    def new_caveats(self, plan: Plan) -> tuple[str, ...]:
        """Return the known problems of another plan that the configuration's own lacks."""
        return tuple(caveat for caveat in plan.caveats if self.plan is None or caveat not in self.plan.caveats)

    @property
    def changes(self) -> tuple[Change, ...]:
        """The trainer's keys in which the best plan of the same backend differs."""
        target = self.best_of_backend
        if self.translation is None or target is None:
            return ()
        spec, layout = self.translation.spec, self.translation.layout
        rows = self.translation.codec.rows
        now, best = shown(rows, spec, layout), shown(rows, spec, target.layout)
        written = self.configuration.source.data
        if follows := self.translation.codec.follows:
            way = training_path_of(layout.backend, trainer_of(self.configuration).name)
            emitted, defaults = way.files(any_samples(spec), target.layout).values, self.translation.codec.defaults()
            for key in follows:
                if emitted.get(key) not in (None, True):  # turning a disabled switch on changes no prediction
                    now[key] = self.configuration.get(key, defaults[key])
                    best[key] = emitted[key]
        return tuple(
            Change(key=key, now=now[key], best=best[key])
            for key in now
            if now[key] != best[key] and (best[key] is not None or key in written)
        )
