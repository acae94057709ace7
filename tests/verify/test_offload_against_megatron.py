"""Optimizer offload, as the adapter configures it, in megatron-core's own optimizer: whether it runs and where data is.

megatron-core offloads from a GPU. Here host memory also stands for the GPU: tensors that were moved to the host are
marked, and all others report that they are on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.layout.specs import make_layout, make_spec
from topoplan.engines.megatron.rules import RULES
from topoplan.trainers.case import case_of

REASON = "megatron-core is not installed (the verify extra has it)"
torch = pytest.importorskip("torch", reason=REASON)
parallel_state = pytest.importorskip("megatron.core.parallel_state", reason=REASON)

pytestmark = [pytest.mark.verify, pytest.mark.filterwarnings("ignore")]

ELEMENTS = 4 * (16 * 16 + 16)


class Stream:
    def wait_stream(self, _: object) -> None: ...

    def record_event(self) -> Stream:
        return self

    def wait(self, _: object) -> None: ...

    def synchronize(self) -> None: ...


def on_host(tensor: Any) -> bool:
    return getattr(tensor, "moved_to_host", False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide one process whose tensors are on a GPU until `cpu()` moves them."""
    from torch.overrides import TorchFunctionMode

    class NoDriver(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    def marked(name: str, *, moves: bool = False) -> None:
        real = getattr(torch.Tensor, name)

        def method(self: Any, *args: Any, **keys: Any) -> Any:
            found = real(self, *args, **keys)
            if moves and found is self:
                found = self.detach().clone()
            if moves or on_host(self):
                found.moved_to_host = True
            return found

        monkeypatch.setattr(torch.Tensor, name, method)

    for name in ("clone", "detach", "float"):
        marked(name)
    marked("cpu", moves=True)
    kinds = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    kind = torch.Tensor.type
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: not on_host(self)))
    monkeypatch.setattr(torch.Tensor, "type", lambda self, *to: kind(self, *to) if to else kinds[self.dtype])
    for name, value in {
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    try:
        with NoDriver():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Built:
    optimizer: Any
    model: Any
    hybrids: list[Any]
    """Weak references to the hybrid optimizers, in order of creation."""
    copies: list[int]
    """Elements of the fp32 copies that each hybrid optimizer made on the GPU."""


def build(monkeypatch: pytest.MonkeyPatch, fraction: float, *, distributed: bool = True) -> Built:
    """Return a small model and its optimizer, created with the arguments of `McaTrainer.create_optimizer`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, bf16=True)

    class Model(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)]).bfloat16()

        def forward(self, hidden: Any) -> Any:
            for layer in self.layers:
                hidden = torch.tanh(layer(hidden))
            return hidden

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config=config, ddp_config=ddp, module=Model())
    hybrids: list[Any] = []
    copies: list[int] = []
    init = HybridDeviceOptimizer._init_sub_optimizers

    def counted(self: Any) -> None:
        init(self)
        hybrids.append(weakref.ref(self))
        copies.append(sum(copy.numel() for copy in self.param_to_fp32_param.values() if copy.is_cuda))

    monkeypatch.setattr(HybridDeviceOptimizer, "_init_sub_optimizers", counted)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
        optimizer_cpu_offload=fraction > 0,
        optimizer_offload_fraction=fraction,
    )
    return Built(get_megatron_optimizer(settings, [model]), model, hybrids, copies)


def train(built: Built) -> list[float]:
    """Return the losses of a few steps."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        batch = torch.randn(32, 16, generator=generator).bfloat16()
        built.model.zero_grad_buffer()
        built.optimizer.zero_grad()
        loss = ((built.model(batch) - 0.1) ** 2).sum() / batch.numel()
        loss.backward()
        built.model.finish_grad_sync()
        assert built.optimizer.step()[0]
        losses.append(loss.item())
    return losses


def test_offload_trains_as_without_it_and_leaves_the_fp32_weights_on_the_card(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(build(monkeypatch, 0.0))
    assert plain[-1] < plain[0]
    for fraction in (0.25, 0.5, 1.0):
        built = build(monkeypatch, fraction)
        assert train(built) == pytest.approx(plain, rel=1e-3)
        (optimizer,) = built.optimizer.chained_optimizers
        masters = [weight for group in optimizer.shard_fp32_from_float16_groups for weight in group]
        assert sum(weight.numel() for weight in masters if weight.is_cuda) == ELEMENTS
        hybrid = optimizer.optimizer
        moved = sum(weight.numel() for group in hybrid.cpu_param_groups for weight in group["params"])
        assert fraction * ELEMENTS <= moved < fraction * ELEMENTS + 16 * 16


def test_the_whole_weights_that_stay_are_copied_in_fp32_before_they_are_sharded(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    gc.disable()
    try:
        built = build(monkeypatch, 0.25)
        first, second = built.hybrids
        assert 0.5 * ELEMENTS <= built.copies[0] <= 0.75 * ELEMENTS
        assert built.copies[1] == 0
        train(built)
        assert first() is not None  # only a full garbage collection frees it
        gc.collect()
        assert first() is None
        assert second() is not None
    finally:
        gc.enable()


def test_offload_without_the_distributed_optimizer_fails_in_its_first_step(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError):
        train(build(monkeypatch, 0.5, distributed=False))
    rule = next(rule for rule in RULES if rule.name == "optimizer")
    spec = make_spec()
    layout = make_layout(spec, optimizer_offload_fraction=0.5, distributed_optimizer=False, overlap_param_gather=False)
    assert rule.failed(case_of(spec, layout.backend), layout) is not None
