"""Seconds of the kernels of one layer: a table of operators, each with its forward and backward.

GEMMs and attention follow a roofline whose height is the profile's efficiency, lowered by tile and wave quantisation
(NVIDIA, "Matrix Multiplication Background User's Guide", sections 3 and 4); elementwise kernels go by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from topoplan.layout.layout import Recompute
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s
from topoplan.network.placement import Group
from topoplan.operators.adapters import Adapters
from topoplan.operators.dispatch import dispatcher_of, flex_copies, flex_s
from topoplan.operators.flops import attended_tokens
from topoplan.operators.megatron_linears import side_of
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, Moe

Part = Literal["gemm", "attention", "elementwise", "tp_comm", "cp_comm", "ep_comm"]
PARTS: tuple[Part, ...] = ("gemm", "attention", "elementwise", "tp_comm", "cp_comm", "ep_comm")
BF16 = 2
HEAD_DIM = 128
"""Width of the heads that the profile's rates of attention are of."""


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


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel, or one collective, of a layer and a micro batch."""

    name: str
    part: Part
    forward_s: float
    backward_s: float
    recomputed_by: tuple[str, ...] = ()
    """Megatron recompute modules that run its forward again."""
    collective: Collective | None = None
    """For communication, one of its calls."""

    def is_repeated(self, recompute: Recompute) -> bool:
        """Whether a layer that is recomputed in this mode runs its forward again."""
        return recompute.granularity == "full" or not set(recompute.modules).isdisjoint(self.recomputed_by)

    def recompute_s(self, recompute: Recompute) -> float:
        """Its forward once more, where a layer is recomputed in this mode and repeats it; else 0."""
        return self.forward_s if self.is_repeated(recompute) else 0.0


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer and one micro batch, by part in the order of PARTS."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: float
    """Forward work that backward repeats; not in backward_s."""


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Dense peak of linear layers in a precision. A precision that the card lacks falls back to the next one up."""
    if precision == "fp16":
        return gpu.fp16_flops
    if precision == "nvfp4" and gpu.fp4_flops:
        return gpu.fp4_flops
    if precision in ("fp8", "mxfp8", "nvfp4") and gpu.fp8_flops:
        return gpu.fp8_flops
    return gpu.bf16_flops


def gemm_s(
    rows: float, columns: float, inner: float, gpu: Gpu, profile: Profile, precision: str, *, count: float = 1
) -> float:
    """One GEMM of rows x inner by inner x columns, or `count` of them run as one grouped kernel."""
    peak = peak_flops(gpu, precision)
    efficiency = profile.gemm_efficiency if peak <= gpu.fp16_flops else profile.fp8_gemm_efficiency
    if count > 1:
        efficiency *= profile.grouped_gemm_efficiency / profile.gemm_efficiency
    height, width = profile.gemm_tile
    best = float("inf")
    # The library picks a smaller tile where it fills the card better; smaller tiles reread more operands.
    for tile_height, tile_width, penalty in (
        (height, width, 1.0),
        (height, width // 2, profile.half_tile_efficiency),
        (height // 2, width // 2, profile.quarter_tile_efficiency),
    ):
        tiles = ceil(rows / tile_height) * ceil(columns / tile_width) * count
        waves = max(1.0, tiles / gpu.sm_count)
        waves = ceil(waves) if waves < 8 else waves + 0.5
        flops = waves * gpu.sm_count * 2.0 * tile_height * tile_width * (inner + profile.gemm_prologue)
        best = min(best, flops / penalty)
    moved = (BF16 if peak <= gpu.fp16_flops else 1) * inner * (rows + columns) + BF16 * rows * columns
    memory = count * moved / (gpu.memory_bytes_per_s * profile.memory_efficiency)
    return profile.kernel_launch_s + max(best / (peak * efficiency), memory)


def elementwise_s(moved_bytes: float, gpu: Gpu, profile: Profile, *, kernels: int = 1) -> float:
    """Memory-bound kernels that move so many bytes in all."""
    return kernels * profile.kernel_launch_s + moved_bytes / (gpu.memory_bytes_per_s * profile.memory_efficiency)


class Builder:
    """Collects the operators of one layer."""

    def __init__(self, case: Case, shard: Shard) -> None:
        self.case, self.shard, self.hidden = case, shard, case.model.hidden_size
        self.cluster, self.profile, self.gpu = case.cluster, case.profile, case.cluster.gpu
        self.operators: list[Operator] = []

    def linear(
        self, name: str, rows: float, outputs: float, inputs: float, *, count: float = 1, by: tuple[str, ...] = ()
    ) -> tuple[float, float]:
        """A linear layer: forward, input gradient and weight gradient. Returns the seconds of the two gradients.

        A frozen weight has no gradient; with an adapter beside it, that one's matrices have.
        """
        adapters = self.shard.adapters
        dgrad, wgrad = self._product(name, rows, outputs, inputs, count, by, is_trained=adapters is None)
        if adapters is not None and adapters.on(name):
            self._adapter(name, adapters, rows, outputs, inputs, count, by)
        if self.shard.eight_bit:
            # Casts: the input and the output gradient are read in bf16 and written twice, rowwise and columnwise.
            cast = count * rows * (BF16 + 2)
            self.elementwise(f"{name} casts", cast * inputs, cast * outputs, kernels=1, by=by)
        return dgrad, wgrad

    def _product(
        self,
        name: str,
        rows: float,
        outputs: float,
        inputs: float,
        count: float,
        by: tuple[str, ...],
        *,
        is_trained: bool = True,
    ) -> tuple[float, float]:
        """A product with a weight, forward and backward. Returns the seconds of the two gradients."""
        gpu, profile, precision = self.gpu, self.profile, self.shard.precision
        forward = gemm_s(rows, outputs, inputs, gpu, profile, precision, count=count)
        dgrad, wgrad = gemm_s(rows, inputs, outputs, gpu, profile, precision, count=count), 0.0
        if is_trained:
            wgrad = gemm_s(outputs, inputs, rows, gpu, profile, precision, count=count)
            # Gradient accumulation reads and writes the fp32 gradient buffer in the GEMM's epilogue.
            wgrad += elementwise_s(8 * count * outputs * inputs, gpu, profile, kernels=0)
        self.operators.append(Operator(name, "gemm", forward, dgrad + wgrad, by))
        return dgrad, wgrad

    def _adapter(
        self,
        name: str,
        adapters: Adapters,
        rows: float,
        outputs: float,
        inputs: float,
        count: float,
        by: tuple[str, ...],
    ) -> None:
        """LoRA beside a linear layer (mcore_bridge `tuners/lora.py::LoraParallelLinear.forward`).

        Dropout, the two narrow products, a scaling and an addition. A takes a column-parallel layer's input before it
        is gathered, B what a row-parallel layer's A leaves of its sum: what sequence parallelism gathers and scatters
        for them is as wide as the rank.
        """
        rank, side, is_expert = adapters.rank, side_of(name), name.startswith("experts.")
        local = rows if is_expert else self.shard.local_tokens
        ahead = rows if side == "row" else local
        behind = rows if side == "column" else local
        self._product(f"{name}.lora_A", ahead, rank, inputs, count, by)
        gradients = self._product(f"{name}.lora_B", behind, outputs, rank, count, by)
        into, out = count * ahead * inputs, count * behind * outputs
        # Dropout with its mask, the scaling, the addition; backward, the sum of both gradients of the input.
        forward = (2 * BF16 + 1) * into + 5 * BF16 * out
        self.elementwise(f"{name} adapter's sums", forward, (5 * BF16 + 1) * into + 2 * BF16 * out, kernels=3, by=by)
        if self.shard.tp == 1 or is_expert or side == "replicated":
            return
        group, whole = Group(self.shard.tp, 1), BF16 * self.shard.tokens * rank
        if self.shard.sequence_parallel:
            kind, one = "all-gather", all_gather_s(group, whole, self.cluster, self.profile)
            times = (one, 2 * one - min(2 * one, sum(gradients)) * self.profile.tp_overlap if side == "column" else one)
        else:
            kind, one = "all-reduce", all_reduce_s(group, whole, self.cluster, self.profile)
            overlapped = one - min(one, gradients[1]) * self.profile.tp_overlap
            times = (0.0, overlapped) if side == "column" else (one, 0.0)
        calls = {("column", True): (1, 2), ("row", True): (1, 1), ("column", False): (0, 1), ("row", False): (1, 0)}
        call = Collective(kind, group, whole, one, *calls[side, self.shard.sequence_parallel])
        self.operators.append(Operator(f"{name} adapter's collectives", "tp_comm", *times, by, call))

    def elementwise(
        self, name: str, forward_bytes: float, backward_bytes: float, *, kernels: int = 1, by: tuple[str, ...] = ()
    ) -> None:
        """Memory-bound work."""
        forward = elementwise_s(forward_bytes, self.gpu, self.profile, kernels=kernels)
        backward = elementwise_s(backward_bytes, self.gpu, self.profile, kernels=kernels)
        self.operators.append(Operator(name, "elementwise", forward, backward, by))

    def norm(self, name: str, elements: float, by: tuple[str, ...] = ()) -> None:
        """A norm: reads and writes once forward; backward reads input and gradient and writes one."""
        self.elementwise(name, 2 * BF16 * elements, 3 * BF16 * elements, by=by)

    def tensor_parallel(
        self, name: str, hidden_s: float, by: tuple[str, ...] = (), *, inputs: tuple[int, ...] = ()
    ) -> None:
        """Collectives around one pair of column- and row-parallel layers.

        With sequence parallelism, forward: all-gather and reduce-scatter, both exposed. Backward: the all-gather of
        the output gradient is exposed; gathering the input again and scattering its gradient run beside the two
        gradient GEMMs (`hidden_s`) of the column-parallel layer. Without it: one all-reduce forward, and one backward
        beside the weight gradient (`core/tensor_parallel/layers.py`). `inputs` are the widths of what the
        column-parallel layers take in, where that is not the hidden state.
        """
        shard = self.shard
        if shard.tp == 1:
            return
        group, overlap = Group(shard.tp, 1), self.profile.tp_overlap
        collective = all_gather_s if shard.sequence_parallel else all_reduce_s
        whole = BF16 * shard.tokens * self.hidden
        out = collective(group, whole, self.cluster, self.profile)
        into = out
        taken_in = sum(inputs) / self.hidden if inputs else 1.0
        if inputs:
            into = sum(collective(group, BF16 * shard.tokens * n, self.cluster, self.profile) for n in inputs)
        if shard.adapters is not None:
            # A frozen weight needs no input gathered, and has no gradient for the other collective to run beside.
            forward, backward = (into + out, out + into) if shard.sequence_parallel else (out, into)
        elif shard.sequence_parallel:
            forward, backward = into + out, out + 2 * into - min(2 * into, hidden_s) * overlap
        else:
            forward, backward = out, into - min(into, hidden_s / 2) * overlap
        call = Collective("all-reduce", group, whole, out, 1.0, taken_in)
        if shard.sequence_parallel:
            again = 2.0 if shard.adapters is None else 1.0
            call = Collective("all-gather", group, whole, out, 1.0 + taken_in, 1.0 + again * taken_in)
        self.operators.append(Operator(name, "tp_comm", forward, backward, by, call))


def core_attention(build: Builder, heads: float, kv_heads: float, key_dim: int, value_dim: int, window: int) -> None:
    """Causal flash attention; backward is 2.5 times forward (arXiv 2307.08691, section 4).

    Without a flash kernel both products run over the whole square, and the scores pass through memory.
    """
    shard, gpu, profile = build.shard, build.gpu, build.profile
    if not shard.flash_attention:
        scores = shard.tokens * shard.seq_len * heads
        forward = 2.0 * scores * (key_dim + value_dim) / (gpu.fp16_flops * profile.gemm_efficiency)
        build.operators.append(Operator("core_attn", "attention", forward, 2 * forward, ("core_attn",)))
        # Masked softmax reads and writes them; backward reads probabilities and gradients and writes gradients.
        build.elementwise("softmax", 2 * BF16 * scores, 3 * BF16 * scores, by=("core_attn",))
        return
    flops = 2.0 * shard.tokens * attended_tokens(shard.seq_len, window) * heads * (key_dim + value_dim)
    # The softmax costs the same for every score, so a narrow head spends a larger share of its time on it.
    width, softmax = (key_dim + value_dim) / 2, profile.attention_softmax_width
    narrow = width / (width + softmax) * (HEAD_DIM + softmax) / HEAD_DIM
    rate = gpu.fp16_flops * narrow
    forward = profile.kernel_launch_s + flops / (rate * profile.attention_forward_efficiency)
    backward = profile.kernel_launch_s + 2.5 * flops / (rate * profile.attention_backward_efficiency)
    build.operators.append(Operator("core_attn", "attention", forward, backward, ("core_attn",)))
    if shard.cp > 1:
        # Ring attention: every step hands on the keys and values (and, backward, their gradients) while it computes.
        ring = Group(shard.cp, shard.tp)
        sent = BF16 * shard.tokens * kv_heads * (key_dim + value_dim)
        step = point_to_point_s(ring, sent, build.cluster, profile)
        hops = shard.cp - 1
        # Each hop's partial output is rescaled and added in fp32.
        merged = 12 * shard.tokens * heads * value_dim
        build.elementwise("cp merge", hops * merged, hops * merged, kernels=4 * hops, by=("core_attn",))
        build.operators.append(
            Operator(
                "cp ring",
                "cp_comm",
                hops * max(0.0, step - forward / shard.cp),
                hops * max(0.0, 2 * step - backward / shard.cp),
                ("core_attn",),
                Collective("send", ring, sent, step, hops, 2 * hops),
            )
        )


def _attention(build: Builder, attention: Attention) -> None:
    hidden, shard = build.hidden, build.shard
    heads, kv_heads, width = attention.heads / shard.tp, max(attention.kv_heads / shard.tp, 1), attention.head_dim
    query = heads * width * (2 if attention.output_gate else 1)
    build.norm("input_layernorm", shard.local_tokens * hidden)
    dgrad, wgrad = build.linear("linear_qkv", shard.tokens, query + 2 * kv_heads * width, hidden)
    moved = 2 * BF16 * shard.tokens * (heads + kv_heads) * width
    # Splitting q out of the mixed projection, and rotation; with a norm on q and k a third pass.
    passes = 3 if attention.qk_norm else 2
    build.elementwise("split, rotate, qk norm", passes * moved, (passes + 0.5) * moved, kernels=2 * passes)
    core_attention(build, heads, kv_heads, width, width, attention.window)
    build.linear("linear_proj", shard.tokens, hidden, heads * width)
    build.tensor_parallel("attention collectives", dgrad + wgrad)


def latent_attention(build: Builder, attention: LatentAttention) -> None:
    """Operators of multi-head latent attention and its norm."""
    hidden, shard = build.hidden, build.shard
    heads = attention.heads / shard.tp
    key_dim, value_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    local, up = shard.local_tokens, ("mla_up_proj",)
    build.norm("input_layernorm", local * hidden, ("layernorm",))
    if attention.q_lora_rank:
        build.linear("linear_q_down_proj", local, attention.q_lora_rank, hidden)
        build.norm("q_layernorm", local * attention.q_lora_rank, up)
    query_in, query = attention.q_lora_rank or hidden, "linear_q_up_proj" if attention.q_lora_rank else "linear_q_proj"
    dgrad_q, wgrad_q = build.linear(query, shard.tokens, heads * key_dim, query_in, by=up)
    build.linear("linear_kv_down_proj", local, attention.kv_lora_rank + attention.qk_rope_head_dim, hidden)
    build.norm("kv_layernorm", local * attention.kv_lora_rank, up)
    build.linear(
        "linear_kv_up_proj",
        shard.tokens,
        heads * (attention.qk_nope_head_dim + value_dim),
        attention.kv_lora_rank,
        by=up,
    )
    moved = 2 * BF16 * shard.tokens * heads * (2 * key_dim + value_dim)
    build.elementwise("rotate, assemble q k v", moved, 1.5 * moved, kernels=4, by=up)
    core_attention(build, heads, heads, key_dim, value_dim, 0)
    build.linear("linear_proj", shard.tokens, hidden, heads * value_dim)
    # The down projections are not split: what is gathered over the sequence are their outputs (and, with one matrix
    # for the queries, the hidden state), each on its own.
    inputs = (query_in, attention.kv_lora_rank, attention.qk_rope_head_dim)
    build.tensor_parallel("attention collectives", dgrad_q + wgrad_q, inputs=inputs)


def linear_attention(build: Builder, attention: LinearAttention) -> None:
    """Operators of a gated delta rule and its norm."""
    hidden, shard, gpu, profile = build.hidden, build.shard, build.gpu, build.profile
    key = attention.key_heads * attention.key_head_dim / shard.tp
    value = attention.value_heads * attention.value_head_dim / shard.tp
    heads = attention.value_heads / shard.tp
    build.norm("input_layernorm", shard.local_tokens * hidden)
    dgrad, wgrad = build.linear("in_proj", shard.tokens, 2 * key + 2 * value + 2 * heads, hidden)
    moved = 2 * BF16 * shard.tokens * (2 * key + value)
    build.elementwise("convolution, gates, norms", 4 * moved, 6 * moved, kernels=8)
    # Chunked delta rule (arXiv 2412.06464, section 3): products within a chunk of 64 tokens and with the state.
    chunk, key_dim, value_dim = 64, attention.key_head_dim, attention.value_head_dim
    flops = 2.0 * shard.tokens * heads * (3 * chunk * (key_dim + value_dim) / 2 + 3 * key_dim * value_dim)
    rate = gpu.fp16_flops * profile.attention_forward_efficiency * profile.delta_rule_share
    forward = 4 * profile.kernel_launch_s + flops / rate
    build.operators.append(Operator("gated delta rule", "attention", forward, 2.5 * forward, ("core_attn",)))
    build.linear("out_proj", shard.tokens, hidden, value)
    build.tensor_parallel("attention collectives", dgrad + wgrad)


def _mlp(build: Builder, mlp: Mlp) -> None:
    hidden, shard, by = build.hidden, build.shard, ("mlp",)
    width = mlp.intermediate_size / shard.tp
    first = width * (2 if mlp.gated else 1)
    build.norm("pre_mlp_layernorm", shard.local_tokens * hidden, by)
    dgrad, wgrad = build.linear("linear_fc1", shard.tokens, first, hidden, by=by)
    moved = BF16 * shard.tokens
    build.elementwise("activation", moved * (first + width), moved * (2 * first + width), by=by)
    build.linear("linear_fc2", shard.tokens, hidden, width, by=by)
    build.tensor_parallel("mlp collectives", dgrad + wgrad, by)


def _moe(build: Builder, moe: Moe) -> None:
    hidden, shard, by = build.hidden, build.shard, ("moe",)
    local, routed = shard.local_tokens, shard.routed_tokens(moe)
    width = moe.intermediate_size / shard.etp
    first = width * (2 if moe.gated else 1)
    experts = moe.experts / shard.ep
    build.norm("pre_mlp_layernorm", local * hidden, ("layernorm",))
    cluster, profile = build.cluster, build.profile
    rate = build.gpu.fp16_flops * profile.gemm_efficiency * profile.router_gemm_share
    router = 2.0 * local * hidden * moe.experts / rate
    gradients = 2 if shard.adapters is None else 1
    build.operators.append(Operator("router", "gemm", router, gradients * router, by))
    maps = profile.router_bytes * local * moe.experts
    build.elementwise("top-k, maps", maps, maps, kernels=profile.router_kernels, by=by)
    dispatcher = dispatcher_of(shard, cluster)
    if dispatcher == "flex":
        # Its kernels take tokens as they are and bring one to each rank: permuted to experts and back there.
        permuted, kernels = BF16 * hidden * (3 * routed + flex_copies(moe, shard)), 2
    else:
        permuted, kernels = BF16 * hidden * (7 * routed + local), 6
    build.elementwise("permute, sort, unpermute", permuted, permuted, kernels=kernels, by=by)
    build.linear("experts.linear_fc1", routed / experts, first, hidden, count=experts, by=by)
    moved = BF16 * routed
    build.elementwise("experts.activation", moved * (first + width), moved * (2 * first + width), by=("moe", "moe_act"))
    build.linear("experts.linear_fc2", routed / experts, hidden, width, count=experts, by=by)
    if moe.shared_intermediate_size:
        shared = moe.shared_intermediate_size / shard.tp
        shared_first = shared * (2 if moe.gated else 1)
        shared_by = ("moe", "shared_experts")
        dgrad, wgrad = build.linear("shared_experts.linear_fc1", shard.tokens, shared_first, hidden, by=shared_by)
        moved = BF16 * shard.tokens
        build.elementwise(
            "shared_experts.activation",
            moved * (shared_first + shared),
            moved * (2 * shared_first + shared),
            by=shared_by,
        )
        build.linear("shared_experts.linear_fc2", shard.tokens, hidden, shared, by=shared_by)
        build.tensor_parallel("shared expert collectives", dgrad + wgrad, shared_by)
    # Dispatch and combine, and their mirror images backward; nothing hides them, and the busiest rank is last.
    if dispatcher == "flex":
        # One group of both grids, so that no collectives of ETP are left.
        group, sent = Group(shard.etp * shard.ep, 1), BF16 * hidden * flex_copies(moe, shard)
        one = flex_s(build.case, moe, BF16 * hidden, shard)
        call = Collective("all-to-all", group, sent, one, 2, 2)
        build.operators.append(Operator("dispatch, combine (flex)", "ep_comm", 2 * one, 2 * one, by, call))
        return
    if shard.ep > 1:
        group, sent = Group(shard.ep, shard.etp), BF16 * routed / shard.etp * hidden
        one = all_to_all_s(group, sent, cluster, profile)
        call = Collective("all-to-all", group, sent, one, 2, 2)
        build.operators.append(Operator("dispatch, combine (alltoall)", "ep_comm", 2 * one, 2 * one, by, call))
    if shard.etp > 1:
        group, whole = Group(shard.etp, 1), BF16 * routed * hidden
        one = all_gather_s(group, whole, cluster, profile)
        call = Collective("all-gather", group, whole, one, 2, 2)
        build.operators.append(Operator("expert tensor collectives", "tp_comm", 2 * one, 2 * one, by, call))


def _mtp(build: Builder) -> None:
    """What a multi-token-prediction layer does around its block (`core/transformer/multi_token_prediction.py`)."""
    hidden, shard = build.hidden, build.shard
    for name in ("enorm", "hnorm", "mtp final_layernorm"):
        build.norm(name, shard.local_tokens * hidden)
    joined = 2 * BF16 * shard.local_tokens * 2 * hidden
    build.elementwise("concatenation", joined, joined)
    dgrad, wgrad = build.linear("eh_proj", shard.tokens, hidden / shard.tp, 2 * hidden)
    if shard.tp == 1:
        return
    tensor_group, cluster, profile = Group(shard.tp, 1), build.cluster, build.profile
    output, whole = BF16 * shard.tokens * hidden, BF16 * shard.tokens * 2 * hidden
    # Its output is gathered over the tensor-parallel group. With sequence parallelism its input is too, and its part
    # for the block is cut out, whose gradient is gathered.
    forward = all_gather_s(tensor_group, output, cluster, profile)
    if shard.sequence_parallel:
        into = all_gather_s(tensor_group, whole, cluster, profile)
        backward = forward + 2 * into - min(2 * into, dgrad + wgrad) * profile.tp_overlap
        call = Collective("all-gather", tensor_group, whole, into, 1.5, 2.5)
        if shard.adapters is not None:
            backward = forward + into
            call = replace(call, backward_calls=1.5)
        forward += into
    else:
        into = all_reduce_s(tensor_group, whole, cluster, profile)
        # A frozen weight has no gradient for it to run beside.
        backward = into - min(into, wgrad) * profile.tp_overlap
        # A gathered output of half the size is a quarter of an all-reduce.
        call = Collective("all-reduce", tensor_group, whole, into, 0.25, 1)
    build.operators.append(Operator("eh_proj collectives", "tp_comm", forward, backward, collective=call))


@lru_cache(maxsize=1 << 14)
def layer_operators(case: Case, layer: Layer, shard: Shard) -> tuple[Operator, ...]:
    """All kernels and collectives of one layer and one micro batch."""
    model = case.model
    build = Builder(case, shard)
    if layer.predicts_next:
        _mtp(build)
    if isinstance(layer.attention, LatentAttention):
        latent_attention(build, layer.attention)
    elif isinstance(layer.attention, LinearAttention):
        linear_attention(build, layer.attention)
    else:
        _attention(build, layer.attention)
    if isinstance(layer.ffn, Mlp):
        _mlp(build, layer.ffn)
    else:
        _moe(build, layer.ffn)
    # Two residual additions: two reads and a write each, and as much backward.
    residual = 2 * 3 * BF16 * shard.local_tokens * model.hidden_size
    build.elementwise("residual additions", residual, residual, kernels=2)
    return tuple(build.operators)


@lru_cache(maxsize=1 << 15)
def layer_time(case: Case, layer: Layer, shard: Shard, recompute: Recompute) -> LayerTime:
    """Forward and backward of one layer and one micro batch, with what its recompute mode repeats.

    `recompute` with granularity full means this very layer is recomputed.
    """
    forward = dict.fromkeys(PARTS, 0.0)
    backward = dict.fromkeys(PARTS, 0.0)
    repeated = 0.0
    for operator in layer_operators(case, layer, shard):
        forward[operator.part] += operator.forward_s
        backward[operator.part] += operator.backward_s
        repeated += operator.recompute_s(recompute)
    return LayerTime(tuple(forward.values()), tuple(backward.values()), repeated)
