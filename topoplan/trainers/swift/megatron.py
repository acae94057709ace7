"""train.yaml for `megatron sft` (and `megatron pt`) of ms-swift: Megatron-core through mcore_bridge.

Source: ms-swift's swift/megatron/arguments/megatron_args.py. mcore_bridge reads and writes weights in Hugging Face's
format, so nothing has to be converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.adapters import DROPOUT
from topoplan.operators.dispatch import dispatcher_of
from topoplan.specs.case import case_with
from topoplan.specs.facts import facts_of
from topoplan.specs.model import LatentAttention, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import entries
from topoplan.trainers.megatron_keys import DISPATCHER, MEMORY_KEYS, title
from topoplan.trainers.refusal import FP8_RECIPES
from topoplan.trainers.steps import megatron_steps
from topoplan.trainers.swift.arguments import DECIDED, user_arguments
from topoplan.trainers.swift.common import (
    adapter_entries,
    data_section,
    freeze_entries,
    model_entries,
    output_section,
    swift_head,
    warmup_entries,
)
from topoplan.trainers.swift.counterparts import in_terms_of
from topoplan.trainers.swift.megatron_job import DTYPE_KEYS, LAYOUT_KEYS, ROWS
from topoplan.trainers.swift.refusals import swift_warnings
from topoplan.trainers.train_yaml import DDP_TIMEOUT, trainer_files, values_of
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.traits import FINE_TUNING, MCA
from topoplan.trainers.yaml_text import Entry, Section

_SPEED_KEYS = (
    *("overlap_grad_reduce", "overlap_param_gather", "attention_backend", "tp_comm_overlap"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
)


TRAITS = {"megatron": FINE_TUNING, "mca": MCA}
"""Backend -> how `megatron sft` computes."""


def megatron_files(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write a layout's train.yaml."""
    sections = _sections(spec, layout)
    ours = values_of(sections)
    user = user_arguments(spec, "megatron sft", {name: ours.get(name) for name in (*ROWS, *DECIDED["megatron sft"])})
    return trainer_files(
        spec,
        layout,
        sections,
        user=user,
        head=swift_head(spec, layout, f"megatron {spec.job.stage}"),
        warnings=[*swift_warnings(spec, layout)],
    )


def _sections(spec: Spec, layout: Layout) -> list[Section]:
    user = in_terms_of("megatron sft", spec.job.trainer)
    iterations = user.get("train_iters")
    steps = megatron_steps(spec.job, iterations if isinstance(iterations, int) else None)
    saved = "adapters in PEFT's format" if spec.job.finetuning == "lora" else "Hugging Face weights"
    memory_keys = (*MEMORY_KEYS, "gradient_accumulation_fusion", "use_precision_aware_optimizer", *DTYPE_KEYS)
    memory = entries(ROWS, memory_keys, spec, layout)
    return [
        _model_section(spec, layout),
        data_section(spec, unpacked="the samples of a micro batch are concatenated (padding_free)"),
        _training_section(spec, steps, user),
        Section(title=title(layout), entries=tuple(entries(ROWS, LAYOUT_KEYS, spec, layout))),
        Section(title="Memory", entries=tuple(memory)),
        _speed_section(spec, layout),
        output_section(
            steps,
            Entry("save_safetensors", True, f"also saves {saved}, for inference"),
            Entry("no_save_optim", False, "needed to resume from a checkpoint"),
        ),
    ]


def _model_section(spec: Spec, layout: Layout) -> Section:
    job = spec.job
    lines = [*model_entries(spec), Entry("tuner_type", job.finetuning, "train_type in ms-swift 3 and earlier")]
    if job.finetuning == "lora":
        lines += adapter_entries(job, DROPOUT)
        lines.append(Entry("merge_lora", False, "otherwise every checkpoint also contains the whole merged model"))
    lines += _precision_entries(spec, layout)
    if job.mtp_num_layers:
        lines.append(Entry("mtp_num_layers", job.mtp_num_layers, "trains multi-token prediction too"))
    return Section(title="Model and method", entries=(*lines, *freeze_entries(spec)))


def _precision_entries(spec: Spec, layout: Layout) -> list[Entry]:
    precision, architecture = spec.job.precision, spec.cluster.gpu.architecture
    if precision == "fp16":
        accumulate = entries(ROWS, ["accumulate_allreduce_grads_in_fp32"], spec, layout)
        return [Entry("torch_dtype", "float16"), *accumulate]
    lines = [Entry("torch_dtype", "bfloat16", "gradients are accumulated and reduced in fp32")]
    if precision == "nvfp4":
        lines += [Entry("fp4_format", "e2m1"), Entry("fp4_recipe", "nvfp4")]
    elif precision != "bf16":
        kept, recipe = "fp8 only" if layout.fp8_param else "bf16", FP8_RECIPES[architecture]
        lines += [
            Entry("fp8_format", "e4m3", f"matrix multiplications only; weights stay in {kept}"),
            Entry("fp8_recipe", recipe, f"scaling of {architecture.capitalize()}"),
            *entries(ROWS, ["fp8_param_gather"], spec, layout),
        ]
    return lines


def _training_section(spec: Spec, steps: int | None, user: Mapping[str, Any]) -> Section:
    job = spec.job
    if job.epochs == int(job.epochs) or steps is None:
        length = Entry("num_train_epochs", int(job.epochs))
    else:
        length = Entry("train_iters", steps, f"{job.epochs:g} epochs; num_train_epochs must be an integer")
    lines = (
        length,
        Entry("lr", float(job.learning_rate)),
        Entry("lr_decay_style", "cosine"),
        *warmup_entries("lr_warmup_fraction", user),
        DDP_TIMEOUT,
    )
    return Section(title="Training", entries=lines)


def _speed_section(spec: Spec, layout: Layout) -> Section:
    lines = [*entries(ROWS, _SPEED_KEYS, spec, layout), Entry("apply_rope_fusion", *_rope_fusion(spec.model))]
    if facts_of(spec.model).is_moe:
        # The token dispatcher that was predicted.
        dispatcher: Any = dispatcher_of(case_with(spec, TRAITS[layout.backend]), layout)
        lines.append(Entry(DISPATCHER, dispatcher))
        if dispatcher == "flex":
            lines.append(Entry("moe_enable_deepep", True, "the communication library of the flex dispatcher"))
        lines.append(Entry("moe_grouped_gemm", True, "one kernel for all experts of a GPU"))
    return Section(title="Speed", entries=tuple(lines))


def _rope_fusion(model: Model) -> tuple[bool, str]:
    """Whether RoPE fusion is supported, and why. docs/Megatron-SWIFT: not supported with MLA, mrope and others."""
    if any(isinstance(layer.attention, LatentAttention) for layer in model.layers):
        return False, "not supported for latent attention"
    if model.vision is not None:
        return False, "not supported for mRoPE"
    return True, "fused rotary embedding kernel; off by default"
