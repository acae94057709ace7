"""The operator: what a layer is a list of. It has weights, tensors saved for backward, and work.

A layer is said once for each way to run it: by Transformer Engine as megatron-core builds it (`te.py`), and by the
Hugging Face models in eager PyTorch (`eager.py`). Everything else is a sum over that list: parameters, states,
activations, FLOPs, seconds, adapters.
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
"""Threads with a cuBLAS workspace of PyTorch: that of forward, and autograd's, which runs backward."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a layer, of the whole model."""

    name: str
    elements: int
    split: Split = "replicated"
    """tp: over the tensor-parallel group, keys and values too when tp exceeds their heads (a rank then holds a part of
    a head and gathers the rest); expert: over the expert and expert-tensor groups; expert_replicated: over the expert
    group alone."""
    is_matrix: bool = False
    """Tokens are multiplied with it, which counts as work of the model; norms and biases are none."""


@dataclass(frozen=True, slots=True)
class Linear(Weight):
    """The weight of a linear layer, or of one in each of several experts."""

    inputs: int = 0
    outputs: int = 0
    side: Side = "column"
    """Which side tensor parallel splits: the outputs (column), the inputs (row), or neither."""
    experts: int = 0
    """How many there are, each with its own weight; 0 outside of routed experts."""
    is_adapter: bool = False
    """LoRA beside a layer whose own weight is frozen."""


def linear_weight(
    name: str, inputs: int, outputs: int, side: Side = "column", experts: int = 0, *, is_adapter: bool = False
) -> Linear:
    """The weight of a linear layer, with its elements and the way it is split."""
    split: Split = "expert" if experts else "replicated" if side == "replicated" else "tp"
    return Linear(name, max(1, experts) * inputs * outputs, split, True, inputs, outputs, side, experts, is_adapter)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that backward needs, of one micro batch on one rank."""

    name: str
    saved_bytes: float
    freed_by: tuple[str, ...] = ()
    """Megatron recompute modules that drop it."""
    held_by: tuple[str, ...] = ()
    """Those without which nothing keeps it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective, before anything hides it."""

    kind: str
    """all-gather (a reduce-scatter costs the same), all-reduce, all-to-all or send."""
    group: Group
    sent_bytes: float
    """The whole tensor; with all-to-all and send, what one rank sends."""
    call_s: float
    forward_calls: float = 1.0
    """How often an operator's forward makes it, calls of other sizes counted by their bytes."""
    backward_calls: float = 1.0
    """The same of its backward."""


class Seconds(NamedTuple):
    """How long an operator takes for one micro batch."""

    forward: float
    backward: float
    collective: Collective | None = None
    """For communication, one of its calls."""
    launches: tuple[int, int] = (0, 0)
    """Operations that the host launches one by one in eager PyTorch, forward and backward."""


class Work:
    """What an operator does, in shapes; each kind says how long that takes."""

    __slots__ = ()
    source = ""
    """Of its formula."""

    def seconds(self, on: Machine) -> Seconds:
        """Forward and backward on a rank."""
        raise NotImplementedError

    def flops(self, extent: float) -> float:
        """Forward FLOPs of one token beside its products with weights, in a sequence of `extent` tokens."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of a layer, for one micro batch on one rank."""

    name: str
    part: Part
    work: Work | None = None
    """None where it takes no time worth counting."""
    weights: tuple[Weight, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    freed_by: tuple[str, ...] = ()
    """Megatron recompute modules that run its forward again."""
    gradients_bytes: float = 0.0
    """What it adds to the gradients alive at the worst moment of the layer's own backward, less what is freed then."""
    divided: tuple[tuple[str, int], ...] = ()
    """What tensor parallel (in experts: expert tensor parallel) has to divide, by name: heads, KV heads, widths."""
