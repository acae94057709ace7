"""ms-swift's `megatron sft`: the job and the layout that its keys describe.

Defaults are those of `swift/megatron/arguments/megatron_args.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.adapters import DROPOUT
from topoplan.reading.values import NotPredictedError
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, Row, Write, by_key, flag, layout_of, nothing
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.megatron_keys import (
    CP,
    DEGREES,
    DISPATCHER,
    EP,
    ETP,
    MEMORY,
    PP,
    SP,
    SPLIT,
    TP,
    VPP,
    check_something_trained,
    dispatcher_assumption,
    targets,
    with_comment,
)
from topoplan.trainers.swift.arguments import accepted
from topoplan.trainers.swift.common import TASKS, labels_of, of_images
from topoplan.trainers.swift.reading import carried, rlhf_assumptions, stage_of, with_answers
from topoplan.trainers.swift.refusals import finetuning
from topoplan.units import shown

DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn",
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "gradient_accumulation_fusion": True,
    "attention_backend": "flash",
    "padding_free": True,
    "optimizer_offload_fraction": 1.0,
    "use_distributed_optimizer": True,
    "main_grads_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "freeze_vit": True,
    "freeze_aligner": True,
    "torch_dtype": "bfloat16",
    "num_train_epochs": 1,
    "target_modules": "all-linear",
    "lora_dropout": DROPOUT,
}
"""Defaults of `MegatronArguments` and `MegatronTunerMixin` in ms-swift. torch_dtype defaults to the checkpoint's, which
is bfloat16 for nearly all models."""


_OFF: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("target_regex", "modules_to_save"), ("",)),
    "lora_bias": ("none",),
}
"""What else may be trained with adapters, and the values that disable it."""

_ADAPTERS = ("adapters", "mcore_adapter", "ref_adapters", "mcore_ref_adapter")
"""Keys with which full fine-tuning does not happen, whatever tuner_type says (`MegatronArguments.__post_init__`)."""


def _cp_comm_type(reading: Reading, key: str) -> str:
    """Read cp_comm_type, by default megatron-core's p2p. Raises SpecError for types that are not predicted."""
    given = reading.keys.value(key)
    kinds = set(given) if isinstance(given, list) else {given or "p2p"}
    if len(kinds) > 1 or not kinds <= {"p2p", "a2a"}:
        reading.keys.fail(key, f"{key} {shown(given)} is not predicted", expected="expected p2p or a2a")
    return str(kinds.pop())


def _sums_in_fp32(reading: Reading, key: str) -> bool:
    """Whether gradients are summed in fp32: `MegatronArguments._map_dtype` uses main_grads_dtype in bf16.

    Raises SpecError for what Megatron refuses.
    """
    keys = reading.keys
    if keys.value("main_grads_dtype") == "bf16" and not keys.flag("use_precision_aware_optimizer"):
        expected = "expected use_precision_aware_optimizer with it"
        keys.fail("main_grads_dtype", "main_grads_dtype bf16 without use_precision_aware_optimizer", expected=expected)
    is_fp16 = keys.flag("fp16") or keys.value("torch_dtype") == "float16"
    return keys.flag(key) or (not is_fp16 and keys.value("main_grads_dtype") == "fp32")


def _attention_backend(reading: Reading, key: str) -> str:
    """Read attention_backend. Raises SpecError for one that is not predicted.

    ms-swift's default, flash-attn, keeps only one output when samples are laid end to end.
    """
    given, apart = str(reading.keys.value(key)), reading.keys.value("padding_free") is False
    kind = "flash" if given.startswith("flash") else given
    if kind not in ("flash", "fused", "unfused", "auto"):
        reading.keys.fail(key, f"{key} {shown(given)} is not predicted", expected="expected flash, fused or auto")
    return "auto" if kind == "flash" and not apart else kind


def _dtype(reading: Reading, key: str) -> str:
    return str(reading.keys.value(key) or "fp32")


def _low(key: str) -> Write:
    return lambda _, layout: None if (dtype := getattr(layout, key)) == "fp32" else dtype


def _accumulation(reading: Reading, key: str) -> int:
    micro_batch: int = reading.parts["micro_batch_size"]
    return max(1, reading.keys.degree(key) // (micro_batch * reading.replicas))


def _recomputes_modules(_: Spec, layout: Layout) -> list[str] | None:
    recompute = layout.recompute
    return list(recompute.modules) or ["core_attn"] if recompute.granularity == "selective" else None


def _why_granularity(_: Spec, layout: Layout) -> str:
    why = {"full": "needs both method and number of layers", "none": "the default recomputes core attention"}
    return why.get(layout.recompute.granularity, "")


ROWS = by_key(
    *DEGREES.values(),
    replace(
        DEGREES[VPP],
        write=lambda spec, layout: None if layout.pipeline_layout else DEGREES[VPP].value(spec, layout),
        show=DEGREES[VPP].value,
    ),
    with_comment(SPLIT, "uneven stages; also determines the number of virtual stages"),
    Row("micro_batch_size", "micro_batch_size"),
    Row(
        "global_batch_size",
        "gradient_accumulation_steps",
        _accumulation,
        lambda _, layout: f"micro batch * {layout.gradient_accumulation_steps} accumulations * dp {layout.dp}",
        lambda _, layout: layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        nothing,
    ),
    *MEMORY.values(),
    replace(
        MEMORY["recompute_granularity"],
        comment=_why_granularity,
        write=lambda _, layout: layout.recompute.granularity,
    ),
    replace(MEMORY["recompute_modules"], write=_recomputes_modules, show=MEMORY["recompute_modules"].value),
    Row(
        "accumulate_allreduce_grads_in_fp32",
        "grad_reduce_in_fp32",
        _sums_in_fp32,
        "by default, fp16 reduces gradients in fp16",
        lambda spec, layout: layout.grad_reduce_in_fp32 if spec.job.precision == "fp16" else None,
        nothing,
    ),
    Row(
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion",
        flag,
        lambda _, layout: "" if layout.cross_entropy_fusion else "on by default; the plan assumes off",
        show=nothing,
    ),
    Row(
        "cross_entropy_fusion_impl",
        "cross_entropy_fusion_impl",
        lambda reading, key: str(reading.keys.value(key)),
        write=lambda _, layout: layout.cross_entropy_fusion_impl if layout.cross_entropy_fusion else None,
        show=nothing,
    ),
    Row(
        "gradient_accumulation_fusion",
        "gradient_accumulation_fusion",
        flag,
        "on by default if apex is installed; the plan assumes off",
        lambda _, layout: None if layout.gradient_accumulation_fusion else False,
        nothing,
    ),
    Row(
        "use_precision_aware_optimizer",
        "precision_aware_optimizer",
        flag,
        lambda _, layout: (
            "required by offload" if layout.optimizer_offload_fraction > 0 else "Transformer Engine's Adam"
        ),
        # Megatron-LM training/arguments.py asserts it, which ms-swift bypasses.
        lambda _, layout: layout.precision_aware_optimizer or layout.optimizer_offload_fraction > 0 or None,
        nothing,
    ),
    *(
        Row(key, key, _dtype, "for Transformer Engine's Adam; fp32 by default", _low(key), nothing)
        for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Row(
        "main_grads_dtype",
        comment="gradients are accumulated in bf16; needs the precision-aware optimizer",
        write=lambda spec, layout: "bf16" if spec.job.precision != "fp16" and not layout.grad_reduce_in_fp32 else None,
        show=nothing,
    ),
    Row(
        "fp8_param_gather",
        "fp8_param",
        lambda reading, key: reading.keys.value("fp8_format") is not None and reading.keys.flag(key),
        show=nothing,
    ),
    Row(
        "attention_backend",
        "attention_backend",
        _attention_backend,
        "cuDNN's kernel; the default is flash-attn",
        lambda _, layout: "fused" if layout.attention_backend == "fused" else None,
        nothing,
    ),
    Row(
        "tp_comm_overlap",
        "tp_comm_overlap",
        flag,
        "tensor-parallel collectives inside the GEMMs; Transformer Engine starts them over MPI, gloo or NCCL",
        lambda _, layout: layout.tp_comm_overlap or None,
        nothing,
    ),
    Row(
        "cp_comm_type",
        "cp_comm_type",
        _cp_comm_type,
        "all-to-all instead of a ring; with packed samples it needs Transformer Engine 2.10",
        lambda _, layout: "a2a" if layout.cp_comm_type == "a2a" else None,
        nothing,
    ),
    Row(
        DISPATCHER,
        "moe_token_dispatcher_type",
        lambda reading, key: ("flex" if reading.keys.text(key) == "flex" else "alltoall") if reading.is_moe else None,
        show=nothing,
    ),
)
DTYPE_KEYS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Keys for the dtypes of gradients and optimizer states."""
LAYOUT_KEYS = (TP, SP, PP, VPP, SPLIT, CP, "cp_comm_type", EP, ETP, "micro_batch_size", "global_batch_size")
"""Keys in the order of their section of train.yaml."""


def _layout(reading: Reading) -> Layout:
    refuse(reading.keys, {"use_megatron_fsdp": (False,), "task_type": TASKS})
    return layout_of(ROWS, reading, backend="megatron")


def _assumptions(reading: Reading, layout: Layout, _: Job) -> Iterator[str]:
    yield dispatcher_assumption(reading.keys, layout)
    yield from rlhf_assumptions(reading)


def _job(reading: Reading, _: Layout, seq_len: int) -> Job:
    """Read the job; the command determines pt, sft or rlhf. Raises SpecError for what is not predicted."""
    keys, model = reading.keys, reading.model
    kind_key = "tuner_type" if keys.given("tuner_type") is not None else "train_type"
    method = keys.given(kind_key) or "full"
    if method not in ("full", "lora"):
        keys.fail(kind_key, f"{kind_key} {shown(method)} is not predicted yet", expected="expected full or lora")
    refuse(keys, _OFF if method == "lora" else dict.fromkeys(_ADAPTERS, ("",)))
    if (optimizer := keys.given("optimizer")) not in (None, "adam"):
        keys.fail("optimizer", f"optimizer {shown(optimizer)} is not predicted", expected="expected adam")
    of_stage = stage_of(reading)
    dtype = "float16" if keys.flag("fp16") else keys.value("torch_dtype")
    if dtype not in ("bfloat16", "float16"):
        keys.fail(
            "torch_dtype", f"torch_dtype {shown(dtype)} is not predicted", expected="expected bfloat16 or float16"
        )
    precision = "fp16" if dtype == "float16" else "bf16"
    if keys.value("fp8_format") is not None:
        precision = "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"
    job = Job(
        seq_len=seq_len,
        global_batch_size=keys.degree("global_batch_size"),
        precision=precision,
        finetuning=str(method),
        packing=keys.flag("packing"),
        trainer={"padding_free": True} if of_stage["stage"] == "dpo" and keys.flag("packing") else {},
        mtp_num_layers=keys.count("mtp_num_layers") or 0,
        lora_rank=keys.count("lora_rank"),
        lora_dropout=keys.fraction("lora_dropout"),
        lora_target=(targets(keys, "target_modules") if method == "lora" else ()) or ("all",),
        num_labels=labels_of(keys),
        **of_stage,
        **of_images(reading),
        pin={
            "backend": "megatron",
            **({"moe_token_dispatcher_type": "alltoall"} if facts_of(model).is_moe else {}),
            "cross_entropy_fusion": keys.flag("cross_entropy_loss_fusion"),
            "cross_entropy_fusion_impl": str(keys.value("cross_entropy_fusion_impl")),
        },
    )
    check_something_trained(keys, "freeze_llm", job)
    for refusal in finetuning(job, model):
        where, expected = keys.place(kind_key), refusal.expected
        raise NotPredictedError(kind_key, refusal.what, where=where, expected=expected, remedy=refusal.remedy)
    return job


CODEC = Codec(
    reads="swift-megatron",
    rows=ROWS,
    defaults=lambda: DEFAULTS,
    length="max_length",
    view=with_answers,
    layout=_layout,
    job=_job,
    carries=partial(carried, rows=ROWS),
    takes=partial(accepted, command="megatron sft"),
    tells_faults=True,  # for LLaMA-Factory, they are reported even without a cluster
    assumptions=_assumptions,
)
