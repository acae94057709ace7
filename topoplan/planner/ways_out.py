"""What a job could change to fit, or to fit with memory to spare; each way is found by a search of the changed spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import ceil
from typing import NamedTuple

from topoplan.catalog import gpu_names
from topoplan.errors import InputError, listed
from topoplan.layout.layout import Layout, keys_of
from topoplan.planner.explain import LIGER_KEY
from topoplan.planner.plan import STOPPED, TOO_LONG, Change, Ranking, WayOut
from topoplan.planner.predict import predict
from topoplan.planner.rank import first_with_room, ranked
from topoplan.planner.what_if import Search, found_by
from topoplan.specs.cluster import MOST_GPUS
from topoplan.specs.gpu import Gpu
from topoplan.specs.known import gpu
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import TRAINER_RULE, backends_of, choose_trainer
from topoplan.units import GIB

MOST_SEARCHES = 32
MOST_LAYOUTS, MOST_LAYOUTS_WHERE_TIGHT = 1_500_000, 300_000
"""Total candidates of all searches after which no further search starts: some 20 seconds, and 4 seconds. Counted in
layouts, because the same question must have the same answer, on a slow machine and with cached searches."""
_ANY_HOST_MEMORY = "64TiB"
_DOUBLINGS = 4
_SHORTEST = 1 / 8
"""Shortest sequences, as a fraction of the job's; shorter ones are not a reasonable way out."""
_HALF_AS_FAST = 0.5
_LARGER, _NEXT_CARD = 1.1, 1.25
"""Factors of memory above the own card, and above a card that was not enough, from which another card is considered."""
_WHERE_TIGHT = ("engine", "host_memory", "nodes", "gpu")
"""Kinds that leave the job as it is: a job that fits, if barely, does not have to become another one."""
_SLOWEST = ("gpu", "nodes")
"""Kinds whose searches come last, those of more GPUs last of all."""


def ways_out(ranking: Ranking, read: Callable[[Change], Spec], search: Search) -> tuple[WayOut, ...]:
    """Return the ways out of a ranking that needs them, in the order of `KINDS`; those that lead nowhere have no plan.

    `read` returns the spec with a change, as the command line would, and raises InputError for an invalid combination.
    The slowest searches, those of more GPUs, come last, and none starts after MOST_SEARCHES searches or MOST_LAYOUTS
    layouts; what is not tried for that reason is reported. A search that is stopped ends all of them.
    """
    tries = _Tries(read, search, with_room=bool(ranking.plans))
    found = {}
    for kind in (*(kind for kind in KINDS if kind not in _SLOWEST), *_SLOWEST):
        if (not ranking.plans or kind in _WHERE_TIGHT) and (way := tries.of(kind, ranking)):
            found[kind] = way
    return tuple(found[kind] for kind in KINDS if kind in found)


class _SpentError(Exception):
    """No more searches are allowed."""


_NONE = WayOut(change=Change(kind="", words=""))


class _Tries:
    """The searches done so far, and the remaining budget."""

    def __init__(self, read: Callable[[Change], Spec], search: Search, *, with_room: bool) -> None:
        self._read, self._search, self._with_room = read, search, with_room
        self._left = MOST_SEARCHES
        self._layouts_left = MOST_LAYOUTS_WHERE_TIGHT if with_room else MOST_LAYOUTS
        self._spent = TOO_LONG
        """Why no more searches are allowed, once they are not."""
        self._last = _NONE
        """The last change that was tried, if it leads nowhere."""

    def of(self, kind: str, ranking: Ranking) -> WayOut | None:
        """Return the way of one kind; without a plan if none was found, None if there is nothing to try."""
        self._last = _NONE
        try:
            way = KINDS[kind].work(self, ranking)
        except _SpentError:
            last = Change(kind=kind, words=self._last.change.words)
            return WayOut(change=last, reason=f"search not completed: {self._spent}", unfinished=self._spent)
        return way or (None if self._last is _NONE else self._last)

    def __call__(self, change: Change) -> WayOut | None:
        """Return the plan after a change, or None. Raises _SpentError."""
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
                self._left, self._spent = 0, STOPPED
                raise _SpentError
        plan = first_with_room(ranking) if ranking and self._with_room else found.best
        if plan is None:
            self._last = WayOut(change=change, reason=found.reason or "no plan with room")
            return None
        self._last = _NONE
        return WayOut(change=change, plan=plan)

    def known(self, change: Change, layout: Layout) -> WayOut:
        """Return a way out for a change after which a layout is known to fit."""
        return WayOut(change=change, plan=predict(self._read(change), layout, all_stages=False))

    def first(self, changes: Iterable[Change]) -> WayOut | None:
        """Return the first change that leads to a plan."""
        return next(filter(None, map(self, changes)), None)

    def milder(self, changes: Iterable[Change], way: WayOut) -> WayOut:
        """Return the first of some milder changes that also leads to a plan, or else `way`."""
        try:
            return self.first(changes) or way
        except _SpentError:
            return way


# Each kind of way out -----------------------------------------------------------------------------------------------


def _pins(tries: _Tries, ranking: Ranking) -> WayOut | None:
    if not (pin := ranking.spec.job.pin):
        return None
    return tries(Change(kind="pins", words=f"without the pins of {listed(list(pin))}", sets=("pin={}",)))


def _trainer_keys(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """Try the job without one of the trainer's keys for which layouts are refused."""
    refused = (one.layout for one in ranking.rejected if one.rule == TRAINER_RULE)
    said = (choose_trainer(ranking.spec, layout, ranking.spec.trainer).refused for layout in refused)
    places = dict.fromkeys(refusal.where for _, refusal in filter(None, said))
    keys = [place.removeprefix("job.") for place in places if place.startswith("job.trainer.")]
    return tries.first(Change(kind="trainer_keys", words=f"without {key}", sets=(f"{key}=null",)) for key in keys)


def _engine(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """Try the backends that were not searched; return the fastest."""
    spec = ranking.spec
    others = [name for name in backends_of(spec.trainer, spec.job.finetuning) if name not in ranking.searched_backends]
    changes = [Change(kind="engine", words=f"with backend {name}", backend=name) for name in others]
    ways = list(filter(None, map(tries, changes)))
    best = ranked([way.plan for way in ways if way.plan])
    return next((way for way in ways if way.plan is best[0]), None) if best else None


def _liger(tries: _Tries, ranking: Ranking) -> WayOut | None:
    spec = ranking.spec
    if LIGER_KEY in spec.job.pin:
        return None
    backend = ",".join(name for name in spec.backends if LIGER_KEY in keys_of(name)) or None
    words = "with Liger kernels (package liger-kernel)"
    return tries(Change(kind="liger", words=words, pins=(f"{LIGER_KEY}=true",), backend=backend))


def _host_memory(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """Try offload: first with more host memory than any machine has, then with the amount that the plan found needs."""
    spec = ranking.spec
    backend = None if spec.backends or "backend" in spec.job.pin else "all"
    wide = Change(kind="host_memory", words="offload", sets=(f"host_memory={_ANY_HOST_MEMORY}",), backend=backend)
    way = tries(wide)
    if way is None or way.plan is None or not way.plan.memory.host_bytes:
        return None
    size = ceil(way.plan.memory.host_bytes / GIB)
    words = f"with offload to {size:,} GiB of host memory per node"
    change = Change(kind="host_memory", words=words, sets=(f"host_memory={size}GiB",), backend=backend)
    return tries.known(change, way.plan.layout)


def _adapters(tries: _Tries, ranking: Ranking, kind: str, name: str, instead_of: Collection[str]) -> WayOut | None:
    spec = ranking.spec
    if spec.job.finetuning not in instead_of:
        return None
    sets = (f"finetuning={kind}", *(("pure_bf16=false",) if spec.job.pure_bf16 else ()))
    words = f"with {name} of rank {spec.job.lora_rank or 8}"
    return tries(Change(kind=kind, words=words, sets=sets, backend="all" if spec.backends else None))


def _seq_len(tries: _Tries, ranking: Ranking) -> WayOut | None:
    """Return the longest sequences that fit, of 3/4, 1/2, 3/8, 1/4, 3/16 and 1/8 of the tokens; halves are first."""

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
    """Return the smallest card that is enough, at least half as fast as the own one, and with NVLink if that has it."""
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
    """Return the fewest nodes: doubled until the job fits, then every number from the last one that was not enough."""
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


class Kind(NamedTuple):
    """One kind of way out."""

    name: str
    """Its description if it leads nowhere."""
    loss: str
    """What the user gives up."""
    work: Callable[[_Tries, Ranking], WayOut | None]
    """Searches for it."""


_lora = partial(_adapters, kind="lora", name="LoRA", instead_of=("full", "freeze"))
_qlora = partial(_adapters, kind="qlora", name="QLoRA", instead_of=("full", "freeze", "lora"))
KINDS = {
    "pins": Kind("without the pins", "same job and machines", _pins),
    "trainer_keys": Kind("without keys of the trainer", "same job and machines, other settings", _trainer_keys),
    "engine": Kind("another backend", "same job and machines", _engine),
    "liger": Kind("Liger kernels", "same job and machines, one more package", _liger),
    "host_memory": Kind("offload", "same job and GPUs, if the nodes have it", _host_memory),
    "nodes": Kind(f"up to {2**_DOUBLINGS} times the nodes", "same job, more machines", _nodes),
    "gpu": Kind("a GPU with more memory", "same job, other machines", _gpu),
    "lora": Kind("LoRA", "a different job: only adapters are trained", _lora),
    "qlora": Kind("QLoRA", "a different job: adapters on quantized weights", _qlora),
    "seq_len": Kind("sequences down to an eighth", "a different job: longer samples are cut", _seq_len),
}
"""The kinds in display order: by what the user gives up.

First those that leave job and machines as they are; then the same job on more or other machines, which costs money;
last those that train something else. Adapters come before shorter sequences, since they see all of the data.
"""
