"""What Liger's kernels would gain for a plan whose trainer supports them.

They require a package of their own, so a search uses them only when asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from topoplan.errors import LayoutError, ModelError, SpecError
from topoplan.layout.layout import keys_of
from topoplan.planner.explain import memory_difference, speed_difference
from topoplan.planner.plan import Ranking
from topoplan.specs.spec import Spec

KEY = "fused_linear_cross_entropy"


def liger_note(ranking: Ranking, search: Callable[[Spec], Ranking]) -> str | None:
    """Return a sentence on the best plan with Liger, compared with the best one without, or None."""
    spec = ranking.spec
    if not ranking.plans or ranking.searched < 1.0 or KEY in spec.job.pin:
        return None
    best = ranking.plans[0]
    if not any(KEY in keys_of(backend) for backend in (best.layout.backend, *ranking.searched_backends)):
        return None
    backends = tuple(backend for backend in spec.backends if KEY in keys_of(backend))
    asked = replace(spec, backends=backends, job=replace(spec.job, pin={**spec.job.pin, KEY: True}))
    try:
        found = search(asked)
    except (LayoutError, ModelError, SpecError):
        return None  # no trainer has its kernels for this model and job
    if not found.plans or found.searched < 1.0:
        return None
    other = found.plans[0]
    is_crossing = KEY not in keys_of(best.layout.backend)
    if is_crossing and other.tokens_per_s_per_gpu <= best.tokens_per_s_per_gpu:
        return None  # another backend has to be faster with them to be worth a sentence
    return (
        f"Liger kernels: {speed_difference(best, other)}, {memory_difference(best, other)} ({other.id});"
        f" --pin {KEY}=true enables them and needs the package liger-kernel"
    )
