"""How one micro batch lies on one GPU: everything that a layer's memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from topoplan.layout.layout import Layout
from topoplan.operators.adapters import Adapters, adapters_of
from topoplan.operators.dispatch import dispatcher_of
from topoplan.operators.op import BF16, FP32
from topoplan.operators.padding import load_of, longest_sequence
from topoplan.operators.routing import imbalance_of
from topoplan.specs.case import Case
from topoplan.specs.model import Moe


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of a micro batch and of a layer that one rank works on. Token counts are of one micro batch."""

    tokens: int
    """micro batch * sequence / cp: what attention and the TP-split GEMMs see."""
    seq_len: int
    """Whole sequence: the extent of attention. On average over tokens, where sequences differ."""
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    precision: str
    """bf16, fp16, fp8, mxfp8 or nvfp4: which GEMM peak, and how linear inputs are saved."""
    user_buffers: bool = False
    """Tensor-parallel collectives of dense blocks run inside the GEMMs beside them."""
    cp_all_to_all: bool = False
    """Context parallel gives each rank whole sequences of some heads, instead of handing keys and values around."""
    transposes_output: bool = False
    """Attention's kernel has batches before sequences, so that its output is kept in either order."""
    flash_attention: bool = True
    """Attention never writes its score matrix to memory."""
    flash_attn_2: bool = False
    """The kernel is that of FlashAttention 2, not cuDNN's."""
    token_imbalance: float = 1.0
    """Tokens that this rank's experts get, over the average of the expert-parallel group."""
    dispatcher: str = "alltoall"
    """Which one brings tokens to their experts: alltoall or flex."""
    router_pads: bool = False
    """In 8 bits the router pads what an expert gets, which is else copied to be padded."""
    gradient_bytes: int = FP32
    """Of an element of the buffer that a weight's gradient is added to."""
    adapters: Adapters | None = None
    """LoRA beside weights that are frozen; None where the weights are trained."""

    @property
    def local_tokens(self) -> float:
        """Tokens in the regions that sequence parallelism splits: norms, dropout, the router."""
        return self.tokens / self.tp if self.sequence_parallel else float(self.tokens)

    def routed_tokens(self, moe: Moe) -> float:
        """Token copies that this rank's experts work on.

        EP trades tokens between ranks and leaves their number alone, up to the imbalance; ETP gathers the tokens of
        its group. With ep 1 a rank has all experts, and all its tokens whatever the routing.
        """
        share = self.token_imbalance if self.ep > 1 else 1.0
        return self.local_tokens * moe.experts_per_token * self.etp * share

    @property
    def eight_bit(self) -> bool:
        """Linear layers run in fp8 or below."""
        return self.precision in ("fp8", "mxfp8", "nvfp4")


def shard_of(case: Case, layout: Layout) -> Shard:
    """The shard that a layout makes of a job's micro batch, at the longest that its sequences may be."""
    job, longest, degrees = case.job, longest_sequence(case, layout), layout.degrees
    return Shard(
        tokens=layout.micro_batch_size * job.sequences_per_sample * longest // degrees.cp,
        seq_len=longest,
        tp=degrees.tp,
        cp=degrees.cp,
        ep=degrees.ep,
        etp=degrees.etp,
        sequence_parallel=layout.sequence_parallel,
        precision=job.precision,
        user_buffers=layout.tp_comm_overlap and degrees.tp > 1,
        cp_all_to_all=degrees.cp > 1 and layout.cp_comm_type == "a2a",
        transposes_output=_takes_flash_attn(case, layout),
        flash_attn_2=_takes_flash_attn(case, layout) or (case.traits.flash_attn and layout.attention_backend == "auto"),
        flash_attention=case.profile.flash_attention and layout.attention_backend != "unfused",
        token_imbalance=imbalance_of(case, layout),
        dispatcher=dispatcher_of(case, layout),
        router_pads=case.cluster.gpu.architecture in case.traits.router_pads_on,
        gradient_bytes=FP32 if layout.grad_reduce_in_fp32 else BF16,
        adapters=adapters_of(job),
    )


def _takes_flash_attn(case: Case, layout: Layout) -> bool:
    """flash-attn's kernel instead of cuDNN's, which is not deterministic before Hopper.

    Transformer Engine 2.8 `attention/dot_product_attention/utils.py::get_attention_backend`, `backends.py::
    FlashAttention.forward` (sbhd).
    """
    if layout.attention_backend == "auto" and layout.deterministic_mode:
        return case.cluster.gpu.architecture in ("ampere", "ga10x", "ada")
    return layout.attention_backend == "flash"


def average_shard(shard: Shard, case: Case, layout: Layout) -> Shard:
    """The shard with the tokens that it has on average, on the data-parallel rank that the step waits for."""
    load = load_of(case, layout)
    sequences = layout.micro_batch_size * case.job.sequences_per_sample
    return replace(shard, tokens=round(sequences * load.positions) // layout.cp, seq_len=round(load.extent))
