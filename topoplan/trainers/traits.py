"""Traits that several trainers share: those of Megatron-LM, LLaMA-Factory's mcore_adapter, and transformers."""

from __future__ import annotations

from dataclasses import replace

from topoplan.operators.eager import FORWARD_LOGIT_BYTES, LOGIT_BYTES
from topoplan.specs.traits import Loss, Padding, Traits

MEGATRON = Traits(
    name="megatron",
    padding=Padding(end_to_end=True, packs_apart=True),
    vocab_multiple=128,
    router_pads_on=("blackwell",),
    fuses_experts_over_nodes=True,
    dispatcher_across_nodes="flex",
)
"""Megatron-LM's own training loop and the trainers built on it (Megatron-Bridge, ms-swift).

Dispatchers: the table "Token Dispatching" of Megatron-LM's `core/transformer/moe/README.md` (column "Best For") gives
alltoall for "Standard EP > 1 setups", flex with DeepEP for "Cross-node EP" and flex with HybridEP for "Multi-Node
NVLink". Megatron-Bridge's `docs/training/moe-optimization.md` (Hardware affinity) gives DeepEP for H100 and B200 and
HybridEP for NVL72. ms-swift itself defaults to alltoall everywhere; set that in the layout if it applies.

Padding: ms-swift 4.6 `megatron/arguments/megatron_args.py` (padding_free is on) and
`megatron/utils/utils.py::get_packed_seq_params`. Padding of experts: most of Megatron-Bridge's recipes for Blackwell
set moe_router_padding_for_quantization, those for Hopper do not (067f987, `perf_recipes/`). Fused experts: of its
recipes in mxfp8 with experts, 15 of 26 for GB200 and 17 of 27 for GB300 set use_transformer_engine_op_fuser; 2 of 17
for B200 and 7 of 17 for B300 do."""

FINE_TUNING = replace(MEGATRON, routes_freely=True, flash_attn=True, router_pads_on=(), fuses_experts_over_nodes=False)
"""MEGATRON for fine-tuning, as `megatron sft` of ms-swift runs it. Attention: `megatron/arguments/megatron_args.py`
(attention_backend flash); its Quick-start installs version 2.8.3."""

MCA = Traits(
    name="mca",
    padding=Padding(multiple=64, pt_multiple=8, to_seq_len_with_experts=True),
    vocab_must_divide=True,
    is_adapter=True,
    routes_freely=True,
)
"""LLaMA-Factory's mcore_adapter: padded_vocab_size is the checkpoint's vocab_size (`models/*/__init__.py`).
`training_args.py` offers the dispatchers allgather and alltoall. Padding: mcore_adapter
`trainer/trainer.py::_get_step_iterator_and_seq_length` and LLaMA-Factory `train/mca/workflow.py` (run_pt and run_sft:
multiples; pad_to_max)."""

HUGGING_FACE = Traits(
    name="transformers",
    padding=Padding(multiple=8),
    loss=Loss(
        forward_bytes=FORWARD_LOGIT_BYTES,
        backward_bytes=LOGIT_BYTES,
        # Bytes per logit. Forward: cast to fp32 (6), log softmax (8). Backward: its gradients (4 + 12), cast back (6).
        forward_moved_bytes=14,
        backward_moved_bytes=22,
    ),
)
"""transformers' Trainer, as LLaMA-Factory and ms-swift use it. LLaMA-Factory's collators pad to a multiple of 8
(`train/sft/workflow.py`, `train/dpo/workflow.py`). ms-swift's pad only to the longest sequence, treated alike."""

SHARDED = {"ddp": HUGGING_FACE, "deepspeed": HUGGING_FACE, "fsdp2": HUGGING_FACE}
"""Backend -> traits of a trainer that builds on transformers."""

PACKED_APART = dict.fromkeys(SHARDED, replace(HUGGING_FACE, padding=replace(HUGGING_FACE.padding, packs_apart=True)))
"""SHARDED for packing that tells attention where samples begin (ms-swift 4.6 `dataset/packing.py`, position_ids)."""
