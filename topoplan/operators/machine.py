"""Seconds of kernels on a GPU, and of the operators of a layer.

GEMMs and attention follow a roofline whose height is the profile's efficiency. A GEMM pays a few extra elements of K
for the prologue and epilogue of its tiles, and its last tiles and its first wave count as full. Over 8,557 measured
shapes per card this is off by 3.5% in the median and 8% at the 90th percentile (NVIDIA aiconfigurator, bf16 on an
H100); counting whole waves (NVIDIA, "Matrix Multiplication Background User's Guide", section 4) is off by 4% and 12%.
Elementwise kernels are timed by the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from topoplan.layout.layout import Recompute
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s
from topoplan.network.placement import Group
from topoplan.operators.op import BF16, Collective, Op, Part, Seconds, Work
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import Profile
from topoplan.terms import source_of


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Return the dense peak FLOP/s of linear layers in a precision.

    A precision that the card lacks falls back to the next higher one.
    """
    if precision == "fp16":
        return gpu.fp16_flops
    if precision == "nvfp4" and gpu.fp4_flops:
        return gpu.fp4_flops
    if precision in ("fp8", "mxfp8", "nvfp4") and gpu.fp8_flops:
        return gpu.fp8_flops
    return gpu.bf16_flops


def gemm_s(
    rows: float,
    columns: float,
    inner: float,
    gpu: Gpu,
    profile: Profile,
    precision: str,
    *,
    count: float = 1,
    is_fused: bool = False,
) -> float:
    """Return the seconds of one rows x inner by inner x columns GEMM, or of `count` grouped ones.

    `is_fused`: one kernel runs the grouped GEMMs, which then are as fast as one: with 16,384 rows each, eight in mxfp8
    take as long as one of all rows (PyTorch pull request 174699, CuTe DSL).
    """
    peak = peak_flops(gpu, precision)
    efficiency, prologue = profile.gemm_efficiency, profile.gemm_prologue
    if peak > gpu.fp16_flops:
        prologue = profile.fp8_gemm_prologue
        efficiency = profile.mxfp8_gemm_efficiency if precision == "mxfp8" else profile.fp8_gemm_efficiency
        efficiency = efficiency if peak == gpu.fp8_flops else profile.fp4_gemm_efficiency
    if count > 1 and not is_fused:
        efficiency *= profile.grouped_gemm_efficiency / profile.gemm_efficiency
    height, width = profile.gemm_tile
    tiles = ceil(rows / height) * ceil(columns / width) * count
    # Libraries choose the tile size, split K and keep several tiles in flight, so that after the first wave the time
    # does not grow in steps.
    flops = max(tiles, gpu.sm_count) * 2.0 * height * width * (inner + prologue)
    moved = (BF16 if peak <= gpu.fp16_flops else 1) * inner * (rows + columns) + BF16 * rows * columns
    memory = count * moved / (gpu.memory_bytes_per_s * profile.memory_efficiency)
    return profile.kernel_launch_s + max(flops / (peak * efficiency), memory)


def elementwise_s(moved_bytes: float, gpu: Gpu, profile: Profile, *, kernels: int = 1) -> float:
    """Return the seconds of `kernels` memory-bound kernels that move `moved_bytes` in total."""
    return kernels * profile.kernel_launch_s + moved_bytes / (gpu.memory_bytes_per_s * profile.memory_efficiency)


class Machine:
    """A rank's GPU and its links, on which the operators of one layer are timed."""

    def __init__(self, case: Case, shard: Shard) -> None:
        self.case, self.shard = case, shard
        self.cluster, self.profile, self.gpu = case.cluster, case.profile, case.cluster.gpu
        self._gradients: dict[Product, tuple[float, float]] = {}

    def gemm_s(self, rows: float, columns: float, inner: float, count: float = 1, *, is_fused: bool = False) -> float:
        """Return the seconds of a GEMM, or of `count` grouped ones, in the precision of the linear layers."""
        gpu, profile, precision = self.gpu, self.profile, self.shard.precision
        return gemm_s(rows, columns, inner, gpu, profile, precision, count=count, is_fused=is_fused)

    def elementwise_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Return the seconds of memory-bound kernels."""
        return elementwise_s(moved_bytes, self.gpu, self.profile, kernels=kernels)

    def call_s(self, kind: str, group: Group, sent_bytes: float) -> float:
        """Return the seconds of one call of a collective, with nothing overlapped."""
        calls = {"all-gather": all_gather_s, "all-reduce": all_reduce_s, "all-to-all": all_to_all_s}
        return calls[kind](group, sent_bytes, self.cluster, self.profile)

    def gradients_s(self, product: Product) -> tuple[float, float]:
        """Return the seconds of the gradients (input, weight) of a product, which collectives may overlap with."""
        if product not in self._gradients:
            self._gradients[product] = product.gradients_s(self)
        return self._gradients[product]


@dataclass(frozen=True, slots=True)
class Product(Work):
    """A product of a rows x inputs tensor with an inputs x outputs weight, or `count` grouped ones."""

    rows: float
    outputs: float
    inputs: float
    count: float = 1
    is_trained: bool = True
    """Whether the weight has a gradient; False if it is frozen."""
    is_fused: bool = False
    """Whether one kernel runs the grouped products, instead of several streams."""
    accumulated_bytes: int = 8
    """Bytes moved per element of the weight gradient: accumulation reads and writes a buffer, usually in fp32."""
    source = "roofline of the profile's share of the peak, with tiles and a prologue along K (operators/machine.py)"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of one GEMM forward, and of one backward per gradient."""
        forward = on.gemm_s(self.rows, self.outputs, self.inputs, self.count, is_fused=self.is_fused)
        return Seconds(forward, sum(on.gradients_s(self)), launches=(1, 2 if self.is_trained else 1))

    def gradients_s(self, on: Machine) -> tuple[float, float]:
        """Return the seconds of the gradients of the input (rows x inputs) and of the weight (outputs x inputs)."""
        rows, outputs, inputs, count = self.rows, self.outputs, self.inputs, self.count
        # Transformer Engine lets forward alone accumulate fast (`common/recipe`, use_split_accumulator).
        slower = 1.0 / on.profile.fp8_gradients_share if on.shard.precision == "fp8" else 1.0
        dgrad = slower * on.gemm_s(rows, inputs, outputs, count, is_fused=self.is_fused)
        if not self.is_trained:
            return dgrad, 0.0
        wgrad = slower * on.gemm_s(outputs, inputs, rows, count, is_fused=self.is_fused)
        accumulation = on.elementwise_s(self.accumulated_bytes * count * outputs * inputs, 0)
        return dgrad, max(accumulation, wgrad + on.profile.accumulation_share * accumulation)


@dataclass(frozen=True, slots=True)
class Repeated(Work):
    """The same work several times, one after the other."""

    work: Work
    times: int
    source = Product.source

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of the work, `times` over."""
        one = self.work.seconds(on)
        ahead, back = one.launches
        launches = (self.times * ahead, self.times * back)
        return Seconds(self.times * one.forward, self.times * one.backward, launches=launches)


@dataclass(frozen=True, slots=True)
class Moved(Work):
    """Memory-bound kernels, timed by the bytes that they read and write."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int = 1
    backward_kernels: int = 1
    source = "bytes moved over the card's memory bandwidth"

    def seconds(self, on: Machine) -> Seconds:
        """Return bytes over bandwidth, plus a launch per kernel."""
        forward = on.elementwise_s(self.forward_bytes, self.forward_kernels)
        backward = on.elementwise_s(self.backward_bytes, self.backward_kernels)
        return Seconds(forward, backward, launches=(self.forward_kernels, self.backward_kernels))


class Cast(Moved):
    """Kernels that cast to 8 bits or fewer."""

    __slots__ = ()

    def seconds(self, on: Machine) -> Seconds:
        """Return bytes over bandwidth, plus a launch per kernel."""
        slower = on.profile.memory_efficiency / on.profile.cast_efficiency
        return Moved(slower * self.forward_bytes, slower * self.backward_bytes).seconds(on)


@dataclass(frozen=True, slots=True)
class Calls(Work):
    """Calls of a collective that nothing hides."""

    kind: str
    group: Group
    sent_bytes: float
    forward_calls: int = 2
    backward_calls: int = 2
    launched: int = 0
    """Operations around the calls, per direction, that the host launches."""
    source = "network/collectives.py"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of the calls, one after the other."""
        one = self.call_s(on)
        call = Collective(self.kind, self.group, self.sent_bytes, one, self.forward_calls, self.backward_calls)
        return Seconds(self.forward_calls * one, self.backward_calls * one, call, (self.launched, self.launched))

    def call_s(self, on: Machine) -> float:
        """Return the seconds of one call."""
        return on.call_s(self.kind, self.group, self.sent_bytes)


class Kernel(NamedTuple):
    """An operator with its seconds: one kernel, or one collective, of a layer and a micro-batch."""

    name: str
    part: Part
    forward_s: float
    backward_s: float
    recomputed_by: tuple[str, ...] = ()
    """Megatron recompute modules that run its forward again in backward."""
    collective: Collective | None = None
    """For communication, one of its calls."""
    launches: tuple[int, int] = (0, 0)
    """Operations that the host launches for it in eager PyTorch: (forward, backward)."""
    work: Work = field(default_factory=Work, compare=False)
    """The work that the seconds were computed from."""

    @property
    def source(self) -> str:
        """Where the formula of its seconds is, and its origin."""
        return source_of(type(self.work), self.work.source)

    def is_repeated(self, recompute: Recompute) -> bool:
        """Return whether a layer recomputed in this mode runs this operator's forward again."""
        return recompute.granularity == "full" or not set(recompute.modules).isdisjoint(self.recomputed_by)

    def recompute_s(self, recompute: Recompute) -> float:
        """Return the forward seconds if a layer recomputed in this mode repeats this operator, else 0."""
        return self.forward_s if self.is_repeated(recompute) else 0.0


def kernels_of(ops: Iterable[Op], case: Case, shard: Shard) -> tuple[Kernel, ...]:
    """Return the operators of a layer with their seconds."""
    on, kernels = Machine(case, shard), []
    for op in ops:
        if op.work is not None:
            seconds = op.work.seconds(on)
            forward, backward, collective, launches = seconds
            kernels.append(Kernel(op.name, op.part, forward, backward, op.freed_by, collective, launches, op.work))
    return tuple(kernels)
