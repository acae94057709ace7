"""Layers as Hugging Face models run them in eager PyTorch: unsplit on one GPU, everything around the products unfused.

Names and shapes: transformers 5.6 `models/*/modeling_*.py`. Saved tensors: what PyTorch's autograd saves for each
operation (`tools/autograd/derivatives.yaml`): a multiplication saves each factor if the other one needs a gradient, a
matrix product its input if the weight needs a gradient, `pow` its input, FlashAttention q, k, v, its output and the
softmax statistics. Weights are in 16 bits, or in fp32 under autocast, which casts the input of every linear layer again
(PyTorch `aten/src/ATen/autocast_mode.cpp`: cached_cast caches casts of weights only). Nothing is fused, except that
Liger's kernels may replace the norms and the gated MLP (`liger_kernel/ops/rms_norm.py`, `swiglu.py`).

Bytes of the elementwise kernels are counted from `models/llama/modeling_llama.py`, operation by operation (an addition
of two 16-bit tensors reads four bytes per element and writes two). Small kernels are bound by the host, which launches
them one by one; therefore their number is counted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from topoplan.network.placement import Group
from topoplan.operators.builder import Builder
from topoplan.operators.core_attention import flash2_share
from topoplan.operators.machine import Calls, Machine, Moved, Product, Repeated, gemm_s
from topoplan.operators.op import BF16, FP32, SavedTensor, Seconds, Side, Weight, Work, linear_weight
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.model import Model

LOGIT_BYTES = 3 * FP32
"""Bytes per logit at the start of backward: the saved log softmax, the gradient of the negative log likelihood and the
gradient of the log softmax, all in fp32. transformers `loss/loss_utils.py::ForCausalLMLoss` computes in fp32, and the
model's own logits are freed by then (`Trainer.compute_loss` returns only the loss)."""
FORWARD_LOGIT_BYTES = BF16 + 2 * FP32
"""Bytes per logit at the end of forward: the logits, their fp32 copy, and the log softmax."""
CHUNKED_LOGIT_BYTES = BF16 + FP32
"""Bytes per logit in the chunk of rows that Liger's fused loss works on: logits, overwritten with gradients in place,
and their fp32 copy (`liger_kernel/ops/fused_linear_cross_entropy.py`)."""


RMSNORM_BYTES = (36, 60)
"""Bytes per element that eager RMSNorm moves, (forward, backward): cast to fp32, square, mean, product, cast back,
weight."""
RMSNORM_KERNELS = (8, 14)


@lru_cache(maxsize=64)
def eager_profile(profile: Profile, gpu: Gpu) -> Profile:
    """Return the profile for eager PyTorch: lower efficiencies, and attention no faster than FlashAttention 2."""
    highest = flash2_share(profile, gpu)
    return replace(
        profile,
        gemm_efficiency=profile.gemm_efficiency * profile.eager_gemm_share,
        grouped_gemm_efficiency=profile.grouped_gemm_efficiency * profile.eager_gemm_share,
        fp8_gemm_efficiency=profile.fp8_gemm_efficiency * profile.eager_gemm_share,
        memory_efficiency=profile.memory_efficiency * profile.eager_memory_share,
        attention_forward_efficiency=min(profile.attention_forward_efficiency, highest),
        attention_backward_efficiency=min(profile.attention_backward_efficiency, highest),
    )


@lru_cache(maxsize=64)
def eager_case(case: Case) -> Case:
    """Return the case with the profile for eager PyTorch."""
    return replace(case, profile=eager_profile(case.profile, case.cluster.gpu))


class LayerUse(NamedTuple):
    """How one layer is trained, as far as its memory and time depend on it."""

    tokens: int
    """Token positions of a micro-batch on this GPU."""
    seq_len: int
    """Extent of attention."""
    trains_weights: bool
    """Whether the layer's own weights have gradients."""
    adapted: frozenset[str]
    """Names of the layer's linear layers that have an adapter."""
    fused: bool
    """Whether Liger's kernels are used."""
    flash_attention: bool = True
    fp32_weights: bool = False
    """Whether the layer's own weights are in fp32, under autocast."""
    packed_bytes: float = 0.0
    """Bytes per weight if the weights are packed, else 0."""
    saves_packed_inputs: bool = True
    """Whether products with packed weights save their inputs, which their backward does not need."""
    lora_rank: int = 0
    ulysses: int = 1
    """Ranks that share a sequence by all-to-all."""
    residual_bytes: int = BF16
    """Bytes per element of the hidden state between layers, which has the dtype of the embedding."""
    loops_experts: bool = False
    """Whether experts run one by one, as in transformers before 5."""
    adapter_input_bytes: int = BF16
    """Bytes per element of the copy that an adapter casts its input to; 0 if both have the same dtype and there is no
    copy."""
    adapter_dropout: bool = False
    """Whether each adapter drops out a part of its input."""

    @property
    def adapter_copy_bytes(self) -> int:
        """Bytes per element of the input that an adapter saves for itself; 0 if it shares that of its layer."""
        return self.adapter_input_bytes or (BF16 if self.adapter_dropout else 0)


class EagerBuilder(Builder):
    """Collects the operators of one layer; weights may be frozen, adapted or packed."""

    def __init__(self, model: Model, use: LayerUse, shard: Shard) -> None:
        super().__init__(model, shard)
        self.use, self.is_layernorm = use, model.norm == "layernorm"

    def norm(self, name: str, width: int = 0, *, rows: float | None = None, label: str = "") -> None:
        """Add a norm and the input that it saves. LayerNorm and Liger's RMSNorm are a single kernel.

        Eager RMSNorm takes eight kernels, makes an fp32 copy of its input, and saves the tensor that its weight is
        multiplied with. `label` names its saved tensors.
        """
        rows, label = self.tokens if rows is None else rows, label or name
        elements, each = rows * (width or self.hidden), BF16 if width else self.use.residual_bytes
        if self.use.fused or self.is_layernorm:
            saved = SavedTensor(f"{label} input", each * elements + 2 * FP32 * rows)
            self.moved(name, 2 * BF16 * elements, 3 * BF16 * elements, saved=(saved,))
            return
        kept = [SavedTensor(f"{label} input in fp32", FP32 * (elements + rows))]
        if self.use.trains_weights:
            kept.append(SavedTensor(f"{label} output before its weight", each * elements))
        forward, backward = RMSNORM_BYTES
        work = Moved(forward * elements, backward * elements, *RMSNORM_KERNELS)
        self.add(name, "elementwise", work, saved=tuple(kept))

    def inputs(self, names: tuple[str, ...], width: float, *, is_kept_anyway: bool = False) -> tuple[SavedTensor, ...]:
        """Return the common input of some linear layers in 16 bits.

        It is saved once, or once per layer if autocast casts it for each. An adapter whose dtype differs from the
        input's casts the input into a copy of its own (peft `tuners/lora/layer.py::Linear.forward`); if the adapter is
        in fp32 under autocast, the saved copy is in 16 bits again. Dropout makes a copy too, and saves a mask of one
        byte per element (PyTorch `derivatives.yaml`, native_dropout).
        """
        use, elements, saved = self.use, self.tokens * width, []
        own = [name for name in names if name in use.adapted]
        keeps = (
            use.trains_weights or (use.packed_bytes and use.saves_packed_inputs) or (own and not use.adapter_copy_bytes)
        )
        if keeps and not is_kept_anyway:
            casts = names if use.fp32_weights else names[:1]
            saved = [SavedTensor(f"{name} input", BF16 * elements) for name in casts]
        if use.adapter_copy_bytes:
            saved += [SavedTensor(f"{name} adapter's input", use.adapter_copy_bytes * elements) for name in own]
        if use.adapter_dropout:
            saved += [SavedTensor(f"{name} adapter's mask", elements) for name in own]
        return tuple(saved)

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: Mapping[str, int] | int,
        side: Side = "column",
        *,
        divides: str = "",
        saved: tuple[SavedTensor, ...] | None = None,
    ) -> None:
        """Add one product with a linear layer, or with several layers if `outputs` maps names to widths.

        `saved` defaults to the product's own input. Nothing is split over ranks.
        """
        parts = {name: outputs} if isinstance(outputs, int) else outputs
        weights = tuple(linear_weight(part, inputs, wide) for part, wide in parts.items())
        kept = self.inputs(tuple(parts), inputs) if saved is None else saved
        self.product(name, self.tokens, sum(parts.values()), inputs, weights=weights, saved=kept)
        for part, wide in parts.items():
            self.adapter(part, inputs, wide)

    def product(
        self,
        name: str,
        rows: float,
        outputs: int,
        inputs: int,
        *,
        count: int = 1,
        times: int = 1,
        weights: tuple[Weight, ...] = (),
        saved: tuple[SavedTensor, ...] = (),
    ) -> None:
        """Add a product with a weight: `count` of them grouped, or `times` one after the other.

        A frozen weight has no gradient; a packed weight is unpacked before each use.
        """
        work: Work = Product(rows, outputs, inputs, count, is_trained=self.use.trains_weights, accumulated_bytes=0)
        work = Repeated(work, times) if times > 1 else work
        self.add(name, "gemm", work, weights=weights, saved=saved)
        if self.shard.is_low_precision:
            cast = count * times * rows * (BF16 + 2)
            self.moved(f"{name} casts", cast * inputs, cast * outputs)
        if self.use.packed_bytes:
            unpacked = Dequantization(count * times * outputs * inputs, self.use.packed_bytes)
            self.add(f"{name} unpacked", "elementwise", unpacked)

    def adapter(self, name: str, inputs: int, outputs: int) -> None:
        """Add LoRA beside a linear layer: two narrow products, scaling and addition (peft `Linear.forward`)."""
        if name not in self.use.adapted:
            return
        self.add(f"{name} adapter", "gemm", AdapterProducts(self.tokens, inputs, outputs, self.use.lora_rank))
        # Multiplication by the scale and addition to the layer's output; backward also adds the two gradients of the
        # input.
        forward, backward, kernels = (4 + 6) * outputs, 6 * inputs + 8 * outputs, 2
        if self.use.adapter_input_bytes:
            # Cast of the input to fp32 and, under autocast, back.
            forward, backward, kernels = forward + 12 * inputs, backward + 6 * inputs, 4
        if self.use.adapter_dropout:
            # Read and written in the adapter's dtype, with the mask.
            dropped = 2 * (FP32 if self.use.adapter_input_bytes else BF16) + 1
            forward, backward, kernels = forward + dropped * inputs, backward + dropped * inputs, kernels + 1
        self.moved(f"{name} adapter's sums", self.tokens * forward, self.tokens * backward, kernels=kernels)

    def ulysses(self, width: float) -> None:
        """Add the all-to-all of q, k, v and of attention's output, which gives a rank all positions of some heads.

        A rank sends tokens x `width` in bf16, where `width` is that of the four tensors together. Jacobs et al. 2023,
        "DeepSpeed Ulysses" (arXiv 2309.14509, section 3).
        """
        ranks = self.use.ulysses
        if ranks > 1:
            work = Calls("all-to-all", Group(ranks, 1), BF16 * self.tokens * width, 1, 1, launched=4)
            self.add("ulysses", "cp_comm", work, freed_by=("core_attn",))


@dataclass(frozen=True, slots=True)
class Dequantization(Work):
    """Packed weights, read and written out in 16 bits before each product, in forward and in backward."""

    elements: float
    packed_bytes: float
    """Bytes per packed weight."""
    source = "bitsandbytes csrc/kernels.cu::kDequantizeBlockwise, by bytes"

    def seconds(self, on: Machine) -> Seconds:
        """Return equal seconds forward and backward."""
        moved = self.elements * (self.packed_bytes + BF16) / on.profile.nf4_unpack_share
        return Moved(moved, moved, 2, 2).seconds(on)


@dataclass(frozen=True, slots=True)
class AdapterProducts(Work):
    """An adapter's two products (rows x inputs x rank, rows x rank x outputs), always in 16 bits."""

    rows: float
    inputs: int
    outputs: int
    rank: int
    source = Product.source

    def seconds(self, on: Machine) -> Seconds:
        """Return the forward seconds, and twice as many backward."""
        sides = ((self.rank, self.inputs), (self.outputs, self.rank))
        one = sum(gemm_s(self.rows, wide, inner, on.gpu, on.profile, "bf16") for wide, inner in sides)
        return Seconds(one, 2 * one, launches=(2, 4))
