"""What a job could change to fit, or to fit with room: each way worked out by a search of the changed spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import ceil

from topoplan.catalog import gpu_names
from topoplan.errors import InputError, listed
from topoplan.layout.layout import Layout, keys_of
from topoplan.planner.liger import KEY
from topoplan.planner.plan import Change, Ranking, WayOut
from topoplan.planner.predict import predict
from topoplan.planner.rank import ranked
from topoplan.planner.risk import LOOKED_AT, has_room
from topoplan.planner.what_if import Search, found_by
from topoplan.specs.cluster import MOST_GPUS
from topoplan.specs.gpu import Gpu
from topoplan.specs.known import gpu
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import backends_of
from topoplan.units import GIB

MOST_SEARCHES = 32
MOST_LAYOUTS, MOST_LAYOUTS_WHERE_TIGHT = 1_500_000, 300_000
"""Candidates of all searches together, after which none is begun: some 20 seconds of them, and 4. In layouts, since the
same question has to have the same answer, on a slow machine and where searches of before are known."""
_ANY_HOST_MEMORY = "64TiB"
_DOUBLINGS = 4
_SHORTEST = 1 / 8
"""Sequences, against those of the job: much less is no way out."""
_HALF_AS_FAST = 0.5
_LARGER, _NEXT_CARD = 1.1, 1.25
"""Times the memory of one's own card, and of one that did not do, from which another is looked at."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of way out."""

    name: str
    """What is said where it leads nowhere."""
    loss: str
    """What the user gives up."""


KINDS = {
    "pins": Kind("without the pins", "same job and machines"),
    "engine": Kind("another backend", "same job and machines"),
    "liger": Kind("Liger's kernels", "same job and machines, a package more"),
    "host_memory": Kind("offload", "same job and GPUs, if the nodes have it"),
    "nodes": Kind(f"up to {2**_DOUBLINGS} times the nodes", "same job, more machines"),
    "gpu": Kind("a larger card of its kind", "same job, other machines"),
    "lora": Kind("LoRA", "another job: adapters alone are trained"),
    "qlora": Kind("QLoRA", "another job: adapters, on rounded weights"),
    "seq_len": Kind("sequences down to an eighth", "another job: longer samples are cut"),
}
"""In the order in which they are told: by what the user gives up.

First what leaves job and machines as they are; then the same job on more or other machines, which costs money; last
what trains something else. Adapters come before shorter sequences, since they see all of the data.
"""
_WHERE_TIGHT = ("engine", "host_memory", "nodes", "gpu")
"""Kinds that leave the job as it is: one that fits, if barely, does not have to be another."""


def ways_out(ranking: Ranking, read: Callable[[Change], Spec], search: Search) -> tuple[WayOut, ...]:
    """The ways out of a ranking that needs some, in the order of `KINDS`; those that lead nowhere have no plan.

    `read` gives the spec with a change, as the command line would, and raises InputError where that does not go
    together. The searches that take longest, those of more GPUs, come last, and none is begun after MOST_SEARCHES of
    them or MOST_LAYOUTS: what is not tried then is told. A search that is stopped ends it, too.
    """
    tries = _Tries(read, search, with_room=bool(ranking.plans))
    kinds = {
        "pins": _pins,
        "engine": _engine,
        "liger": _liger,
        "host_memory": _host_memory,
        "lora": _lora,
        "qlora": _qlora,
        "seq_len": _seq_len,
        "gpu": _gpu,
        "nodes": _nodes,
    }
    found = {}
    for kind, work in kinds.items():
        if (not ranking.plans or kind in _WHERE_TIGHT) and (way := tries.of(kind, work, ranking)):
            found[kind] = way
    return tuple(found[kind] for kind in KINDS if kind in found)


class _SpentError(Exception):
    """No more searches."""


_NONE = WayOut(change=Change(kind="", words=""))


class _Tries:
    """The searches that are done, and those that may still be."""

    def __init__(self, read: Callable[[Change], Spec], search: Search, *, with_room: bool) -> None:
        self._read, self._search, self._with_room = read, search, with_room
        self._left = MOST_SEARCHES
        self._layouts_left = MOST_LAYOUTS_WHERE_TIGHT if with_room else MOST_LAYOUTS
        self._last = _NONE
        """The last change that was tried, if it leads nowhere."""

    def of(self, kind: str, work: Callable[[_Tries, Ranking], WayOut | None], ranking: Ranking) -> WayOut | None:
        """The way of one kind; without a plan where none was found, None where there is nothing to try."""
        self._last = _NONE
        try:
            way = work(self, ranking)
        except _SpentError:
            last = Change(kind=kind, words=self._last.change.words)
            return WayOut(change=last, reason="not tried to the end: the searches took too long", is_tried=False)
        return way or (None if self._last is _NONE else self._last)

    def __call__(self, change: Change) -> WayOut | None:
        """The plan after a change; None where there is none. Raises _SpentError."""
        self._last = WayOut(change=change)
        if self._left == 0 or self._layouts_left < 0:
            raise _SpentError
        self._left -= 1
        try:
            found, ranking = found_by(self._read(change), self._search)
        except InputError as error:
            self._last = WayOut(change=change, reason=str(error))
            return None
        if ranking is not None:
            self._layouts_left -= ranking.counts.candidates
            if ranking.searched < 1.0:
                self._left = 0
                raise _SpentError
        plans = islice(ranking.plans, LOOKED_AT) if ranking and self._with_room else filter(None, [found.best])
        plan = next((plan for plan in plans if not self._with_room or has_room(plan)), None)
        if plan is None:
            self._last = WayOut(change=change, reason=found.reason or "no plan with room")
            return None
        self._last = _NONE
        return WayOut(change=change, plan=plan)

    def known(self, change: Change, layout: Layout) -> WayOut:
        """A change after which a layout is known to be a way out."""
        return WayOut(change=change, plan=predict(self._read(change), layout, all_stages=False))

    def first(self, changes: Iterable[Change]) -> WayOut | None:
        """The first change that leads to a plan."""
        return next(filter(None, map(self, changes)), None)

    def milder(self, changes: Iterable[Change], way: WayOut) -> WayOut:
        """The first of some milder changes that leads to a plan too, or the way that is known."""
        try:
            return self.first(changes) or way
        except _SpentError:
            return way


# Each kind of way out -----------------------------------------------------------------------------------------------


def _pins(tries: _Tries, ranking: Ranking) -> WayOut | None:
    if not (pin := ranking.spec.job.pin):
        return None
    return tries(Change(kind="pins", words=f"without the pins of {listed(list(pin))}", sets=("pin={}",)))


def _engine(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """The fastest of the backends that were not searched."""
    spec = ranking.spec
    others = [name for name in backends_of(spec.trainer, spec.job.finetuning) if name not in ranking.searched_backends]
    changes = [Change(kind="engine", words=f"with backend {name}", backend=name) for name in others]
    ways = list(filter(None, map(tries, changes)))
    best = ranked([way.plan for way in ways if way.plan])
    return next((way for way in ways if way.plan is best[0]), None) if best else None


def _liger(tries: _Tries, ranking: Ranking) -> WayOut | None:
    spec = ranking.spec
    if KEY in spec.job.pin:
        return None
    backend = ",".join(name for name in spec.backends if KEY in keys_of(name)) or None
    words = "with Liger's kernels (package liger-kernel)"
    return tries(Change(kind="liger", words=words, pins=(f"{KEY}=true",), backend=backend))


def _host_memory(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """Offload: first with more host memory than any machine has, then with what the plan that was found takes."""
    spec = ranking.spec
    backend = None if spec.backends or "backend" in spec.job.pin else "all"
    wide = Change(kind="host_memory", words="offload", sets=(f"host_memory={_ANY_HOST_MEMORY}",), backend=backend)
    way = tries(wide)
    if way is None or way.plan is None or not way.plan.memory.host_bytes:
        return None
    size = ceil(way.plan.memory.host_bytes / GIB)
    words = f"with offload, to {size:,} GiB of main memory a node"
    change = Change(kind="host_memory", words=words, sets=(f"host_memory={size}GiB",), backend=backend)
    return tries.known(change, way.plan.layout)


def _lora(tries: _Tries, ranking: Ranking) -> WayOut | None:
    job = ranking.spec.job
    return _adapters(tries, ranking, "lora", "LoRA") if job.finetuning in ("full", "freeze") else None


def _qlora(tries: _Tries, ranking: Ranking) -> WayOut | None:
    return _adapters(tries, ranking, "qlora", "QLoRA") if ranking.spec.job.finetuning != "qlora" else None


def _adapters(tries: _Tries, ranking: Ranking, kind: str, name: str) -> WayOut | None:
    spec = ranking.spec
    sets = (f"finetuning={kind}", *(("pure_bf16=false",) if spec.job.pure_bf16 else ()))
    words = f"with {name} of rank {spec.job.lora_rank or 8}"
    return tries(Change(kind=kind, words=words, sets=sets, backend="all" if spec.backends else None))


def _seq_len(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """The longest sequences of 3/4, 1/2, 3/8, 1/4, 3/16 and 1/8 of the tokens; the halves are tried first."""

    def of(length: int) -> Change:
        return Change(kind="seq_len", words=f"with sequences of {length:,} tokens", sets=(f"seq_len={length}",))

    asked = ranking.spec.job.seq_len
    length = asked // 2
    while length >= max(1, _SHORTEST * asked):
        if way := tries(of(length)):
            return tries.milder([of(length + length // 2)], way)
        length //= 2
    return None


def _gpu(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """The smallest card that does, of those that are told apart by a quarter more memory.

    Cards in place of one with NVLink have it too, and none is less than half as fast as the one that it replaces.
    """
    cluster, own = ranking.spec.cluster, ranking.spec.cluster.gpu
    cards = [
        card
        for card in map(gpu, gpu_names())
        if card.bf16_flops >= _HALF_AS_FAST * own.bf16_flops
        and card.gpus_per_node >= cluster.gpus_per_node
        and _has_nvlink(card) >= _has_nvlink(own)
    ]

    def likeness(card: Gpu) -> tuple[bool, bool, float]:
        return _has_nvlink(card) == _has_nvlink(own), card.architecture == own.architecture, card.bf16_flops

    least = own.memory_bytes * _LARGER
    while larger := [card for card in cards if card.memory_bytes >= least]:
        smallest = min(card.memory_bytes for card in larger)
        alike = [card for card in larger if card.memory_bytes < smallest * _NEXT_CARD]
        card = max(alike, key=likeness)
        if way := tries(Change(kind="gpu", words=f"on {card.name}", sets=(f"gpu={card.name}",))):
            return way
        least = smallest * _NEXT_CARD
    return None


def _has_nvlink(card: Gpu) -> bool:
    return card.nvlink_bytes_per_s > 0


def _nodes(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """The fewest nodes: twice as many until it fits, then every number from the last one on that did not."""
    cluster = ranking.spec.cluster
    hosts = ("hosts=null",) if cluster.hosts else ()

    def of(nodes: int) -> Change:
        return Change(kind="nodes", words=f"on {nodes} nodes", sets=(f"nodes={nodes}", *hosts))

    counts = [cluster.nodes * 2**power for power in range(1, _DOUBLINGS + 1)]
    for most in counts:
        if most * cluster.gpus_per_node > MOST_GPUS:
            return None
        if way := tries(of(most)):
            return tries.milder(map(of, range(most // 2 + 1, most)), way)
    return None
