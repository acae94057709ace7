"""Sentences about plans: what a rejected one would need, what alternatives to the best would cost and gain.

Alternatives are other choices of the layout, another trainer or backend, and Liger's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from topoplan.engines.registry import engine_of
from topoplan.errors import LayoutError, ModelError, SpecError, listed
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, keys_of
from topoplan.planner.plan import Plan, Ranked, Ranking, Rejection
from topoplan.planner.predict import memory_of
from topoplan.planner.rank import CAVEAT_COST, TIE
from topoplan.specs.layout_parts import SIZE_KEYS
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.registry import trainer_refusal
from topoplan.trainers.trainer import Trainer
from topoplan.units import GIB


def memory_rejection(spec: Spec, layout: Layout) -> Rejection:
    """Return why a legal layout does not fit, and the nearest change after which it would."""
    memory = memory_of(case_of(spec, layout.backend), layout)
    worst = max(memory.by_stage, key=lambda stage: stage.allocated_bytes)
    largest = max(worst.parts_bytes, key=lambda part: worst.parts_bytes[part])
    if memory.excess_bytes > 0.0:
        reason = (
            f"{engine_of(layout.backend).place(worst)} needs {memory.device_bytes / GIB:.1f} GiB and a margin of"
            f" {memory.margin_bytes / GIB:.1f}, the card has {memory.capacity_bytes / GIB:.1f}:"
            f" {memory.excess_bytes / GIB:.1f} GiB too much; the largest part is {largest}"
            f" ({worst.parts_bytes[largest] / GIB:.1f} GiB)"
        )
    else:
        capacity = memory.host_capacity_bytes or 0.0
        reason = f"a node needs {memory.host_bytes / GIB:.0f} GiB of host memory and has {capacity / GIB:.0f}"
    return Rejection(layout=layout, rule="memory", reason=reason, fix=_fitting_change(spec, layout))


_ANY_HOST_BYTES = 2**60


def _fitting_change(spec: Spec, layout: Layout) -> str:
    """Return the mildest change of one layout that makes it fit, or nothing (`planner.ways_out` changes more)."""
    if found := _first_that_fits(spec, layout):
        return found
    if spec.cluster.host_memory_bytes is None:
        # Offload is not considered if the spec does not state how much host memory there is.
        with_host = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=_ANY_HOST_BYTES))
        if found := _first_that_fits(with_host, layout):
            return f"{found}: set host_memory in the spec"
    return ""


def _first_that_fits(spec: Spec, layout: Layout) -> str:
    """Return the mildest change after which the layout fits, with the memory that it then needs, or nothing."""
    for name, changed in engine_of(layout.backend).changes(layout):
        if not _keeps_pins(spec, changed):
            continue
        case = case_of(spec, changed.backend)
        if engine_of(changed.backend).verdict(case, changed, searched=True) or trainer_refusal(spec, changed):
            continue
        memory = memory_of(case, changed)
        if memory.fits:
            beside = f" and {memory.host_bytes / GIB:.0f} GiB of host memory per node" if memory.host_bytes else ""
            return f"{name} would fit ({memory.device_bytes / GIB:.1f} GiB{beside})"
    return ""


def _keeps_pins(spec: Spec, layout: Layout) -> bool:
    pin = {key: value for key, value in spec.job.pin.items() if key not in SIZE_KEYS}  # which a rule looks at
    if "recompute" in pin:
        pin["recompute"] = recompute_from_value(pin["recompute"])
    return all(getattr(layout, key) == value for key, value in pin.items())


MAX_NOTES = 6


def memory_difference(best: Ranked, other: Ranked) -> str:
    """Return a phrase on the memory of another plan compared with the best one."""
    spared = (best.memory.device_bytes - other.memory.device_bytes) / GIB
    return f"{abs(spared):.1f} GiB {'less' if spared > 0 else 'more'}" if abs(spared) >= 0.05 else "as much memory"


EQUAL = 0.005
"""Relative difference of two times below which it is not shown."""


def speed_words(time: float, decimals: int = 0) -> str:
    """Return a phrase on something that takes `time` times as long as what it is compared with.

    The percentage is that by which the longer of the two times is longer; from twice as long on, it is a factor.
    """
    longer, word = (time, "slower") if time > 1.0 else (1.0 / time, "faster")
    if longer < 1.0 + EQUAL:
        return "as fast"
    return f"{longer:.1f} times {word}" if longer >= 2.0 else f"{longer - 1.0:.{decimals}%} {word}"


def speed_difference(best: Ranked, other: Ranked) -> str:
    """Return a phrase on the speed of another plan compared with the best one."""
    return speed_words(best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu)


def alternatives(order: Sequence[Ranked], trainer_of: Callable[[Layout], Trainer | None]) -> list[str]:
    """Return, for every choice of the best plan, what the best plan with a different choice gains and loses.

    The other choices of that plan may differ too, and are named. A caveat that the best plan lacks is told once.
    Plans recompute in order to fit, so recomputation counts as a choice only if the best plan recomputes.
    `trainer_of` returns the trainer of a layout.
    """
    if not order:
        return []
    best = order[0]
    rivals = [plan for plan in order if plan.layout.backend == best.layout.backend]
    choices = {name: attrgetter(attribute) for name, attribute in engine_of(best.layout.backend).choices}
    found: dict[str, tuple[str, Ranked]] = {}
    for name, choice in choices.items():
        mine = choice(best.layout)
        other = next((plan for plan in rivals if choice(plan.layout) != mine), None)
        if other is not None and mine != "none":
            found.setdefault(other.id, (name, other))
    shown = sorted(found.values(), key=lambda pair: -pair[1].tokens_per_s_per_gpu)[:MAX_NOTES]
    notes, told = [], {*best.caveats}
    for name, other in shown:
        theirs = {
            key: f"{key} {of(other.layout)}" for key, of in choices.items() if of(other.layout) != of(best.layout)
        }
        change = f"{theirs.pop(name)} instead of {choices[name](best.layout)}"
        further = [*theirs.values(), *_other_means(best, other, trainer_of)]
        notes.append(
            f"{change}{f', with {listed(further)}' if further else ''}: {speed_difference(best, other)},"
            f" {memory_difference(best, other)} ({other.id}){_why_behind(best, other, told)}"
        )
        told |= {*other.caveats}
    return notes


def _other_means(best: Ranked, other: Ranked, trainer_of: Callable[[Layout], Trainer | None]) -> Iterator[str]:
    """Yield what another plan needs, or does without, that is not a choice of its layout: offload, another trainer."""
    if bool(other.memory.host_bytes) != bool(best.memory.host_bytes):
        yield "offload" if other.memory.host_bytes else "no offload"
    theirs = trainer_of(other.layout)
    if theirs is not None and theirs is not trainer_of(best.layout):
        yield theirs.title


def _why_behind(best: Ranked, other: Ranked, told: Container[str]) -> str:
    """Return a remark on a plan with caveats, of which some are `told`, or that is behind the best one though faster
    and smaller."""
    is_faster = other.tokens_per_s_per_gpu > best.tokens_per_s_per_gpu
    if other.caveats:
        cost = f", ranked as if {CAVEAT_COST:.0%} slower" if is_faster and not best.caveats else ""
        new = "; ".join(caveat for caveat in other.caveats if caveat not in told)
        return f"; caveat{cost}{f': {new}' if new else ''}"
    # Within a tie, whole GiB come before complexity, and complexity before speed (`planner.rank.ranked`).
    is_better = is_faster and other.memory.device_bytes < best.memory.device_bytes
    return f"; within {TIE:.0%} of plan 1, which is simpler" if is_better else ""


LIGER_KEY = "fused_linear_cross_entropy"


def liger_note(ranking: Ranking, search: Callable[[Spec], Ranking]) -> str | None:
    """Return a sentence on the best plan with Liger, compared with the best one without, or None."""
    spec = ranking.spec
    if not ranking.plans or ranking.searched < 1.0 or LIGER_KEY in spec.job.pin:
        return None
    best = ranking.plans[0]
    if not any(LIGER_KEY in keys_of(backend) for backend in (best.layout.backend, *ranking.searched_backends)):
        return None
    backends = tuple(backend for backend in spec.backends if LIGER_KEY in keys_of(backend))
    asked = replace(spec, backends=backends, job=replace(spec.job, pin={**spec.job.pin, LIGER_KEY: True}))
    try:
        found = search(asked)
    except (LayoutError, ModelError, SpecError):
        return None  # no trainer has its kernels for this model and job
    if not found.plans or found.searched < 1.0:
        return None
    other = found.plans[0]
    is_crossing = LIGER_KEY not in keys_of(best.layout.backend)
    if is_crossing and other.tokens_per_s_per_gpu <= best.tokens_per_s_per_gpu:
        return None  # another backend has to be faster with them to be worth a sentence
    return (
        f"Liger kernels: {speed_difference(best, other)}, {memory_difference(best, other)} ({other.id});"
        f" --pin {LIGER_KEY}=true enables them and needs the package liger-kernel"
    )


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
    speed = speed_difference(best, other)
    if speed != "as fast" and other.time.band_s[0] < best.time.band_s[1]:
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
