"""Experts, packing and output of the Megatron path: what fails late, what is slow, what cannot be used afterwards.

Sources: LLaMA-Factory 0.9.5 `train/mca/workflow.py`, `train/tuner.py`; mcore_adapter 0.10 `training_args.py`,
`models/model_config.py`, `trainer/trainer.py`; megatron-core 0.16 `transformer/transformer_config.py`,
`parallel_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.lint.fewest_gpus import degree, spec_and_layout
from topoplan.reading.edits import add, change, drop, set_to
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration
from topoplan.reading.values import flag, is_complete, value_of, whole
from topoplan.specs.facts import facts_of
from topoplan.specs.model import Model
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.megatron_keys import DISPATCHER, EP, ETP
from topoplan.trainers.traits import MCA


def training_findings(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """What is wrong with how a legal layout is trained."""
    yield from _experts(configuration, model)
    yield from _packing(configuration)
    yield from _speed(configuration, model)


# Experts --------------------------------------------------------------------------------------------------------------


def _experts(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    have = configuration.source.data
    tp, ep = degree(configuration, "tensor_model_parallel") or 1, degree(configuration, "expert_model_parallel") or 1
    moe = facts_of(model).is_moe if model else ep > 1
    dispatcher = value_of(configuration, DISPATCHER)
    if dispatcher in (None, "allgather"):
        if flag(configuration, "variable_seq_lengths"):
            yield found(
                configuration,
                "mca-variable-lengths",
                "error",
                "variable_seq_lengths",
                "variable_seq_lengths with the allgather dispatcher, the default, is refused, in dense models too",
                why="mcore_adapter training_args.py: 'does not support variable sequence length'",
                remedy=f"set {DISPATCHER}: alltoall",
                edits=set_to(configuration, DISPATCHER, "alltoall", "variable_seq_lengths"),
            )
        elif moe and ep > 1:
            yield found(
                configuration,
                "mca-allgather-dispatcher",
                "warning",
                DISPATCHER if DISPATCHER in have else EP,
                f"the {'' if dispatcher else 'default '}allgather dispatcher sends every token to every expert rank",
                why=f"with ep {ep} and few experts a token most of that traffic, and the memory for it, is for nothing",
                remedy=f"set {DISPATCHER}: alltoall",
                edits=set_to(configuration, DISPATCHER, "alltoall", EP),
            )
    if moe and tp > 1 and ep > 1 and value_of(configuration, ETP) is None:
        yield found(
            configuration,
            "mca-expert-tensor-unset",
            "warning",
            EP,
            f"{ETP} is not set, and is then {tp}, the tensor parallel size, whatever its help text says",
            why=f"each expert is cut into {tp} slices, and {tp} * {ep} * pipeline stages must divide all GPUs",
            remedy=f"set {ETP}: 1, or {tp} where that is meant",
            edits=add(configuration, (EP,), ETP, 1),
        )
    if model is not None and moe and value_of(configuration, "moe_grouped_gemm") is None and is_complete(configuration):
        yield found(
            configuration,
            "mca-experts-one-by-one",
            "warning",
            "model_name_or_path",
            "moe_grouped_gemm is not set: the experts of a GPU are calculated one after the other",
            remedy="set moe_grouped_gemm: true",
            edits=add(configuration, ("model_name_or_path",), "moe_grouped_gemm", True),
        )


# Packing and lengths --------------------------------------------------------------------------------------------------


def _packing(configuration: Configuration) -> Iterator[Finding]:
    cp, stage = degree(configuration, "context_parallel") or 1, configuration.get("stage", "sft")
    for key in ("neat_packing", "sequence_packing"):
        if not flag(configuration, key):
            continue
        if cp > 1:
            yield found(
                configuration,
                "mca-packing-with-context-parallel",
                "error",
                key,
                f"{key} fails under context parallelism (cp {cp})",
                why=f"trainer.py wants packed samples at multiples of 2 * cp = {2 * cp} tokens; nothing pads them",
                remedy=f"set packing: true instead of {key}, or context_parallel_size: 1",
                edits=change(configuration, (key,), name="packing", value=True)
                if "packing" not in configuration.source.data
                else drop(configuration, (key,)),
            )
        elif stage == "dpo" and key == "sequence_packing":
            yield found(
                configuration,
                "mca-packing-in-dpo",
                "error",
                key,
                "sequence_packing is refused in stage dpo",
                remedy="take it out",
                edits=drop(configuration, (key,)),
            )
        elif configuration.get("transformer_impl") == "local":
            yield found(
                configuration,
                "mca-packing-without-te",
                "error",
                key,
                f"{key} needs Transformer Engine, and transformer_impl is local",
                remedy="take transformer_impl out",
            )
    if stage == "dpo" and flag(configuration, "packing"):
        yield found(
            configuration,
            "mca-packing-in-dpo",
            "warning",
            "packing",
            "packing has no effect in stage dpo: pairs are never packed",
            remedy="take it out",
            edits=drop(configuration, ("packing",)),
        )
    length = whole(configuration, "cutoff_len")
    if length and length > 0 and stage in ("sft", "dpo") and length % MCA.padding.multiple:
        yield found(
            configuration,
            "mca-length-padded",
            "note",
            "cutoff_len",
            f"cutoff_len {length} is no multiple of {MCA.padding.multiple}: full sequences are padded to"
            f" {-(-length // MCA.padding.multiple) * MCA.padding.multiple} tokens",
            why="train/mca/workflow.py, pad_to_multiple_of",
        )


# Speed and output -----------------------------------------------------------------------------------------------------


def _speed(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    micro_batch = degree(configuration, "per_device_train_batch")
    fused = flag(configuration, "apply_rope_fusion")
    if fused and model is not None and model.vision is not None and micro_batch is not None and micro_batch > 1:
        yield found(
            configuration,
            "mca-rope-fusion",
            "warning",
            "apply_rope_fusion",
            f"apply_rope_fusion has no kernel for the mRoPE of {model.name} with micro batches above 1",
            why="rope_utils.py::apply_rotary_pos_emb falls back, with a warning at every call",
            remedy="set apply_rope_fusion: false, or per_device_train_batch_size: 1",
            edits=change(configuration, ("apply_rope_fusion",), value=False),
        )
    tp = degree(configuration, "tensor_model_parallel")
    if flag(configuration, "cross_entropy_loss_fusion") and tp is not None and tp > 1:
        yield found(
            configuration,
            "mca-cross-entropy-fusion",
            "note",
            "cross_entropy_loss_fusion",
            f"cross_entropy_loss_fusion takes effect with tensor_model_parallel_size 1 alone, and it is {tp}",
        )
    asked = spec_and_layout(configuration, model) if model is not None else None
    exports = asked is None or can_export(*asked)
    if is_complete(configuration) and exports and not flag(configuration, "save_hf_model"):
        key = "save_hf_model"
        anchor = next(
            (name for name in ("output_dir", "model_name_or_path") if name in configuration.source.data), None
        )
        yield found(
            configuration,
            "mca-no-hf-model",
            "note",
            key if key in configuration.source.data else None,
            "checkpoints are Megatron's, one part for each rank: vLLM and Transformers cannot load them",
            remedy="set save_hf_model: true, which writes Hugging Face weights too",
            edits=set_to(configuration, key, True, anchor) if anchor else (),
        )
