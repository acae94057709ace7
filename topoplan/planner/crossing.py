"""What a change of trainer or backend costs and gains, compared with the best plan of a search over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.planner.explain import memory_difference, speed_difference
from topoplan.planner.plan import Plan, Ranked, Rejection
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.trainer import Trainer


def crossings(
    order: Sequence[Ranked],
    plans: Sequence[Plan],
    searched: Sequence[str],
    illegal: Mapping[str, Rejection],
    unable: Mapping[str, Refusal],
    trainer_of: Callable[[Layout], Trainer | None],
) -> Iterator[str]:
    """Yield a sentence for the best plan of every other backend and trainer, fastest first.

    Sentences on backends without a plan follow. `order` and `plans` are the same plans, best first. `illegal` has an
    example layout for each backend whose layouts all break a rule; `unable` says why a backend was not searched;
    `trainer_of` returns the trainer of a layout.
    """
    found: dict[tuple[str, str], int] = {}
    for place, one in enumerate(order):
        trainer = trainer_of(one.layout)
        found.setdefault((one.layout.backend, trainer.title if trainer else ""), place)
    others = [plans[place] for place in list(found.values())[1:]]
    yield from (_against(plans[0], other, trainer_of) for other in others)
    warned = dict.fromkeys(warning for other in others for warning in other.warnings)
    yield from (f"for these: {warning}" for warning in warned if warning not in plans[0].warnings)
    fitting = {backend for backend, _ in found}
    for backend in searched if order else ():
        if backend not in fitting:
            yield f"{backend}: {_nothing(illegal[backend]) if backend in illegal else 'nothing fits'}"
    yield from (f"{backend} is ruled out: {refusal.what}" for backend, refusal in unable.items())


def _nothing(example: Rejection) -> str:
    return f"no layout is legal; {example.layout.id} breaks rule {example.rule}: {example.reason}; {example.fix}"


def _against(best: Plan, other: Plan, trainer_of: Callable[[Layout], Trainer | None]) -> str:
    slower = best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu
    speed = f"{slower:.1f} times slower" if slower >= 2.0 else speed_difference(best, other)
    if abs(slower - 1.0) >= 0.005 and other.time.band_s[0] < best.time.band_s[1]:
        speed += " (the error bands overlap)"
    theirs, ours = trainer_of(other.layout), trainer_of(best.layout)
    name = other.layout.backend + (f" ({theirs.title})" if theirs else "")
    packages = _packages(theirs, other.layout.backend, ours, best.layout.backend)
    return f"{name}: {speed}, {memory_difference(best, other)} ({other.id}){packages}"


def _packages(theirs: Trainer | None, backend: str, ours: Trainer | None, best: str) -> str:
    """Return which packages have to be installed for the other plan, and which are not needed."""
    their_way = theirs.training_path_for(backend) if theirs else None
    our_way = ours.training_path_for(best) if ours else None
    if their_way is None or our_way is None:
        return ""
    wanted, spared = their_way.packages[backend], our_way.packages[best]
    more = [name for name in wanted if name not in spared]
    less = [name for name in spared if name not in wanted]
    if more and less:
        return f"; needs {listed(more)} instead of {listed(less)}"
    return f"; also needs {listed(more)}" if more else f"; does not need {listed(less)}" if less else ""
