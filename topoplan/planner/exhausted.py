"""Out of memory as a measurement: the figures in PyTorch's error message, compared with the prediction.

The message states what was requested, how much live tensors took and how much the allocator held unallocated. Their sum
is a lower bound of what the run needed at that moment. A profile records live tensors beyond the prediction as such,
and a larger fragmentation share only for what the allocator held besides. The next prediction of a plan that ran out of
memory therefore says that it does not fit, and similar plans are affected accordingly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from topoplan.errors import listed
from topoplan.planner.calibrate import with_constants
from topoplan.planner.explain import memory_rejection
from topoplan.planner.fragmentation import Peaks, learn, predicted_bytes
from topoplan.planner.logged import last_step
from topoplan.planner.plan import Plan
from topoplan.planner.predict import memory_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.log import pieces
from topoplan.units import GIB


def _size(name: str) -> str:
    return rf"(?P<{name}>[0-9.]+) ?(?P<{name}_unit>bytes|[KMGT]iB)"


_MESSAGE = re.compile(rf"(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate {_size('tried')}")
# pytorch c10/cuda/CUDACachingAllocator.cpp, since 2.0; "capacty" until 2.2.
_PARTS = (
    re.compile(rf"GPU (?P<gpu>[0-9]+) has a total capaci?ty of {_size('total')} of which {_size('free')} is free"),
    re.compile(rf"[Tt]his process has {_size('used')} memory in use"),
    re.compile(rf"Of the allocated memory {_size('allocated')} is allocated by PyTorch"),
    re.compile(rf"and {_size('held')} is reserved by PyTorch but unallocated"),
    # PyTorch 1.x
    re.compile(
        rf"\(GPU (?P<gpu>[0-9]+); {_size('total')} total capacity; {_size('allocated')} already allocated;"
        rf" {_size('free')} free; {_size('reserved')} reserved in total"
    ),
)
_OTHERS = re.compile(rf"Process [0-9]+ has {_size('other')} memory in use")
_RANK = re.compile(r"\[rank(?P<rank>[0-9]{1,6})\]")
_BYTES = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_LINES = 120
"""Lines of traceback to search before the message."""
_MOMENTS = {
    "an evaluation": r"evaluation_loop|prediction_step|in evaluate\b",
    "loading the model": r"from_pretrained|in load_model|in load_checkpoint|load_state_dict|deepspeed\.initialize",
    "saving a checkpoint": r"in save_checkpoint|in _save\b|in save_model|save_pretrained",
    "the optimizer step": r"optimizer\.step|in step\b.*optim|optim/\w+\.py|clip_grad_norm",
    "backward": r"in backward\b|\.backward\(|autograd/",
    "the loss": r"cross_entropy|in loss_func|logits\.float",
    "forward": r"in forward\b|_call_impl",
}
"""Phase -> patterns in the traceback of an error in that phase; the first phase that matches is used."""
NOT_TRAINING = ("an evaluation", "loading the model", "saving a checkpoint")
"""Phases for which nothing is predicted."""
_NOTABLE = 0.5 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """The figures in PyTorch's out-of-memory message."""

    tried_bytes: float
    allocated_bytes: float
    held_bytes: float
    """Reserved by the allocator but not allocated."""
    total_bytes: float
    """Memory of the card that CUDA can use."""
    used_bytes: float | None
    """Memory of this process, with context and NCCL; None if the message does not say."""
    others_bytes: float
    """Memory of other processes on the card."""
    gpu: int
    rank: int | None = None
    """Global rank; None if the line does not say."""
    moment: str = ""
    """Phase of the run: a key of `_MOMENTS`, or empty."""
    step: int | None = None
    """Last step that the log reports before the message."""
    line: int = 0
    """Line in the log, from 1."""

    @property
    def live_bytes(self) -> float:
        """Lower bound of what live tensors needed."""
        return self.tried_bytes + self.allocated_bytes

    @property
    def needed_bytes(self) -> float:
        """Lower bound of what live tensors and unallocated reserved memory needed."""
        return self.live_bytes + self.held_bytes

    @property
    def is_informative(self) -> bool:
        """Whether the plan itself needed the memory: it happened in training, and no other process took the room."""
        return self.moment not in NOT_TRAINING and self.others_bytes < max(_NOTABLE, self.tried_bytes)


def read_exhausted(text: str) -> Exhausted | None:
    """Return the first message in a log that has all its figures, or None."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        for piece in pieces(line):
            if (found := _MESSAGE.search(piece)) and (read := _read(piece, found)):
                before = lines[max(0, number - _LINES) : number]
                moments = (name for name, form in _MOMENTS.items() if any(re.search(form, one) for one in before))
                rank = _RANK.search(line)
                return replace(
                    read,
                    rank=int(rank["rank"]) if rank else None,
                    moment=next(moments, ""),
                    step=last_step("\n".join(lines[:number])),
                    line=number + 1,
                )
    return None


def _read(line: str, message: re.Match[str]) -> Exhausted | None:
    said = {"tried": _bytes(message, "tried")}
    gpu = 0
    for form in _PARTS:
        if found := form.search(line):
            named = found.groupdict()
            gpu = int(named.get("gpu") or gpu)
            said |= {name: _bytes(found, name) for name in named if f"{name}_unit" in named}
    if "reserved" in said and "allocated" in said:
        said["held"] = max(0.0, said["reserved"] - said["allocated"])
    if not {"total", "allocated", "held"} <= said.keys():
        return None
    return Exhausted(
        tried_bytes=said["tried"],
        allocated_bytes=said["allocated"],
        held_bytes=said["held"],
        total_bytes=said["total"],
        used_bytes=said.get("used"),
        others_bytes=sum(_bytes(found, "other") for found in _OTHERS.finditer(line)) if "used" in said else 0.0,
        gpu=gpu,
    )


def _bytes(found: re.Match[str], name: str) -> float:
    return float(found[name]) * _BYTES[found[f"{name}_unit"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that ended out of memory."""

    spec: Spec
    plan: Plan
    found: Exhausted
    name: str
    """Name of the run's log."""


def exhausted_peaks(spec: Spec, plan: Plan, found: Exhausted) -> Peaks:
    """Return the lower bound of memory that the message implies."""
    return Peaks(
        spec=spec,
        layout=plan.layout,
        allocated_bytes=found.live_bytes,
        reserved_bytes=found.needed_bytes,
        stage=_stage(plan, found),
        at_least=True,
    )


def _stage(plan: Plan, found: Exhausted) -> int | None:
    """Return the pipeline stage of a rank, whose pipeline coordinate varies slowest."""
    layout = plan.layout
    return None if found.rank is None else min(found.rank * layout.pp // layout.world_size, layout.pp - 1)


def exhausted_words(spec: Spec, plan: Plan, found: Exhausted) -> tuple[str, ...]:
    """Return sentences: what happened, how far it is from the prediction, possible reasons, and what would fit."""
    allocated, reserved = predicted_bytes(exhausted_peaks(spec, plan, found))
    live = found.live_bytes
    more = live / allocated - 1.0
    return (
        happened(found, _stage(plan, found) if plan.layout.pp > 1 else None),
        f"it needed {_gib(live)} of live tensors at least, and {_gib(allocated)} are predicted of {plan.id}:"
        f" {abs(100 * more):.0f}% {'more' if more > 0 else 'less'},"
        f" {'outside of' if more > plan.memory.band else 'within'} the band of {100 * plan.memory.band:.0f}%",
        *_reasons(spec, plan, found, live - allocated, reserved - allocated),
        _way_out(spec, plan, found),
    )


def happened(found: Exhausted, stage: int | None = None) -> str:
    """Return the message as a sentence."""
    where = "" if found.rank is None else f" of rank {found.rank}"
    where += f" (stage {stage})" if stage is not None else ""
    after = "before the first step was told" if found.step is None else f"after step {found.step}"
    when = f"in {found.moment} and {after}" if found.moment else after
    return (
        f"out of memory on GPU {found.gpu}{where}, {when}: {_gib(found.tried_bytes)} more did not fit beside"
        f" {_gib(found.allocated_bytes)} of live tensors and {_gib(found.held_bytes)} that torch held back"
    )


def _reasons(spec: Spec, plan: Plan, found: Exhausted, more: float, fragments: float) -> list[str]:
    """Return what the figures of the message suggest; guesses are marked as such."""
    said = []
    if found.others_bytes >= _NOTABLE:
        said.append(f"other processes hold {_gib(found.others_bytes)} of the card: end them, or take other GPUs")
    if found.moment in NOT_TRAINING:
        said.append(f"it was {found.moment}, and what is predicted is training: nothing is learnt of the plan")
    if found.held_bytes > fragments + _NOTABLE:
        said.append(
            f"torch held back {_gib(found.held_bytes)}, and {_gib(fragments)} are predicted: fragmentation, which"
            " expandable segments lessen where they are not set yet"
        )
    if found.used_bytes is not None:
        beside = found.used_bytes - found.allocated_bytes - found.held_bytes
        planned = plan.memory.device_bytes - plan.memory.reserved_bytes
        if beside > planned + _NOTABLE:
            said.append(
                f"{_gib(beside)} of the process are not torch's (context, NCCL), and {_gib(planned)} are predicted"
            )
    if spec.cluster.gpu.memory_bytes - found.total_bytes > 2 * _NOTABLE:
        said.append(f"the card has {_gib(found.total_bytes)}, and the spec says {_gib(spec.cluster.gpu.memory_bytes)}")
    if more > plan.memory.band * plan.memory.allocated_bytes and found.moment not in NOT_TRAINING:
        known = spec.job.lengths is not None or spec.job.packing
        said.append(
            "the tensors are more than the formulas see: is every setting in the file that ran as in the plan?"
            if known
            else f"samples may be longer than planned: nobody said how long they are (seq_len {spec.job.seq_len:,})"
        )
    return said


def _way_out(spec: Spec, plan: Plan, found: Exhausted) -> str:
    """Return the nearest change that fits, given the lower bound."""
    if not found.is_informative:
        return f"{plan.id} itself {'fits' if plan.fits else 'does not fit'} by the prediction"
    taught = with_constants(spec, learn([exhausted_peaks(spec, plan, found)]).constants)
    if memory_of(case_of(taught, plan.layout.backend), plan.layout).fits:
        return f"{plan.id} fits all the same by the prediction: the reasons above have to go"
    fix = memory_rejection(taught, plan.layout).fix
    remedy = "`topoplan calibrate` with this log and `topoplan rank --profile` find another plan"
    return f"with that learnt, {fix}" if fix else f"with that learnt, no single change fits; {remedy}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def lesson_sentence(found: Exhausted) -> str:
    """Return a sentence on what a profile learns from the message."""
    if found.is_informative:
        return f"it needed {_gib(found.needed_bytes)} of torch's memory or more: the profile keeps that"
    why = [found.moment] if found.moment in NOT_TRAINING else ["other processes on the card"]
    return f"nothing is learnt of it, because of {listed(why)}"
