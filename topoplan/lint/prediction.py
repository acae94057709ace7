"""What is known of a configuration: its plan, the best plan of its job, and the keys that lead there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topoplan.lint.best import Way, any_samples
from topoplan.lint.translate import Translation
from topoplan.planner.plan import Plan
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration
from topoplan.trainers.codec import shown
from topoplan.trainers.recognisers import trainer_of
from topoplan.trainers.registry import way_of

RULES = read_rules(__package__, "predictions.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key that leads from a configuration to the best plan."""

    key: str
    now: Any
    """As the trainer has it; None where it is left out."""
    best: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of one configuration."""

    configuration: Configuration
    translation: Translation | None = None
    """None for a trainer that is not predicted, or a configuration that cannot be."""
    plan: Plan | None = None
    """None where the layout is illegal."""
    best: Plan | None = None
    """None where no layout fits."""
    own: Plan | None = None
    """The best one of the configuration's own backend."""
    ways: tuple[Way, ...] = ()
    """Where nothing fits: with what it would."""
    told: bool = False
    """A finding says why there is no plan."""
    reason: str = ""
    """Why there is no plan."""
    no_best: str = ""
    """Why there is no best plan."""

    @property
    def faster(self) -> float | None:
        """Throughput of the best plan over that of the configuration."""
        if self.plan is None or self.best is None:
            return None
        return self.best.tokens_per_s_per_gpu / self.plan.tokens_per_s_per_gpu

    @property
    def changes(self) -> tuple[Change, ...]:
        """The trainer's keys in which the best plan of the same backend differs."""
        target = self.own
        if self.translation is None or target is None:
            return ()
        spec, layout = self.translation.spec, self.translation.layout
        rows = self.translation.codec.rows
        now, best = shown(rows, spec, layout), shown(rows, spec, target.layout)
        written = self.configuration.source.data
        if follows := self.translation.codec.follows:
            way = way_of(layout.backend, trainer_of(self.configuration).name)
            emitted, defaults = way.files(any_samples(spec), target.layout).values, self.translation.codec.defaults()
            for key in follows:
                if emitted.get(key) not in (None, True):  # switching on what is off changes nothing that is predicted
                    now[key] = self.configuration.get(key, defaults[key])
                    best[key] = emitted[key]
        return tuple(
            Change(key=key, now=now[key], best=best[key])
            for key in now
            if now[key] != best[key] and (best[key] is not None or key in written)
        )
