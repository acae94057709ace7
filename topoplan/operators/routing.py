"""How unevenly tokens fall on the ranks of an expert group."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from statistics import NormalDist

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case
from topoplan.specs.model import Moe

UNEVENNESS = 0.36
"""Spread of the tokens that experts get by themselves, of that if one token chose for all.

Tokens of one text choose alike. From the slowdown by natural routing of Qwen3-235B-A22B on 256 H100
(Megatron-MoE-ModelZoo e865051, `best_practice/qwen3/readme.md`, Long Context, forced balance over dropless: 1.245,
1.209, 1.150 and 1.090 at 16k, 32k, 64k and 131k tokens, ep 8), of which each by itself gives a busiest rank with 1.48
to 1.53 times the average.
Mixtral 8x22B loses 4.5% there, less than this says."""


@lru_cache(maxsize=1 << 10)
def natural_imbalance(moe: Moe, ep: int) -> float:
    """Tokens of the busiest rank over the average, where nothing forces the router to balance them.

    Experts are taken to be independent: a rank's are the more even the more it has, and of more ranks one is further
    out (the expected largest of so many normal values, by Blom's approximation).
    """
    if ep == 1:
        return 1.0
    of_expert = UNEVENNESS * sqrt(moe.experts / moe.experts_per_token - 1.0)
    furthest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    return min(1.0 + furthest * of_expert * sqrt(ep / moe.experts), float(ep))


def imbalance_of(case: Case, layout: Layout) -> float:
    """What the job says, or what follows from how the router works; no more than experts have room for."""
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
    """Tokens are taken to fall as unevenly as in published runs, since nobody says how they fall in this one."""
    return case.job.token_imbalance is None and imbalance_of(case, layout) > 1.0
