"""Count the live copies of the logits in verl's loss, in PyTorch's own autograd engine."""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from topoplan.trainers.trinity.traits import LOGITS_AT_PEAK

pytestmark = pytest.mark.verify

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

TOKENS, VOCABULARY, HIDDEN = 64, 4096, 8
LOGITS_BYTES = 2 * TOKENS * VOCABULARY


class Counted(TorchDispatchMode):
    """Tracks the live bytes of tensors as large as the logits, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size < LOGITS_BYTES or key in self.known:
            return
        self.known.add(key)
        self.live += size
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)


class Loss(torch.autograd.Function):
    """Stands for flash-attn's cross entropy and the compiled entropy: both save the logits and return a
    gradient of the same size, not in place."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits)
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (logits,) = ctx.saved_tensors
        return torch.zeros_like(logits)


def peak_of_backward(*, on_a_view: bool) -> float:
    """Return the peak number of copies of the logits in the backward pass of log-probabilities and entropy."""
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def loss() -> Any:
        logits = torch.nn.functional.linear(hidden, weight)
        logits = logits.squeeze(0) if on_a_view else logits.view(TOKENS, VOCABULARY) * 1
        logits.div_(1.0)
        return Loss.apply(logits).sum() + Loss.apply(logits).sum()

    gc.collect()
    with Counted() as counted:
        found = loss()
        counted.peak = 0
        found.backward()
    return counted.peak / LOGITS_BYTES


def test_the_division_in_place_on_a_view_has_four_copies_of_the_logits() -> None:
    assert peak_of_backward(on_a_view=True) == LOGITS_AT_PEAK


def test_it_is_the_view_that_costs_the_fourth() -> None:
    assert peak_of_backward(on_a_view=False) < LOGITS_AT_PEAK


def test_the_entropys_backward_saves_no_copy_of_the_logits() -> None:
    """Checks what torch.compile saves for verl's entropy_from_logits, with the casts that autocast makes on CUDA."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import decompositions

    saved: list[Any] = []

    def forward_compiler(graph: Any, inputs: Any) -> Any:
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        saved.extend(node for node in outputs[1:] if node.op != "placeholder")
        return graph

    def entropy(logits: Any) -> Any:
        share = torch.nn.functional.softmax(logits.float(), dim=-1)
        return torch.logsumexp(logits.float(), dim=-1) - torch.sum(share * logits, dim=-1)

    compiled = aot_function(
        entropy,
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions,
    )
    logits = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    compiled(logits).sum().backward()
    assert saved
    assert all(node.meta["val"].numel() == TOKENS for node in saved)
