"""The share of one micro-batch on one GPU: everything that a layer's memory and time depend on."""

from __future__ import annotations

from typing import NamedTuple

from topoplan.layout.layout import Layout
from topoplan.network.topology import local_ranks
from topoplan.operators.adapters import Adapters, adapters_of
from topoplan.operators.dispatch import dispatcher_of
from topoplan.operators.op import BF16, FP32
from topoplan.operators.padding import load_of, longest_sequence
from topoplan.operators.routing import imbalance_of
from topoplan.specs.case import Case
from topoplan.specs.model import Moe


class Shard(NamedTuple):
    """The share of a micro-batch and of a layer that one rank works on. Token counts are per micro-batch."""

    tokens: int
    """micro-batch size * sequence length / cp: the rows of attention and of the tensor-parallel GEMMs."""
    seq_len: int
    """Length of the whole sequence: the extent of attention. A token-weighted average if sequences differ in length."""
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    precision: str
    """bf16, fp16, fp8, mxfp8 or nvfp4: selects the GEMM peak, and how the inputs of linear layers are saved."""
    user_buffers: bool = False
    """Whether the tensor-parallel collectives of dense blocks overlap with their GEMMs through user buffers."""
    cp_all_to_all: bool = False
    """Whether context parallelism gives each rank whole sequences of some heads (all-to-all) instead of passing keys
    and values around a ring."""
    transposes_output: bool = False
    """Whether the attention kernel wants batch before sequence, so that its output is kept in both layouts."""
    flash_attention: bool = True
    """Whether attention avoids writing its score matrix to memory."""
    flash_attn_2: bool = False
    """Whether the kernel is FlashAttention 2 instead of cuDNN's."""
    token_imbalance: float = 1.0
    """Tokens that this rank's experts receive, relative to the average over the expert-parallel group."""
    dispatcher: str = "alltoall"
    """The token dispatcher of MoE layers: alltoall or flex."""
    combined_share: float = 0.0
    """Share of the forwards that run together with the backward of another micro-batch, which hides the exchange of
    tokens (`combined.py`)."""
    router_pads: bool = False
    """Whether, in 8-bit training, the router pads what an expert receives; otherwise the tokens are copied to be
    padded."""
    fuses_experts: bool = False
    """Whether the experts' activation and the casts around it are part of their products."""
    transposes_fp8: bool = True
    """Whether fp8 products need a transposed copy of what backward reads along the other dimension."""
    gradient_bytes: int = FP32
    """Bytes per element of the buffer into which weight gradients are accumulated."""
    adapters: Adapters | None = None
    """LoRA adapters beside frozen weights; None if the weights themselves are trained."""

    @property
    def local_tokens(self) -> float:
        """Tokens in the regions that sequence parallelism splits: norms, dropout, the router."""
        return self.tokens / self.tp if self.sequence_parallel else float(self.tokens)

    def routed_tokens(self, moe: Moe) -> float:
        """Return the token copies that this rank's experts work on.

        Expert parallelism exchanges tokens between ranks but keeps their number, up to the imbalance; expert tensor
        parallelism gathers the tokens of its group. With ep 1 a rank has all experts, and so all its tokens whatever
        the routing.
        """
        share = self.token_imbalance if self.ep > 1 else 1.0
        return self.local_tokens * moe.experts_per_token * self.etp * share

    @property
    def is_low_precision(self) -> bool:
        """Whether linear layers run in 8 bits or fewer."""
        return self.precision in ("fp8", "mxfp8", "nvfp4")


def shard_of(case: Case, layout: Layout) -> Shard:
    """Return the shard of a job's micro-batch under a layout, with its sequences at their maximum length."""
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
        combined_share=_combined_share(layout),
        router_pads=case.cluster.gpu.architecture in case.traits.router_pads_on,
        fuses_experts=_fuses_experts(case),
        transposes_fp8=case.profile.fp8_transposes,
        gradient_bytes=FP32 if layout.grad_reduce_in_fp32 else BF16,
        adapters=adapters_of(job),
    )


def _combined_share(layout: Layout) -> float:
    """Return the share of a rank's forwards that run together with a backward; 0 if the layout does not combine them.

    The others are the first ones: those of the warm-up (`engines/megatron/pipeline.py::warmup_forwards`, here on
    average over the ranks) and one more, so that the two are of different micro-batches
    (`core/pipeline_parallel/schedules.py::get_pp_rank_microbatches`, `combined_1f1b.py`).
    """
    if not layout.overlap_moe_expert_parallel_comm:
        return 0.0
    pp, vpp = layout.degrees.pp, layout.degrees.vpp
    forwards, alone = layout.gradient_accumulation_steps * vpp, (pp - 1) + (vpp - 1) * pp + 1
    return max(0, forwards - alone) / forwards


def _fuses_experts(case: Case) -> bool:
    """Return whether experts run as Transformer Engine's fused grouped MLP.

    It exists for block scales on compute capability 10 (`pytorch/ops/fused/grouped_mlp.py`, is_supported).
    """
    cluster = case.cluster
    over_nodes = local_ranks(cluster) > cluster.gpus_per_node
    can = cluster.gpu.architecture == "blackwell" and case.job.precision == "mxfp8"
    return case.traits.fuses_experts_over_nodes and can and over_nodes


def _takes_flash_attn(case: Case, layout: Layout) -> bool:
    """Return whether flash-attn's kernel replaces cuDNN's, which is not deterministic before Hopper.

    Transformer Engine 2.8 `attention/dot_product_attention/utils.py::get_attention_backend`, `backends.py::
    FlashAttention.forward` (sbhd).
    """
    if layout.attention_backend == "auto" and layout.deterministic_mode:
        return case.cluster.gpu.architecture in ("ampere", "ga10x", "ada")
    return layout.attention_backend == "flash"


def average_shard(shard: Shard, case: Case, layout: Layout) -> Shard:
    """Return the shard with its average number of tokens, on the data-parallel rank that the step waits for."""
    load = load_of(case, layout)
    sequences = layout.micro_batch_size * case.job.sequences_per_sample
    return shard._replace(tokens=round(sequences * load.positions) // layout.cp, seq_len=round(load.extent))
