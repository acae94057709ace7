"""How unevenly tokens are distributed over the ranks of an expert-parallel group."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from statistics import NormalDist

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case
from topoplan.specs.model import Moe

UNEVENNESS = 0.36
"""Standard deviation of the tokens per expert under natural routing, relative to its value if all tokens chose alike.

Tokens of one text make similar choices. Derived from the slowdown by natural routing of Qwen3-235B-A22B on 256 H100
(Megatron-MoE-ModelZoo e865051, `best_practice/qwen3/readme.md`, Long Context, forced balance over dropless: 1.245,
1.209, 1.150 and 1.090 at 16k, 32k, 64k and 131k tokens, ep 8); each of these alone implies a busiest rank with 1.48 to
1.53 times the average. Mixtral 8x22B loses 4.5% there, less than this value predicts.
"""


@lru_cache(maxsize=1 << 10)
def natural_imbalance(moe: Moe, ep: int) -> float:
    """Return the tokens of the busiest rank over the average, if nothing forces the router to balance them.

    Experts are assumed independent: the more experts a rank has, the more even its load; the more ranks there are, the
    further out the busiest one (the expected maximum of `ep` normal variables, by Blom's approximation).
    """
    if ep == 1:
        return 1.0
    of_expert = UNEVENNESS * sqrt(moe.experts / moe.experts_per_token - 1.0)
    furthest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    return min(1.0 + furthest * of_expert * sqrt(ep / moe.experts), float(ep))


def imbalance_of(case: Case, layout: Layout) -> float:
    """Return the imbalance that the job states or the router implies, limited by the expert capacity."""
    if layout.ep == 1 or layout.moe_router_force_load_balancing:
        return 1.0
    moe = next((layer.ffn for layer in case.model.layers if isinstance(layer.ffn, Moe)), None)
    if moe is None:
        return 1.0
    if case.job.token_imbalance is not None:
        found = case.job.token_imbalance
    elif case.traits.routes_freely or layout.moe_router_force_load_balancing is False:
        found = natural_imbalance(moe, layout.ep)
    else:
        found = 1.0
    room = layout.moe_expert_capacity_factor
    return found if room is None else max(1.0, min(found, room))


def is_routing_assumed(case: Case, layout: Layout) -> bool:
    """Return whether the imbalance is taken from published runs, because the job does not state it."""
    return case.job.token_imbalance is None and imbalance_of(case, layout) > 1.0
