"""How a user's own profile changes the order of plans, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, predicted_s
from topoplan.planner.plan import Ranking
from topoplan.planner.rank import TIE
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec

_MOST = 200
"""Number of plans considered, best first."""


def reordered(ranking: Ranking) -> tuple[str, ...]:
    """Return sentences on the best plan before calibration and on plans that ran out of memory.

    There are none without a calibrated profile.
    """
    spec, layouts = ranking.spec, ranking.plans.layouts[:_MOST]
    if spec.profile is None or spec.profile.calibrated is None or not layouts:
        return ()
    ended = dict.fromkeys(one.plan for one in spec.profile.calibrated.measured if one.needs_at_least_gib)
    here = {layout.id for layout in ranking.plans.layouts}
    return (
        _reordered(spec, layouts),
        *(
            f"{plan} ran out of memory on this cluster" + ("" if plan in here else ", and is left out")
            for plan in ended
        ),
    )


def _reordered(spec: Spec, layouts: Sequence[Layout]) -> str:
    own = replace(spec, profile=None)
    once = [predicted_s(own, layout, {}) for layout in layouts]
    was = min(range(len(layouts)), key=lambda place: once[place])
    best, other = layouts[0], layouts[was]
    now = [predicted_s(spec, layout, {}) for layout in (best, other)]
    if once[was] > once[0] * (1.0 - TIE) or now[1] < now[0] * (1.0 + TIE):
        return "the calibrated constants leave the best plan as it was"
    return (
        f"without the calibrated constants {other.id} led, by {100 * (once[0] / once[was] - 1):.0f}%; with them it is"
        f" {100 * (now[1] / now[0] - 1):.0f}% slower than plan 1{_because(spec, (best, other))}"
    )


def _because(spec: Spec, layouts: Sequence[Layout]) -> str:
    """Return the constants that speak most against the second of two layouts."""
    base, own, found = profile_of(spec.cluster.gpu), replace(spec, profile=None), []
    mine = profile_of(spec.cluster.gpu, spec.profile)
    for knob in KNOBS:
        factor = knob.factor(mine, base)
        ahead, behind = (
            predicted_s(own, layout, {knob.name: factor}) / predicted_s(own, layout, {}) for layout in layouts
        )
        found.append((math.log(behind / ahead), knob.name, factor))
    most, name, factor = max(found)
    return f", because of the {name}, which take {factor:.2f} times as long" if most > 0 else ""
