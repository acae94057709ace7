"""The operator, of which a layer is a list: weights, tensors saved for backward, and work.

A layer is described once per implementation: Transformer Engine as megatron-core builds it (`te.py`), and the Hugging
Face models in eager PyTorch (`eager.py`). Everything else is a sum over that list: parameters, states, activations,
FLOPs, seconds, adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from topoplan.network.placement import Group
    from topoplan.operators.machine import Machine

Part = Literal["gemm", "attention", "elementwise", "tp_comm", "cp_comm", "ep_comm"]
PARTS: tuple[Part, ...] = ("gemm", "attention", "elementwise", "tp_comm", "cp_comm", "ep_comm")
Split = Literal["replicated", "tp", "expert", "expert_replicated"]
Side = Literal["column", "row", "replicated"]
BF16 = 2
FP32 = 4
BLAS_THREADS = 2
"""Threads in which PyTorch allocates a cuBLAS workspace: the main thread (forward) and autograd's (backward)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a layer, before any parallelism splits it."""

    name: str
    elements: int
    split: Split = "replicated"
    """How the weight is split.

    - tp: over the tensor-parallel group. Keys and values too, even when tp exceeds their number of heads (a rank then
      holds part of a head and gathers the rest).
    - expert: over the expert-parallel and expert-tensor-parallel groups.
    - expert_replicated: over the expert-parallel group alone.
    """
    is_matrix: bool = False
    """Whether tokens are multiplied by this weight, which counts as model FLOPs; False for norms and biases."""


@dataclass(frozen=True, slots=True)
class Linear(Weight):
    """The weight of a linear layer, or the weights of the same linear layer in each of several experts."""

    inputs: int = 0
    outputs: int = 0
    side: Side = "column"
    """What tensor parallelism splits: the outputs (column), the inputs (row), or neither (replicated)."""
    experts: int = 0
    """Number of experts, each with a weight of its own; 0 outside routed experts."""
    is_adapter: bool = False
    """Whether this is a LoRA matrix beside a layer whose own weight is frozen."""


def linear_weight(
    name: str, inputs: int, outputs: int, side: Side = "column", experts: int = 0, *, is_adapter: bool = False
) -> Linear:
    """Return the weight of a linear layer, with its number of elements and its split."""
    split: Split = "expert" if experts else "replicated" if side == "replicated" else "tp"
    return Linear(name, max(1, experts) * inputs * outputs, split, True, inputs, outputs, side, experts, is_adapter)


class SavedTensor(NamedTuple):
    """One tensor that backward needs, of one micro-batch on one rank."""

    name: str
    saved_bytes: float
    freed_by: tuple[str, ...] = ()
    """Megatron recompute modules that free this tensor."""
    saved_only_by: tuple[str, ...] = ()
    """Megatron recompute modules that save this tensor; without one of them nothing keeps it. Empty if always saved."""


class Collective(NamedTuple):
    """One call of a collective, before any overlap hides it."""

    kind: str
    """all-gather (a reduce-scatter costs the same), all-reduce, all-to-all or send."""
    group: Group
    sent_bytes: float
    """Bytes of the whole tensor; for all-to-all and send, the bytes that one rank sends."""
    call_s: float
    forward_calls: float = 1.0
    """Calls per forward of the operator; calls of other sizes are counted in proportion to their bytes."""
    backward_calls: float = 1.0
    """Calls per backward of the operator; calls of other sizes are counted in proportion to their bytes."""


class Seconds(NamedTuple):
    """How long an operator takes for one micro-batch."""

    forward: float
    backward: float
    collective: Collective | None = None
    """For communication, one of its calls."""
    launches: tuple[int, int] = (0, 0)
    """Operations that the host launches one by one in eager PyTorch: (forward, backward)."""


class Work:
    """What an operator does, in terms of shapes; each subclass says how long that takes."""

    __slots__ = ()
    source = ""
    """Source of the formula."""

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of forward and backward on one rank."""
        raise NotImplementedError

    def flops(self, extent: float) -> float:
        """Return the forward FLOPs per token other than products with weights, in a sequence of `extent` tokens."""
        return 0.0


class Op(NamedTuple):
    """One operator of a layer, for one micro-batch on one rank."""

    name: str
    part: Part
    work: Work | None = None
    """None if the time is negligible."""
    weights: tuple[Weight, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    freed_by: tuple[str, ...] = ()
    """Megatron recompute modules that run its forward again in backward."""
    gradients_bytes: float = 0.0
    """Bytes of gradients that it adds at the worst moment of the layer's own backward, net of what has been freed by
    then."""
    divided: tuple[tuple[str, int], ...] = ()
    """Dimensions that tensor parallelism (for experts: expert tensor parallelism) must divide, by name: heads, KV
    heads, widths."""
