"""Layers as megatron-core builds them from Transformer Engine (`transformer_impl: transformer_engine`).

Names and splits: megatron-core 0.16 `core/models/gpt/gpt_layer_specs.py`, `transformer/attention.py`,
`multi_latent_attention.py` (q_down and kv_down projections are duplicated, not split), `ssm/gated_delta_net.py`,
`mlp.py`, `moe/experts.py` (TEGroupedMLP), `moe/router.py`, `moe/shared_experts.py`, `multi_token_prediction.py`. Saved
tensors: the autograd functions of Transformer Engine (`pytorch/module/layernorm_linear.py`, `linear.py`,
`grouped_linear.py`, `attention/`: `ctx.save_for_backward`). The derivation follows Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4), with flash attention, gated MLPs,
MoE and MLA in place of GPT-3's layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topoplan.network.placement import Group
from topoplan.operators.adapters import Adapters
from topoplan.operators.builder import Builder
from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.machine import Cast, Machine, Product
from topoplan.operators.op import (
    BF16,
    FP32,
    Collective,
    Linear,
    SavedTensor,
    Seconds,
    Side,
    Split,
    Weight,
    Work,
    linear_weight,
)
from topoplan.operators.user_buffers import UserBuffers
from topoplan.specs.model import Moe

QUANTISED_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes per quantized value, scales included: mxfp8 has one scale byte per 32 values, nvfp4 one per 16."""


def _bias(weight: Linear) -> Weight:
    """Return the bias of a linear layer, split like the layer's outputs."""
    split: Split = weight.split
    if weight.side != "column":
        split = "expert_replicated" if weight.experts else "replicated"
    return Weight(f"{weight.name}.bias", max(1, weight.experts) * weight.outputs, split)


class TeBuilder(Builder):
    """Collects the operators of one layer on one rank."""

    def norm(self, name: str, width: int = 0, **fields: Any) -> None:
        """Add a norm of the hidden state, or of a tensor `width` wide, whose norm has no bias.

        Forward reads and writes the tensor once; backward reads the input and the output gradient and writes the input
        gradient.
        """
        elements, weight = self.local * (width or self.hidden), Weight(name, width)
        if not width:
            weight = Weight(name, self.hidden * (2 if self.model.norm_bias else 1))
        self.moved(name, 2 * BF16 * elements, 3 * BF16 * elements, weights=(weight,), **fields)

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        side: Side = "column",
        *,
        freed_by: tuple[str, ...] = (),
        moe: Moe | None = None,
        rank_outputs: float | None = None,
        bias: bool = False,
        label: str | None = "",
        is_normed: bool = False,
        input_freed_by: tuple[str, ...] | None = None,
        divides: str = "",
        activation: str = "",
    ) -> Product:
        """Add a linear layer: forward, input gradient and weight gradient. Returns the product.

        A frozen weight has no gradient; if an adapter is beside it, the adapter's matrices have one.

        - `moe`: every expert has such a layer.
        - `rank_outputs`: outputs on one rank, if they are not `outputs / tp`.
        - `label`: name of the saved input; None if another operator saves it.
        - `freed_by`: recompute modules that run the layer again.
        - `input_freed_by`: recompute modules that restore the input, if they differ from `freed_by`.
        - `is_normed`: the preceding norm is fused into the layer.
        - `divides`: name of the dimension that tensor parallelism splits.
        - `activation`: its output or input, if the activation there and its casts are part of the product.
        """
        shard, adapters = self.shard, self.shard.adapters
        experts, ranks = (moe.experts, shard.etp) if moe else (0, shard.tp)
        weight = linear_weight(name, inputs, outputs, side, experts)
        product = Product(
            self._rows(side, moe),
            rank_outputs or (outputs / ranks if side == "column" else outputs),
            inputs / ranks if side == "row" else inputs,
            experts / shard.ep if moe else 1,
            is_trained=adapters is None,
            is_fused=bool(activation),
            accumulated_bytes=2 * shard.gradient_bytes,
        )
        is_adapted, saved = adapters is not None and adapters.on(name), tuple[SavedTensor, ...]()
        elements = product.count * self._rows_around(weight, product)[0] * product.inputs
        if adapters is None and label is not None:
            saved = (self._saved_input(label or f"{name} input", elements, input_freed_by or freed_by),)
        elif is_adapted and is_normed:
            # With `weight.requires_grad` false, Transformer Engine saves no input; but a layer that hands the norm's
            # output to an adapter saves all of it nevertheless (`layernorm_linear.py`: ln_out_to_save).
            saved = (SavedTensor(f"{name} norm output", BF16 * elements, freed_by),)
        divided = ((divides, inputs if side == "row" else outputs),) if divides else ()
        weights = (weight, _bias(weight)) if bias else (weight,)
        self.add(name, "gemm", product, weights=weights, saved=saved, freed_by=freed_by, divided=divided)
        if adapters is not None and is_adapted:
            self._adapter(weight, product, adapters, freed_by, is_input_kept=is_normed or label is None)
        if shard.is_low_precision:
            work = self._casts(weight, product, is_normed=is_normed, activation=activation)
            self.add(f"{name} casts", "elementwise", work, freed_by=freed_by)
        return product

    def _saved_input(self, label: str, elements: float, freed_by: tuple[str, ...]) -> SavedTensor:
        """Return a linear layer's input as saved for backward; low-precision layers save the quantized copy."""
        return SavedTensor(label, QUANTISED_BYTES.get(self.shard.precision, BF16) * elements, freed_by)

    def _casts(self, weight: Linear, product: Product, *, is_normed: bool, activation: str) -> Cast:
        """Return the casts around a linear layer.

        The input and the output gradient are read in bf16 and written twice, rowwise and columnwise. With one scale per
        tensor (fp8), a norm writes 8 bits itself, tensors gathered over the sequence are cast before the gather, and
        the second copy is a transpose of the first (`pytorch/module/layernorm_linear.py`, `module/base.py`), which only
        cards need whose products read one layout (`csrc/quantizer.cpp`, nvte_is_non_tn_fp8_gemm_supported).
        """
        cast, transpose = BF16 + 2, 2
        if self.shard.precision == "fp8" and not self.shard.transposes_fp8:
            cast, transpose = BF16 + 1, 0
        into, out = product.count * product.rows * product.inputs, product.count * product.rows * product.outputs
        ahead, back = cast * into, cast * out
        if self.shard.precision == "fp8":
            if is_normed:
                ahead, back = 0.0, back + transpose * into
            if weight.side == "row" and self.shard.sequence_parallel and not weight.experts:
                back += (BF16 + 1) * out / self.shard.tp + transpose * out - cast * out
        return Cast(0.0 if activation == "input" else ahead, 0.0 if activation == "output" else back)

    def _rows(self, side: Side, moe: Moe | None) -> float:
        """Return the rows of a product; with `moe`, the rows of one expert."""
        if moe:
            return self.shard.routed_tokens(moe) / (moe.experts / self.shard.ep)
        return self.local if side == "replicated" else self.tokens

    def _rows_around(self, weight: Linear, product: Product) -> tuple[float, float]:
        """Return the rows of a layer's input before its all-gather and of its output after its reduce-scatter."""
        local = product.rows if weight.experts else self.local
        return product.rows if weight.side == "row" else local, product.rows if weight.side == "column" else local

    def _adapter(
        self, weight: Linear, product: Product, adapters: Adapters, freed_by: tuple[str, ...], *, is_input_kept: bool
    ) -> None:
        """Add LoRA beside a linear layer (mcore_bridge 1.6.5 `tuners/lora.py::LoraParallelLinear`).

        If the layer is split over its outputs (column), A is replicated and B is split like the layer; if it is split
        over its inputs (row), A is split and B replicated; if the layer is replicated, so are both. Every expert has an
        A and a B of its own.

        The work is dropout, the two narrow products, a scaling and an addition. A saves its input after dropout,
        dropout one byte of mask per element, and B the output of A. Without dropout, A's input is the layer's own,
        which may be kept anyway. A takes a column-parallel layer's input before it
        is gathered, and B what the reduce-scatter leaves of a row-parallel A's sum, so the tensors that sequence
        parallelism gathers and scatters for them are only as wide as the LoRA rank.
        """
        name, side, experts, rank = weight.name, weight.side, weight.experts, adapters.rank
        ahead, behind = self._rows_around(weight, product)
        into, out = product.count * ahead * product.inputs, product.count * behind * product.outputs
        narrow = product.rows * product.count if experts else self.local
        a_side: Side = "row" if side == "row" else "replicated"
        b_side: Side = "column" if side == "column" else "replicated"
        a_weight = linear_weight(f"{name}.lora_A", weight.inputs, rank, a_side, experts, is_adapter=True)
        b_weight = linear_weight(f"{name}.lora_B", rank, weight.outputs, b_side, experts, is_adapter=True)
        a = Product(ahead, rank, product.inputs, product.count)
        b = Product(behind, product.outputs, rank, product.count)
        saved = tuple[SavedTensor, ...]()
        if adapters.dropout:
            saved = (SavedTensor(f"{name} adapter input, mask", (BF16 + 1) * into, freed_by),)
        elif not is_input_kept:
            saved = (SavedTensor(f"{name} adapter input", BF16 * into, freed_by),)
        between = SavedTensor(f"{name} adapter, between A and B", BF16 * narrow * rank, freed_by)
        self.add(a_weight.name, "gemm", a, weights=(a_weight,), saved=saved, freed_by=freed_by)
        self.add(b_weight.name, "gemm", b, weights=(b_weight,), saved=(between,), freed_by=freed_by)
        # Scaling and addition; backward also adds the two gradients of the input. Dropout reads and writes its input,
        # and its mask.
        forward, backward, kernels = 5 * BF16 * out, 3 * BF16 * into + 2 * BF16 * out, 2
        if adapters.dropout:
            dropped = (2 * BF16 + 1) * into
            forward, backward, kernels = forward + dropped, backward + dropped, 3
        self.moved(f"{name} adapter's sums", forward, backward, kernels=kernels, freed_by=freed_by)
        if self.shard.tp > 1 and not experts and side != "replicated":
            work = AdapterCollectives(rank, side == "column", b)
            self.add(f"{name} adapter's collectives", "tp_comm", work, freed_by=freed_by)

    def attention_saved(self, core: CoreAttention) -> tuple[SavedTensor, ...]:
        """Return what attention itself saves: its output, and softmax statistics or probabilities.

        On one rank these are bf16 output of tokens x heads x value width, fp32 statistics of tokens x heads and,
        without flash attention, the softmax's bf16 output of heads x tokens x sequence
        (`core/transformer/dot_product_attention.py`).
        """
        tokens, heads, by = self.tokens, core.heads, ("core_attn",)
        saved = [
            SavedTensor("attention output", BF16 * tokens * heads * core.value_dim),
            SavedTensor("softmax statistics", FP32 * tokens * heads, by),
        ]
        if self.shard.cp_all_to_all:
            # `linear_proj` saves the output again after the all-to-all (Transformer Engine since 2.8,
            # `context_parallel.py::AttnFuncWithCPAndQKVOA2A`: out_part).
            own = BF16 * tokens * heads * core.value_dim
            saved.append(SavedTensor("attention output before its all-to-all", own, by))
        if self.shard.transposes_output:
            saved.append(SavedTensor("attention output of flash-attn", BF16 * tokens * heads * core.value_dim, by))
        if not self.shard.flash_attention:
            scores = BF16 * tokens * self.shard.seq_len * heads
            saved.append(SavedTensor("attention probabilities", scores, by))
            if core.kv_heads < heads:
                repeated = BF16 * tokens * heads * (core.key_dim + core.value_dim)
                saved.append(SavedTensor("k, v repeated for every head", repeated, by))
        return tuple(saved)

    def tensor_parallel(
        self, name: str, product: Product, inputs: tuple[int, ...] = (), row: Product | None = None, **fields: Any
    ) -> None:
        """Add the collectives around one pair of column- and row-parallel layers.

        `inputs` are the widths of the column-parallel layers' inputs if they are not the hidden state; `row` is the
        row-parallel product if Transformer Engine has user buffers for the pair.
        """
        if row and self.shard.user_buffers:
            self.add(name, "tp_comm", UserBuffers(product, row), **fields)
        elif self.shard.tp > 1:
            self.add(name, "tp_comm", TensorParallel(self.hidden, product, inputs), **fields)


@dataclass(frozen=True, slots=True)
class TensorParallel(Work):
    """Collectives around one pair of column- and row-parallel layers, on tensors of tokens x hidden.

    With sequence parallelism, forward: all-gather and reduce-scatter, both exposed. Backward: the all-gather of the
    output gradient is exposed; the second all-gather of the input and the reduce-scatter of its gradient overlap with
    the two gradient GEMMs of the column-parallel layer. Without sequence parallelism: one all-reduce forward, and one
    backward that overlaps with the weight gradient. Low-precision layers gather quantized tensors (Transformer Engine
    `pytorch/module/layernorm_linear.py`, `module/base.py::grad_output_preprocess`); sums are in bf16.
    """

    hidden: int
    beside: Product
    inputs: tuple[int, ...] = ()
    source = "MLM core/tensor_parallel/layers.py"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds that remain exposed."""
        shard, group, overlap = on.shard, Group(on.shard.tp, 1), on.profile.tp_overlap
        kind = "all-gather" if shard.sequence_parallel else "all-reduce"
        whole = BF16 * shard.tokens * self.hidden
        quantised = shard.tokens * (QUANTISED_BYTES.get(shard.precision, BF16) if shard.sequence_parallel else BF16)
        widths = self.inputs or (self.hidden,)
        taken_in = sum(widths) / self.hidden
        out, out_again = on.call_s(kind, group, whole), on.call_s(kind, group, quantised * self.hidden)
        into = sum(on.call_s(kind, group, quantised * width) for width in widths)
        scattered = sum(on.call_s(kind, group, BF16 * shard.tokens * width) for width in widths)
        hidden_s = sum(on.gradients_s(self.beside))
        if shard.adapters is not None:
            # A frozen weight does not need its input gathered again, and has no weight gradient to overlap with the
            # other collective.
            forward, backward = (into + out, out_again + scattered) if shard.sequence_parallel else (out, into)
        elif shard.sequence_parallel:
            beside = into + scattered
            forward, backward = into + out, out_again + beside - min(beside, hidden_s) * overlap
        else:
            forward, backward = out, into - min(into, hidden_s / 2) * overlap
        call = Collective(kind, group, whole, out, 1.0, taken_in)
        if shard.sequence_parallel:
            again = 2.0 if shard.adapters is None else 1.0
            call = Collective(kind, group, whole, out, 1.0 + taken_in, 1.0 + again * taken_in)
        return Seconds(forward, backward, call)


@dataclass(frozen=True, slots=True)
class AdapterCollectives(Work):
    """Collectives that tensor parallelism adds for an adapter, on tensors of tokens x LoRA rank."""

    rank: int
    is_column: bool
    beside: Product
    """The product with the adapter's B."""
    source = "mcore_bridge tuners/lora.py::LoraParallelLinear.forward"

    def seconds(self, on: Machine) -> Seconds:
        """Return the exposed seconds.

        In a column-parallel layer's backward the collectives overlap with the gradients of B.
        """
        shard, overlap, gradients = on.shard, on.profile.tp_overlap, on.gradients_s(self.beside)
        group, whole = Group(shard.tp, 1), BF16 * shard.tokens * self.rank
        kind = "all-gather" if shard.sequence_parallel else "all-reduce"
        one = on.call_s(kind, group, whole)
        if shard.sequence_parallel:
            hidden = min(2 * one, sum(gradients)) * overlap
            calls, times = ((1, 2), (one, 2 * one - hidden)) if self.is_column else ((1, 1), (one, one))
        else:
            hidden = min(one, gradients[1]) * overlap
            calls, times = ((0, 1), (0.0, one - hidden)) if self.is_column else ((1, 0), (one, 0.0))
        return Seconds(*times, Collective(kind, group, whole, one, *calls))
