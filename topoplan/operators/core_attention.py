"""Attention kernels that both implementations of a layer share: flash and ring attention, gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.network.collectives import point_to_point_s
from topoplan.network.placement import Group
from topoplan.operators.machine import Machine
from topoplan.operators.op import BF16, Collective, Seconds, Work
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import Profile

HEAD_DIM = 128
"""Head width that the profile's attention rates refer to."""
CHUNK = 64
"""Tokens per chunk of the gated delta rule."""


def attended_tokens(seq_len: float, window: int) -> float:
    """Return the mean number of tokens that a token attends to: half the sequence, or less under a sliding window."""
    if 0 < window < seq_len:
        return window * (1.0 - window / (2.0 * seq_len))
    return seq_len / 2


def flash2_share(profile: Profile, gpu: Gpu) -> float:
    """Return the largest share of the GPU's peak that FlashAttention 2 reaches.

    FlashAttention 2 does not use the instructions of Hopper and later.
    """
    return profile.flash2_flops_per_sm * gpu.sm_count / gpu.fp16_flops


@dataclass(frozen=True, slots=True)
class CoreAttention(Work):
    """Causal flash attention; backward takes 2.5 times the FLOPs of forward.

    Without a flash kernel both products run over the whole square of scores.
    """

    heads: float
    kv_heads: float
    key_dim: int
    value_dim: int
    window: int = 0
    launched: int = 0
    """Operations that the host launches, in each direction."""
    source = "arXiv 2307.08691, section 4"

    def flops(self, extent: float) -> float:
        """Return the FLOPs of both products for one token, averaged over the sequence."""
        return 2.0 * attended_tokens(extent, self.window) * self.heads * (self.key_dim + self.value_dim)

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of the FLOPs at the rates of the profile."""
        shard, gpu, profile = on.shard, on.gpu, on.profile
        if not shard.flash_attention:
            scores = shard.tokens * shard.seq_len * self.heads
            rate = gpu.fp16_flops * profile.gemm_efficiency
            forward = 2.0 * scores * (self.key_dim + self.value_dim) / rate
            return Seconds(forward, 2 * forward, launches=(self.launched, self.launched))
        # Every kernel that a token's query takes part in computes masked tiles in full and has to fill its pipeline. A
        # ring runs one kernel for each rank's keys; on average, three quarters of a rank's queries take part in the
        # kernel for another rank's keys.
        kernels = 1 + 0.75 * (shard.cp - 1)
        each = 2.0 * (self.key_dim + self.value_dim)
        prologue = profile.attention_prologue * self.heads * each
        # The last tile of queries attends to the most keys, and the other multiprocessors wait for it.
        longest = min(self.window or shard.seq_len, shard.seq_len / shard.cp)
        tail = gpu.sm_count * profile.attention_tail * longest * each
        flops = shard.tokens * self.flops(shard.seq_len) + kernels * (shard.tokens * prologue + tail)
        # Softmax costs the same per score whatever the head width, so a narrow head spends a larger share of its time
        # on it.
        width, softmax = min(HEAD_DIM, (self.key_dim + self.value_dim) / 2), profile.attention_softmax_width
        rate = gpu.fp16_flops * width / (width + softmax) * (HEAD_DIM + softmax) / HEAD_DIM
        highest = flash2_share(profile, gpu) if shard.flash_attn_2 else 1.0
        return Seconds(
            profile.kernel_launch_s + flops / (rate * min(highest, profile.attention_forward_efficiency)),
            profile.kernel_launch_s + 2.5 * flops / (rate * min(highest, profile.attention_backward_efficiency)),
            launches=(self.launched, self.launched),
        )


@dataclass(frozen=True, slots=True)
class Ring(Work):
    """Ring attention: every step passes on keys and values (in backward also their gradients) while it computes.

    A step sends tokens x KV heads x (key width + value width) in bf16.
    """

    core: CoreAttention
    source = "arXiv 2310.01889, section 3"

    def seconds(self, on: Machine) -> Seconds:
        """Return what the part of attention computed in each step does not hide."""
        shard, core = on.shard, self.core
        ring, hops = Group(shard.cp, shard.tp), shard.cp - 1
        sent = BF16 * shard.tokens * core.kv_heads * (core.key_dim + core.value_dim)
        step = point_to_point_s(ring, sent, on.cluster, on.profile)
        beside = core.seconds(on)
        return Seconds(
            hops * max(0.0, step - beside.forward / shard.cp),
            hops * max(0.0, 2 * step - beside.backward / shard.cp),
            Collective("send", ring, sent, step, hops, 2 * hops),
        )


@dataclass(frozen=True, slots=True)
class DeltaRule(Work):
    """The chunked gated delta rule: products within a chunk of tokens and with the state."""

    heads: float
    """Number of value heads."""
    key_dim: int
    value_dim: int
    source = "arXiv 2412.06464, section 3"

    def flops(self, extent: float) -> float:
        """Return the FLOPs per token of KK^T, VK^T, S(a(I-bKK^T)) and SQ.

        Counted as in Megatron-LM's `num_floating_point_operations`.
        """
        return 8.0 * self.heads * self.key_dim * self.value_dim

    def seconds(self, on: Machine) -> Seconds:
        """Return the seconds of the chunks' FLOPs at the profile's fraction of the attention rate."""
        profile, widths = on.profile, self.key_dim + self.value_dim
        chunks = 3 * CHUNK * widths / 2 + 3 * self.key_dim * self.value_dim
        flops = 2.0 * on.shard.tokens * self.heads * chunks
        rate = on.gpu.fp16_flops * profile.attention_forward_efficiency * profile.delta_rule_share
        forward = 4 * profile.kernel_launch_s + flops / rate
        return Seconds(forward, 2.5 * forward)
