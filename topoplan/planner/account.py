"""The accounts of a plan (where memory and time go, its step as events), and those of two plans side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.registry import engine_of
from topoplan.engines.timeline import Timeline
from topoplan.layout.forms import layout_to_dict
from topoplan.layout.layout import DEFAULTS
from topoplan.planner.plan import Plan
from topoplan.planner.rank import TIE, ranked
from topoplan.specs.spec import Spec
from topoplan.terms import Difference, Term, differences, source_of
from topoplan.trainers.case import case_of


def memory_account(spec: Spec, plan: Plan) -> MemoryAccount:
    """Return the terms of `plan.memory`, which must list every stage (`planner.predict.predict`)."""
    layout = plan.layout
    return engine_of(layout.backend).memory_account(case_of(spec, layout.backend), layout, plan.memory)


def time_account(spec: Spec, plan: Plan) -> TimeAccount:
    """Return the terms of `plan.time`."""
    layout = plan.layout
    return engine_of(layout.backend).time_account(case_of(spec, layout.backend), layout, plan.time)


def timeline(spec: Spec, plan: Plan) -> Timeline:
    """Return the simulated step of a plan."""
    layout = plan.layout
    return engine_of(layout.backend).timeline(case_of(spec, layout.backend), layout, plan.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans and how they differ."""

    first: Plan
    second: Plan
    layout: Mapping[str, tuple[Any, Any]]
    """Layout keys that differ, with the values of their JSON form; None for a key that a backend does not have."""
    time: tuple[Difference, ...]
    """Every part of a step in seconds, largest difference first. The parts add up to the step."""
    memory: tuple[Difference, ...]
    """Every part of the worst stage in bytes, largest difference first. The parts add up to the device memory."""

    @property
    def winner(self) -> Plan:
        """The plan that fits, or if both do, the one that a ranking puts first."""
        fitting = [plan for plan in (self.first, self.second) if plan.fits]
        return ranked(fitting or (self.first, self.second))[0]

    @property
    def loser(self) -> Plan:
        """The other plan."""
        return self.second if self.winner is self.first else self.first

    @property
    def share_a_model(self) -> bool:
        """Whether both plans are predicted by one cost model, and so share most of its errors."""
        return engine_of(self.first.layout.backend) is engine_of(self.second.layout.backend)

    @property
    def is_tie(self) -> bool:
        """Whether their speeds are closer than a ranking distinguishes."""
        slow, fast = sorted((self.first.tokens_per_s_per_gpu, self.second.tokens_per_s_per_gpu))
        return slow >= fast * (1.0 - TIE)


def compare(spec: Spec, first: Plan, second: Plan) -> Comparison:
    """Compare two plans of one job, whose memory must list every stage (`planner.predict.predict`)."""
    steps = [time_account(spec, plan).step for plan in (first, second)]
    devices = [memory_account(spec, plan).device for plan in (first, second)]
    return comparison(first, second, steps, devices)


def comparison(first: Plan, second: Plan, steps: Sequence[Term], devices: Sequence[Term]) -> Comparison:
    """Compare two plans, given the trees of their steps and of their device memory."""
    one, two = layout_to_dict(first.layout), layout_to_dict(second.layout)
    return Comparison(
        first=first,
        second=second,
        layout={key: (one.get(key), two.get(key)) for key in (one | two) if _differs(one, two, key)},
        time=differences(*(step.children for step in steps)),
        memory=differences(*(_purposes(device) for device in devices)),
    )


def _differs(one: Mapping[str, Any], two: Mapping[str, Any], key: str) -> bool:
    """Return whether a key differs; a key of only one of the backends differs if it is not at its default."""
    if key in one and key in two:
        return bool(one[key] != two[key])
    return bool(one.get(key, two.get(key)) != DEFAULTS[key])


def _purposes(device: Term) -> list[Term]:
    """Return what the worst stage holds by purpose, and what the card holds beyond torch's tensors."""
    allocated = device.at("reserved", "allocated")
    beyond = Term("beyond tensors", device.value - allocated.value, "bytes", source_of(memory_account))
    return [*allocated.children, beyond]
