"""An event simulation of Megatron's pipeline schedules, message by message.

Source: megatron-core 0.16 `core/pipeline_parallel/schedules.py` (forward_backward_pipelining_without_interleaving,
forward_backward_pipelining_with_interleaving with `overlap_p2p_comm`, its default) and `p2p_communication.py`. A rank
is a list of instructions in the order in which Megatron issues them: run a forward or a backward, post messages, wait
for messages. A message starts when both ends have posted it, as NCCL's sends and receives do if they exceed its
buffers, takes `p2p_s`, and does not slow down others.

Without interleaving every message is waited for where it is posted, so no message is hidden. With interleaving the
warm-up and the last backwards wait likewise; in between, a message is posted after a forward and waited for after the
following backward, or the other way round. (Since 2026 Megatron also waits for a forward's send immediately.)

What really overlaps on a card is up to CUDA. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue,
and kernels start in the order of issue. Megatron (`training/arguments.py`) requires that setting with tensor or context
parallelism before Blackwell, so that a collective issued before a GEMM gets its multiprocessors before the GEMM takes
all of them. Pipeline messages are issued between two pieces of work and can overlap with the second one under either
setting; the simulation assumes that they do, and that they take no multiprocessors from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from topoplan.engines.megatron.pipeline import schedule_table, warmup_forwards
from topoplan.engines.timeline import BACKWARD, FORWARD, P2P, RECOMPUTE, Event

Work = tuple[str, int, int]
"""(forward or backward, micro-batch, model chunk)."""
_Message = tuple[str, int, int]
"""(forward or backward, the virtual stage that sends it, micro-batch)."""
_Messages = tuple[_Message, ...]
_Instruction = tuple[Work | None, _Messages, _Messages]
"""(work to run, messages to post, messages to wait for), at most one of which is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One pass of all micro-batches through the pipeline."""

    events: tuple[Event, ...]
    """Events by rank, then in time. Gaps between the events of a rank are idle time."""
    total_s: float
    """Seconds from the first forward to the end of the last rank."""


def order_of_work(pp: int, vpp: int, rank: int, microbatches: int) -> list[Work]:
    """Return a rank's work: warm-up forwards, then forwards and backwards alternating, then the remaining backwards."""
    table = schedule_table(pp, vpp, microbatches)
    warmup = warmup_forwards(pp, vpp, rank, microbatches)
    forwards: list[Work] = [(FORWARD, microbatch, chunk) for microbatch, chunk in table]
    backwards: list[Work] = [(BACKWARD, microbatch, vpp - 1 - chunk) for microbatch, chunk in table]
    work = forwards[:warmup]
    for step in range(warmup, len(table)):
        work += [forwards[step], backwards[step - warmup]]
    return work + backwards[len(table) - warmup :]


def simulate(
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    microbatches: int,
    *,
    p2p_s: float = 0.0,
    recompute_s: Sequence[Sequence[float]] | None = None,
) -> Simulation:
    """Run the schedule; times are of one micro-batch, indexed by pipeline rank, then by model chunk.

    `backward_s` includes `recompute_s`, which is a separate kind of event only. `p2p_s` is one message between
    neighbors. With more than one chunk per rank the schedule is the interleaved one. Raises ValueError if its
    micro-batches are not a multiple of the ranks, which Megatron refuses too.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    if vpp > 1 and microbatches % pp:
        raise ValueError(f"{microbatches} micro batches are not a multiple of {pp} interleaved pipeline ranks")
    write = _interleaved if vpp > 1 else _plain
    messages = _MessagesUnderWay(p2p_s)
    ranks = [
        _Rank(
            rank=rank,
            program=write(order_of_work(pp, vpp, rank, microbatches), pp, vpp, rank),
            forward_s=forward_s[rank],
            backward_s=backward_s[rank],
            recompute_s=recompute_s[rank] if recompute_s else [0.0] * vpp,
        )
        for rank in range(pp)
    ]
    awake = deque(range(pp))
    while awake:
        awake += ranks[awake.popleft()].run(messages, pp)
    events = tuple(event for rank in ranks for event in rank.events)
    return Simulation(events=events, total_s=max(rank.now_s for rank in ranks))


class _MessagesUnderWay:
    """Which messages are posted, when they arrive, and which ranks wait for one."""

    def __init__(self, p2p_s: float) -> None:
        self.p2p_s = p2p_s
        self._posted: dict[_Message, float] = {}
        self.arrived: dict[_Message, float] = {}
        self.sleeping: dict[_Message, int] = {}

    def post(self, message: _Message, now_s: float) -> int | None:
        """Record that one end is ready; return the rank that this wakes up, if any."""
        if message not in self._posted:
            self._posted[message] = now_s
            return None
        self.arrived[message] = max(self._posted[message], now_s) + self.p2p_s
        return self.sleeping.pop(message, None)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A pipeline rank executing its program; times are by model chunk."""

    rank: int
    program: Sequence[_Instruction]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    recompute_s: Sequence[float]
    now_s: float = 0.0
    position: int = 0
    events: list[Event] = field(default_factory=list)

    def run(self, messages: _MessagesUnderWay, pp: int) -> list[int]:
        """Execute instructions until a message is missing or the program ends; return the ranks that this wakes up."""
        woken: list[int] = []
        while self.position < len(self.program):
            work, post, wait = self.program[self.position]
            if work is not None:
                self._work(work)
            for message in post:
                if (rank := messages.post(message, self.now_s)) is not None:
                    woken.append(rank)
            missing = next((message for message in wait if message not in messages.arrived), None)
            if missing is not None:
                messages.sleeping[missing] = self.rank
                break
            if wait:
                last = max(wait, key=messages.arrived.__getitem__)
                if (end := messages.arrived[last]) > self.now_s:
                    self._add(P2P, last[2], last[1] // pp, max(self.now_s, end - messages.p2p_s), end)
                    self.now_s = end
            self.position += 1
        return woken

    def _work(self, work: Work) -> None:
        kind, microbatch, chunk = work
        start = self.now_s
        if kind == FORWARD:
            self.now_s += self.forward_s[chunk]
        else:
            self.now_s += self.backward_s[chunk]
            split = start + self.recompute_s[chunk]
            self._add(RECOMPUTE, microbatch, chunk, start, split)
            start = split
        self._add(kind, microbatch, chunk, start, self.now_s)

    def _add(self, kind: str, microbatch: int, chunk: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.events.append(
                Event(rank=self.rank, chunk=chunk, microbatch=microbatch, kind=kind, start_s=start_s, end_s=end_s)
            )


def _input(work: Work, pp: int, vpp: int, rank: int) -> _Messages:
    """Return the message that a piece of work needs, if any."""
    kind, microbatch, chunk = work
    stage = chunk * pp + rank
    if kind == FORWARD:
        return ((FORWARD, stage - 1, microbatch),) if stage else ()
    return ((BACKWARD, stage + 1, microbatch),) if stage < pp * vpp - 1 else ()


def _output(work: Work, pp: int, vpp: int, rank: int) -> _Messages:
    """Return the message that a piece of work produces, if any."""
    kind, microbatch, chunk = work
    stage = chunk * pp + rank
    given = stage < pp * vpp - 1 if kind == FORWARD else stage > 0
    return ((kind, stage, microbatch),) if given else ()


def _exchange(*messages: _Messages) -> Iterable[_Instruction]:
    """Yield instructions that post messages together and wait for all of them."""
    if together := sum(messages, ()):
        yield None, together, ()
        yield None, (), together


def _plain(order: Sequence[Work], pp: int, vpp: int, rank: int) -> list[_Instruction]:
    """Return the program of a rank under 1F1B.

    Only in the steady state is what comes in received together with what goes out to the same neighbor.
    """
    program: list[_Instruction] = []
    microbatches = len(order) // 2
    warmup = warmup_forwards(pp, vpp, rank, microbatches)
    steady = range(warmup, len(order) - warmup)
    for step, work in enumerate(order):
        # In the steady state the preceding work has received the input along with its own send.
        if step - 1 not in steady or step not in steady:
            program += _exchange(_input(work, pp, vpp, rank))
        program.append((work, (), ()))
        following = _input(order[step + 1], pp, vpp, rank) if step in steady and step + 1 in steady else ()
        program += _exchange(_output(work, pp, vpp, rank), following)
    return program


def _interleaved(order: Sequence[Work], pp: int, vpp: int, rank: int) -> list[_Instruction]:
    """Return the program of a rank under interleaved 1F1B.

    The input of a forward, or of a backward, is requested after the preceding forward or backward.
    """
    program: list[_Instruction] = []
    forwards = [work for work in order if work[0] == FORWARD]
    backwards = [work for work in order if work[0] == BACKWARD]
    total = len(forwards)
    warmup = warmup_forwards(pp, vpp, rank, total // vpp)

    def needed(work: Sequence[Work], step: int) -> _Messages:
        return _input(work[step], pp, vpp, rank) if step < total else ()

    def run(work: Work) -> _Messages:
        program.append((work, (), ()))
        return _output(work, pp, vpp, rank)

    program += _exchange(needed(forwards, 0))
    for step in range(warmup):
        program += _exchange(run(forwards[step]), needed(forwards, step + 1))
    if warmup == total:
        program += _exchange(needed(backwards, 0))
    else:
        program.append((None, needed(backwards, 0), ()))
    sent_forward: _Messages = ()
    sent_backward: _Messages = ()
    for step in range(total - warmup):
        program.append((None, (), needed(forwards, warmup + step)))
        sent = run(forwards[warmup + step])
        program += [(None, sent + needed(forwards, warmup + step + 1), ()), (None, (), sent_forward)]
        sent_forward = sent
        program.append((None, (), needed(backwards, step)))
        sent = run(backwards[step])
        program += [(None, sent + needed(backwards, step + 1), ()), (None, (), sent_backward)]
        sent_backward = sent
    for step in range(total - warmup, total):
        program.append((None, (), needed(backwards, step)))
        program += _exchange(run(backwards[step]), needed(backwards, step + 1))
    program.append((None, (), sent_backward))
    return program
