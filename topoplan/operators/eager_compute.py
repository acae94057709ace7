"""Seconds of one layer as Hugging Face's models run it: the same products as Megatron's, with everything around them
unfused.

Bytes of the elementwise kernels are counted off transformers 5.6 `models/llama/modeling_llama.py` operation by
operation (an addition of two 16-bit tensors reads four bytes an element and writes two). Kernels that are small are
bound by the host, which launches them one by one: hence their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from topoplan.network.collectives import all_to_all_s
from topoplan.network.placement import Group
from topoplan.operators.eager_activations import LayerUse
from topoplan.operators.eager_linears import layer_linears
from topoplan.operators.params import layer_parameters
from topoplan.operators.shard import Shard
from topoplan.operators.te_activations import BF16 as HALF
from topoplan.operators.te_compute import (
    PARTS,
    Builder,
    Collective,
    Operator,
    core_attention,
    elementwise_s,
    gemm_s,
    latent_attention,
    linear_attention,
)
from topoplan.specs.case import Case
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.model import Attention, LatentAttention, Layer, Mlp, Moe

RMSNORM_BYTES = (36, 60)
"""Bytes an element that eager RMSNorm moves forward and backward: cast to fp32, square, mean, product, cast back,
weight."""
RMSNORM_KERNELS = (8, 14)
ROTARY_BYTES = 19
"""The same of the rotation of q or k: two products, a half turned (negation and concatenation), an addition."""
ROTARY_KERNELS = 6


@lru_cache(maxsize=64)
def eager_profile(profile: Profile, gpu: Gpu) -> Profile:
    """A profile of eager PyTorch, whose attention is no faster than FlashAttention 2."""
    highest = profile.flash2_flops_per_sm * gpu.sm_count / gpu.fp16_flops
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
    """The same case in eager PyTorch."""
    return replace(case, profile=eager_profile(case.profile, case.cluster.gpu))


@dataclass(frozen=True, slots=True)
class EagerTime:
    """One layer and one micro batch."""

    forward_s: tuple[float, ...]
    """By part in the order of PARTS."""
    backward_s: tuple[float, ...]
    forward_kernels: int
    """Operations that the host has to launch."""
    backward_kernels: int


class EagerBuilder(Builder):
    """Collects the operators of one layer; weights may be frozen, adapted or packed."""

    def __init__(self, case: Case, use: LayerUse, shard: Shard, tuning: Tuning) -> None:
        """Nothing yet."""
        super().__init__(eager_case(case), shard)
        self.use, self.tuning, self.is_layernorm = use, tuning, case.model.norm == "layernorm"
        self.kernels = [0, 0]

    def count(self, forward: int, backward: int) -> None:
        """More operations for the host."""
        self.kernels[0] += forward
        self.kernels[1] += backward

    def linear(
        self, name: str, rows: float, outputs: float, inputs: float, *, count: float = 1, by: tuple[str, ...] = ()
    ) -> tuple[float, float]:
        """A linear layer. A frozen one has no gradient of its weight; a packed one is unpacked before each use."""
        gpu, profile, precision = self.gpu, self.profile, self.shard.precision
        forward = gemm_s(rows, outputs, inputs, gpu, profile, precision, count=count)
        dgrad = gemm_s(rows, inputs, outputs, gpu, profile, precision, count=count)
        wgrad = 0.0
        if self.use.trains_weights:
            wgrad = gemm_s(outputs, inputs, rows, gpu, profile, precision, count=count)
        self.count(1, 2 if wgrad else 1)
        self.operators.append(Operator(name, "gemm", forward, dgrad + wgrad, by))
        if self.shard.eight_bit:
            cast = count * rows * (HALF + 2)
            self.elementwise(f"{name} casts", cast * inputs, cast * outputs, kernels=1, by=by)
        if self.tuning.packed_bytes:
            # Reads the packed weights and writes them in 16 bits, before either product.
            moved = count * outputs * inputs * (self.tuning.packed_bytes + HALF) / profile.nf4_unpack_share
            self.elementwise(f"{name} unpacked", moved, moved, kernels=2, by=by)
        return dgrad, wgrad

    def adapter(self, name: str, rows: float, outputs: float, inputs: float) -> None:
        """LoRA beside a linear layer: two narrow products, scaling and addition (peft `Linear.forward`)."""
        if name not in self.use.adapted:
            return
        rank, gpu, profile = self.tuning.lora_rank, self.gpu, self.profile
        narrow = gemm_s(rows, rank, inputs, gpu, profile, "bf16") + gemm_s(rows, outputs, rank, gpu, profile, "bf16")
        self.count(2, 4)
        self.operators.append(Operator(f"{name} adapter", "gemm", narrow, 2 * narrow))
        # Product with the scale, addition to the layer's own output; backward, of both gradients of the input.
        forward, backward = (4 + 6) * outputs, 6 * inputs + 8 * outputs
        if self.use.adapter_input_bytes:
            # Cast of the input to fp32 and, under autocast, back.
            forward, backward = forward + 12 * inputs, backward + 6 * inputs
        kernels = 4 if self.use.adapter_input_bytes else 2
        self.elementwise(f"{name} adapter's sums", rows * forward, rows * backward, kernels=kernels)

    def elementwise(
        self, name: str, forward_bytes: float, backward_bytes: float, *, kernels: int = 1, by: tuple[str, ...] = ()
    ) -> None:
        """Memory-bound work; every kernel is launched by the host."""
        self.count(kernels, kernels)
        super().elementwise(name, forward_bytes, backward_bytes, kernels=kernels, by=by)

    def norm(self, name: str, elements: float, by: tuple[str, ...] = ()) -> None:
        """LayerNorm and Liger's RMSNorm are one kernel; eager RMSNorm is eight."""
        if self.is_layernorm or self.use.fused:
            super().norm(name, elements, by)
            return
        (forward, backward), (ahead, back) = RMSNORM_BYTES, RMSNORM_KERNELS
        gpu, profile = self.gpu, self.profile
        self.count(ahead, back)
        self.operators.append(
            Operator(
                name,
                "elementwise",
                elementwise_s(forward * elements, gpu, profile, kernels=ahead),
                elementwise_s(backward * elements, gpu, profile, kernels=back),
                by,
            )
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """What adapters and packed weights add."""

    lora_rank: int = 0
    packed_bytes: float = 0.0
    """Of one weight; 0 where they are not packed."""
    ulysses: int = 1


def _attention(build: EagerBuilder, attention: Attention) -> None:
    hidden, tokens = build.hidden, build.shard.tokens
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    build.norm("input_layernorm", tokens * hidden)
    gated = 2 if attention.output_gate else 1
    for name, width in (("q_proj", query * gated), ("k_proj", key), ("v_proj", key)):
        build.linear(name, tokens, width, hidden)
        build.adapter(name, tokens, width, hidden)
    if attention.qk_norm:
        build.norm("q_norm, k_norm", tokens * (query + key))
    rotated = tokens * (query + key)
    if build.use.fused or build.is_layernorm:
        build.elementwise("rotary embedding", 4 * rotated, 4 * rotated)
    else:
        moved = ROTARY_BYTES * rotated
        build.elementwise("rotary embedding", moved, moved, kernels=2 * ROTARY_KERNELS)
    _ulysses(build, 2 * query + 2 * key)
    core_attention(build, attention.heads, attention.kv_heads, attention.head_dim, attention.head_dim, attention.window)
    build.count(1, 1)
    build.linear("o_proj", tokens, hidden, query)
    build.adapter("o_proj", tokens, hidden, query)


def _ulysses(build: EagerBuilder, width: float) -> None:
    """All-to-all of q, k, v and of attention's output, so that a rank has all positions of some heads.

    Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509, section 3).
    """
    if build.tuning.ulysses == 1:
        return
    ranks = Group(build.tuning.ulysses, 1)
    sent = HALF * build.shard.tokens * width
    one = all_to_all_s(ranks, sent, build.cluster, build.profile)
    call = Collective("all-to-all", ranks, sent, one)
    build.count(4, 4)
    build.operators.append(Operator("ulysses", "cp_comm", one, one, ("core_attn",), call))


def _feed_forward(build: EagerBuilder, width: int, *, gated: bool, rows: float) -> None:
    hidden = build.hidden
    for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
        build.linear(name, rows, width, hidden)
        build.adapter(name, rows, width, hidden)
    elements = rows * width
    if not gated:
        build.elementwise("activation", 4 * elements, 6 * elements)
    elif build.use.fused:
        build.elementwise("activation, product", 6 * elements, 10 * elements)
    else:
        build.elementwise("activation, product", 10 * elements, 18 * elements, kernels=2)
    build.linear("down_proj", rows, hidden, width)
    build.adapter("down_proj", rows, hidden, width)


def _moe(build: EagerBuilder, moe: Moe) -> None:
    """Tokens sorted by expert and grouped products (transformers `integrations/moe.py`, grouped_mm_experts_forward)."""
    hidden, tokens = build.hidden, build.shard.tokens
    routed = tokens * moe.experts_per_token
    first = moe.intermediate_size * (2 if moe.gated else 1)
    router = build.profile.router_bytes * tokens * moe.experts
    build.elementwise("router, top-k, sort", router, router, kernels=build.profile.eager_router_kernels)
    build.elementwise("gather and scatter of tokens", 12 * routed * hidden, 16 * routed * hidden, kernels=6)
    build.linear("experts.gate_up_proj", routed / moe.experts, first, hidden, count=moe.experts)
    elements = routed * moe.intermediate_size
    build.elementwise("experts.activation", 10 * elements, 18 * elements, kernels=2)
    build.linear("experts.down_proj", routed / moe.experts, hidden, moe.intermediate_size, count=moe.experts)
    if moe.shared_intermediate_size:
        _feed_forward(build, moe.shared_intermediate_size, gated=moe.gated, rows=tokens)


@lru_cache(maxsize=1 << 12)
def eager_operators(
    case: Case, layer: Layer, use: LayerUse, shard: Shard, tuning: Tuning
) -> tuple[tuple[Operator, ...], tuple[int, int]]:
    """(all kernels and collectives of one layer and one micro batch, operations launched forward and backward)."""
    model = case.model
    build = EagerBuilder(case, use, shard, tuning)
    if isinstance(layer.attention, Attention):
        _attention(build, layer.attention)
    else:
        if isinstance(layer.attention, LatentAttention):
            latent_attention(build, layer.attention)
        else:
            linear_attention(build, layer.attention)
        for linear in layer_linears(model, layer):
            if not linear.name.endswith(("gate_proj", "up_proj", "down_proj")):
                build.adapter(linear.name, shard.tokens, linear.outputs, linear.inputs)
    build.norm("post_attention_layernorm", shard.tokens * model.hidden_size)
    if isinstance(layer.ffn, Mlp):
        _feed_forward(build, layer.ffn.intermediate_size, gated=layer.ffn.gated, rows=shard.tokens)
    else:
        _moe(build, layer.ffn)
    residual = 2 * 6 * shard.tokens * model.hidden_size
    build.elementwise("residual additions", residual, residual, kernels=2)
    if use.trains_weights:
        # Gradients of a second micro batch are added to the first one's: two reads and a write in 16 bits.
        elements = layer_parameters(model, layer, 1, 1, 1).total
        seconds = elementwise_s(6 * elements, build.gpu, build.profile)
        build.count(0, 1)
        build.operators.append(Operator("accumulation of gradients", "elementwise", 0.0, seconds))
    return tuple(build.operators), (build.kernels[0], build.kernels[1])


@lru_cache(maxsize=1 << 12)
def eager_time(case: Case, layer: Layer, use: LayerUse, shard: Shard, tuning: Tuning) -> EagerTime:
    """Forward and backward of one layer and one micro batch."""
    operators, kernels = eager_operators(case, layer, use, shard, tuning)
    forward, backward = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for operator in operators:
        forward[operator.part] += operator.forward_s
        backward[operator.part] += operator.backward_s
    return EagerTime(tuple(forward.values()), tuple(backward.values()), *kernels)
