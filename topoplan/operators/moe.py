"""Routed experts, the shared expert beside them, and the norm before them."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.network.placement import Group
from topoplan.operators.eager import EagerBuilder
from topoplan.operators.flex import flex_copies, flex_s
from topoplan.operators.machine import Calls, Machine, Moved
from topoplan.operators.mlp import activation_saved, eager_feed_forward, te_feed_forward
from topoplan.operators.op import BF16, FP32, Seconds, Weight, Work, linear_weight
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import Mlp, Moe

INT64 = 8
LOOP_LAUNCHES = (19, 33)
"""Operations per expert besides its products, (forward, backward), if experts run one by one; counted from
Qwen3MoeSparseMoeBlock.forward: indexing, `where`, `index_add_` and, backward, `index_put_` with its sort. Each of the
two times that the host waits for the GPU counts as three operations."""
LINEAR_ROUTERS = ("deepseek_v2",)
"""Model types whose router is an `nn.Linear` (`models/deepseek_v2/modeling_deepseek_v2.py`, DeepseekV2Moe.gate)."""


def te(build: TeBuilder, moe: Moe) -> None:
    """Add MoELayer of megatron-core and the norm before it, with grouped products (TEGroupedMLP)."""
    hidden, local, shard, by = build.hidden, build.local, build.shard, ("moe",)
    build.norm("pre_mlp_layernorm", freed_by=("layernorm",))
    build.keep("mlp layernorm input", BF16 * local * hidden)
    _router(build, moe)
    routed = shard.routed_tokens(moe)
    # Flex's kernels take tokens as they are and send one copy to each rank; only there are tokens permuted by expert,
    # and back.
    is_flex = shard.dispatcher == "flex"
    copies = 3 * routed + flex_copies(moe, shard) if is_flex else 7 * routed + local
    permuted, kernels = BF16 * hidden * copies, 2 if is_flex else 6
    build.moved("permute, sort, unpermute", permuted, permuted, kernels=kernels, freed_by=by)
    build.keep("routing weights and row maps", 2 * FP32 * routed, by)
    experts = Mlp(intermediate_size=moe.intermediate_size, gated=moe.gated, bias=moe.bias)
    into, _ = te_feed_forward(build, experts, by, "experts.", moe)
    if moe.bias:
        _second_bias(build, moe)
    if shard.is_low_precision and not shard.router_pads:
        # Each expert's tokens are copied into a buffer padded to the size that its products require, and back afterward
        # (`moe/experts.py`, quantization_padding and quantization_unpadding), with a read and a write each.
        copied = 2 * 2 * BF16 * routed * hidden
        build.moved("experts padded for 8 bits", copied, copied, kernels=2, freed_by=by)
    # Gradients on their way back through combine: the layer's output gradient, its permuted copy before and after the
    # all-to-all and after the sort by expert, then the experts' own.
    gradients = BF16 * (local * hidden + routed * (4 * hidden + into.outputs))
    build.add("combine's backward", "elementwise", None, gradients_bytes=gradients)
    if moe.shared_intermediate_size:
        shared_by = ("moe", "shared_experts")
        into, _ = te_feed_forward(build, _shared(moe), shared_by, "shared_experts.")
        build.tensor_parallel("shared expert collectives", into, freed_by=shared_by)
    if moe.shared_gate:
        gate = Weight("shared_experts.gate", hidden, is_matrix=True)
        build.add("shared_experts.gate", "gemm", None, weights=(gate,))
    _dispatch(build, moe)


def _second_bias(build: TeBuilder, moe: Moe) -> None:
    """Add the bias after the experts' second product, times each token's fp32 routing weight.

    It is not part of the product: the tokens of each expert are computed separately in fp32, then concatenated and cast
    back (`moe/experts.py::TEGroupedMLP._apply_bias`). Bytes per element, forward: product 4, sum 10, concatenation 8,
    cast 6. Backward: cast 6, cast of the sum's first term 6, gradients of the routing weight and, unless it is frozen,
    of the bias 12 each, concatenation 4.
    """
    elements, experts = build.shard.routed_tokens(moe) * build.hidden, round(moe.experts / build.shard.ep)
    gradients = 1 if build.shard.adapters else 2
    ahead, back = 28 * elements, (16 + 12 * gradients) * elements
    work = Moved(ahead, back, 2 * experts + 2, (1 + 2 * gradients) * experts + 2)
    build.add("experts.linear_fc2 bias", "elementwise", work, freed_by=("moe",))


def _shared(moe: Moe) -> Mlp:
    return Mlp(intermediate_size=moe.shared_intermediate_size, gated=moe.gated)


def _router(build: TeBuilder, moe: Moe) -> None:
    """Add TopKRouter (`moe/router.py`).

    It saves its input even if its weight is frozen (RouterGatingLinearFunction).
    """
    hidden, local, by = build.hidden, build.local, ("moe",)
    weights = [Weight("router", hidden * moe.experts, is_matrix=True)]
    if moe.router_bias:
        weights.append(Weight("router.bias", moe.experts))
    work = Router(local, hidden, moe.experts, is_trained=build.shard.adapters is None)
    build.add("router", "gemm", work, weights=tuple(weights), freed_by=by)
    build.keep("router and dispatch input", BF16 * local * hidden, ("layernorm",))
    build.add("top-k, maps", "elementwise", RouterMaps(local, moe.experts), freed_by=by)
    build.keep("router logits, probabilities, map", (2 * FP32 + 1) * local * moe.experts, by)


def _dispatch(build: TeBuilder, moe: Moe) -> None:
    """Add dispatch and combine, with their mirror images in backward.

    Only the pass of another micro-batch hides them (`combined.py`), and the busiest rank counts.
    """
    hidden, shard, by = build.hidden, build.shard, ("moe",)
    if shard.dispatcher == "flex":
        # Flex joins the ep and etp grids in one group, so that no collectives of expert tensor parallelism are left.
        group, sent = Group(shard.etp * shard.ep, 1), BF16 * hidden * flex_copies(moe, shard)
        flex = Flex("all-to-all", group, sent, moe=moe, hidden_bytes=BF16 * hidden)
        build.add("dispatch, combine (flex)", "ep_comm", flex, freed_by=by)
        return
    routed = BF16 * shard.routed_tokens(moe) * hidden
    if shard.ep > 1:
        work = Calls("all-to-all", Group(shard.ep, shard.etp), routed / shard.etp)
        build.add("dispatch, combine (alltoall)", "ep_comm", work, freed_by=by)
    if shard.etp > 1:
        work = Calls("all-gather", Group(shard.etp, 1), routed)
        build.add("expert tensor collectives", "tp_comm", work, freed_by=by)


@dataclass(frozen=True, slots=True)
class Router(Work):
    """The router's product: forward, the gradient of its input and, unless frozen, the gradient of its weight."""

    tokens: float
    hidden: int
    experts: int
    is_trained: bool
    source = "FLOPs at the profile's share of a GEMM's rate (router_gemm_share)"

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds; each gradient takes as many FLOPs as forward."""
        rate = on.gpu.fp16_flops * on.profile.gemm_efficiency * on.profile.router_gemm_share
        one = 2.0 * self.tokens * self.hidden * self.experts / rate
        return Seconds(one, (2 if self.is_trained else 1) * one)


@dataclass(frozen=True, slots=True)
class RouterMaps(Work):
    """Top-k selection and the maps from tokens to experts."""

    tokens: float
    experts: int
    is_eager: bool = False
    source = "the profile's bytes for each token and expert (router_bytes)"

    def seconds(self, on: Machine) -> Seconds:
        """Return equal seconds forward and backward."""
        maps = on.profile.router_bytes * self.tokens * self.experts
        kernels = on.profile.eager_router_kernels if self.is_eager else on.profile.router_kernels
        return Moved(maps, maps, kernels, kernels).seconds(on)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flex(Calls):
    """Dispatch and combine of the flex dispatcher."""

    moe: Moe
    hidden_bytes: int
    """Bytes of one token's hidden state."""
    source = "arXiv 2412.19437, section 3.2.2; DeepEP csrc/kernels/internode.cu"

    def call_s(self, on: Machine) -> float:
        """Return the seconds of one call, which uses NVLink and the network between nodes at the same time."""
        return flex_s(on.case, self.moe, self.hidden_bytes, on.shard)


def eager(build: EagerBuilder, moe: Moe, *, adapts_gates: bool) -> None:
    """Add the routed experts, in grouped products or one by one, and the shared expert beside them.

    `adapts_gates`: whether the time of adapters on the router and the shared expert's gate is counted.
    """
    hidden, tokens, use = build.hidden, build.tokens, build.use
    _eager_router(build, moe)
    (_looped if use.loops_experts else _grouped)(build, moe)
    if moe.shared_intermediate_size:
        eager_feed_forward(build, _shared(moe))
    if moe.shared_gate:
        saved = build.inputs(("shared_expert_gate",), hidden, is_kept_anyway=not use.fp32_weights)
        gate = linear_weight("shared_expert_gate", hidden, 1)
        build.add("shared_expert_gate", "gemm", None, weights=(gate,), saved=saved)
        build.keep("shared expert's output", BF16 * tokens * hidden)
    if adapts_gates:
        for name, outputs in (("gate", moe.experts), ("shared_expert_gate", 1)):
            build.adapter(name, hidden, outputs)


def _grouped(build: EagerBuilder, moe: Moe) -> None:
    """Add experts as sorted tokens and grouped products.

    Source: transformers 5 `integrations/moe.py`, grouped_mm_experts_forward. Experts are not `nn.Linear` modules there
    but single three-dimensional parameters (`Qwen3MoeExperts`), so adapters cannot target them; nor can they target the
    router, except in DeepSeek-V2. Autocast does not cast such parameters: with fp32 weights they compute in fp32
    (_grouped_mm).
    """
    hidden, use, width = build.hidden, build.use, moe.intermediate_size
    routed, each = build.tokens * moe.experts_per_token, FP32 if use.fp32_weights else BF16
    build.moved("gather and scatter of tokens", 12 * routed * hidden, 16 * routed * hidden, kernels=6)
    first, rows = width * (2 if moe.gated else 1), routed / moe.experts
    _keep_experts_input(build, each * routed * hidden)
    build.product("experts.gate_up_proj", rows, first, hidden, count=moe.experts)
    gradients = each * routed * (width * (3 if moe.gated else 2) + 2 * hidden)
    _eager_activation(build, moe, each, 2, gradients)
    build.product("experts.down_proj", rows, hidden, width, count=moe.experts)
    _keep_experts_output(build, moe, each)


def _looped(build: EagerBuilder, moe: Moe) -> None:
    """Add experts that run one after the other (transformers 4 `models/qwen3_moe/modeling_qwen3_moe.py`).

    The class is Qwen3MoeSparseMoeBlock. Equal numbers of tokens per expert are assumed, which is the best case. The
    host waits for the GPU twice per expert, to learn which tokens are the expert's. In backward each expert has a
    gradient of the whole hidden state, zero except at its tokens, and these gradients are summed.
    """
    hidden, tokens, width, experts = build.hidden, build.tokens, moe.intermediate_size, moe.experts
    routed, products = tokens * moe.experts_per_token, 2 if moe.gated else 1
    rows, whole = routed / experts, BF16 * tokens * hidden
    ahead, back = LOOP_LAUNCHES
    around = Moved(12 * routed * hidden, 16 * routed * hidden + 4 * experts * whole, experts * ahead, experts * back)
    build.add("gather and scatter of tokens", "elementwise", around)
    _keep_experts_input(build, BF16 * routed * hidden)
    build.product("experts.gate_proj, up_proj", rows, width, hidden, times=products * experts)
    gradients = BF16 * rows * (width * (3 if moe.gated else 2) + 2 * hidden) + 2 * whole
    _eager_activation(build, moe, BF16, 2 * experts, gradients)
    build.product("experts.down_proj", rows, hidden, width, times=experts)
    _keep_experts_output(build, moe, BF16)


def _keep_experts_input(build: EagerBuilder, size: float) -> None:
    if build.use.trains_weights:
        build.keep("experts' input", size)


def _keep_experts_output(build: EagerBuilder, moe: Moe, each: int) -> None:
    routed = build.tokens * moe.experts_per_token
    build.keep("experts' output", each * routed * build.hidden)
    if build.use.trains_weights:
        build.keep("experts.down_proj input", each * routed * moe.intermediate_size)


def _eager_activation(build: EagerBuilder, moe: Moe, each: int, kernels: int, gradients_bytes: float) -> None:
    elements = build.tokens * moe.experts_per_token * moe.intermediate_size
    saved = activation_saved(each * elements, gated=moe.gated, is_fused=build.use.fused)
    build.moved(
        "experts.activation",
        10 * elements,
        18 * elements,
        kernels=kernels,
        saved=saved,
        gradients_bytes=gradients_bytes,
    )


def _eager_router(build: EagerBuilder, moe: Moe) -> None:
    hidden, tokens, use = build.hidden, build.tokens, build.use
    is_linear = build.model.model_type in LINEAR_ROUTERS
    weights = (linear_weight("gate", hidden, moe.experts),) if is_linear else ()
    work = RouterMaps(tokens, moe.experts, is_eager=True)
    build.add("router, top-k, sort", "elementwise", work, weights=weights)
    build.keep("router probabilities", FP32 * tokens * moe.experts)
    build.keep("order of tokens", 4 * INT64 * tokens * moe.experts_per_token)
    # A shared expert's first product saves the same tensor.
    is_kept_anyway = moe.shared_intermediate_size and not use.fp32_weights
    if use.trains_weights and not is_kept_anyway:
        build.keep("router input", BF16 * tokens * hidden)
