"""train.yaml for `megatron sft` (and `megatron pt`) of ms-swift: Megatron-core through mcore_bridge.

Source: ms-swift's swift/megatron/arguments/megatron_args.py; weights are read from Hugging Face's files and written to
them (mcore_bridge), so that nothing has to be converted.
"""

from __future__ import annotations

from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.adapters import DROPOUT
from topoplan.operators.dispatch import dispatcher_of
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import LatentAttention, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.mca_facts import training_steps
from topoplan.trainers.llamafactory.mca_refusals import FP8_RECIPES
from topoplan.trainers.swift.arguments import user_arguments
from topoplan.trainers.swift.common import (
    adapter_entries,
    data_section,
    freeze_entries,
    head,
    model_entries,
    output_section,
)
from topoplan.trainers.swift.refusals import check_megatron
from topoplan.trainers.swift.support import swift_warnings
from topoplan.trainers.train_yaml import trainer_files
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import DDP_TIMEOUT_S, WARMUP_FRACTION
from topoplan.trainers.yaml_text import Entry, Section

_DECIDED = (
    *("tuner_type", "torch_dtype", "bf16", "fp16", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format"),
    *("accumulate_allreduce_grads_in_fp32", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "mtp_num_layers", "freeze_vit", "freeze_aligner", "freeze_llm", "max_length", "packing"),
    *("max_pixels", "num_train_epochs", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "micro_batch_size"),
    *("global_batch_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_megatron_fsdp"),
    *("use_distributed_optimizer", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"),
    *("overlap_grad_reduce", "overlap_param_gather", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    *("moe_token_dispatcher_type", "moe_enable_deepep", "optimizer", "add_version", "bridge_backend"),
    *("lora_rank", "target_modules", "target_regex", "modules_to_save", "lora_bias", "lora_dtype"),
)
"""Arguments that memory and time were predicted with, or that the scripts go by."""


def megatron_files(spec: Spec, plan: Plan) -> TrainerFiles:
    """train.yaml of a plan. Raises what `check_megatron` raises."""
    check_megatron(spec, plan.layout)
    sections = _sections(spec, plan.layout)
    ours = {entry.key: entry.value for section in sections for entry in section.entries}
    user = user_arguments(spec, "megatron sft", {name: ours.get(name) for name in _DECIDED})
    return trainer_files(
        spec,
        plan,
        sections,
        user=user,
        head=head(spec, plan, f"megatron {spec.job.stage}"),
        warnings=[*plan.warnings, *swift_warnings(spec, plan.layout)],
    )


def _sections(spec: Spec, layout: Layout) -> list[Section]:
    iterations = spec.job.trainer.get("train_iters")
    steps = training_steps(spec.job, iterations if isinstance(iterations, int) else None)
    saved = "adapters as PEFT has them" if spec.job.finetuning == "lora" else "Hugging Face weights"
    return [
        _model_section(spec, layout),
        data_section(spec, unpacked="those of a micro batch lie end to end (padding_free)"),
        _training_section(spec, steps),
        _layout_section(spec, layout),
        _memory_section(layout),
        _speed_section(spec, layout),
        output_section(
            steps,
            Entry(key="save_safetensors", value=True, comment=f"{saved} beside Megatron's, to serve them"),
            Entry(key="no_save_optim", value=False, comment="to go on from a checkpoint"),
        ),
    ]


def _model_section(spec: Spec, layout: Layout) -> Section:
    job = spec.job
    entries = [
        *model_entries(spec),
        Entry(key="tuner_type", value=job.finetuning, comment="train_type until ms-swift 3"),
        *(_lora_entries(job) if job.finetuning == "lora" else ()),
        *_precision_entries(spec, layout),
    ]
    if job.mtp_num_layers:
        comment = "multi-token prediction is trained too"
        entries.append(Entry(key="mtp_num_layers", value=job.mtp_num_layers, comment=comment))
    return Section(title="Model and method", entries=(*entries, *freeze_entries(spec)))


def _lora_entries(job: Job) -> list[Entry]:
    """Adapters, and that checkpoints have them alone."""
    return [
        *adapter_entries(job),
        Entry(key="lora_dropout", value=DROPOUT, comment="ms-swift's default; 0 takes less memory"),
        Entry(key="merge_lora", value=False, comment="else every checkpoint has the whole model too, merged"),
    ]


def _precision_entries(spec: Spec, layout: Layout) -> list[Entry]:
    precision, architecture = spec.job.precision, spec.cluster.gpu.architecture
    if precision == "fp16":
        return [
            Entry(key="torch_dtype", value="float16"),
            Entry(
                key="accumulate_allreduce_grads_in_fp32",
                value=layout.grad_reduce_in_fp32,
                comment="unset, fp16 sums gradients in fp16",
            ),
        ]
    entries = [Entry(key="torch_dtype", value="bfloat16", comment="gradients are then summed in fp32")]
    if precision == "nvfp4":
        entries += [Entry(key="fp4_format", value="e2m1"), Entry(key="fp4_recipe", value="nvfp4")]
    elif precision != "bf16":
        kept = "fp8 alone" if layout.fp8_param else "bf16"
        recipe = FP8_RECIPES[architecture]
        entries += [
            Entry(key="fp8_format", value="e4m3", comment=f"matrix multiplications only; weights stay in {kept}"),
            Entry(key="fp8_recipe", value=recipe, comment=f"scales by block, as {architecture.capitalize()} has them"),
            Entry(key="fp8_param_gather", value=layout.fp8_param),
        ]
    return entries


def _training_section(spec: Spec, steps: int | None) -> Section:
    job = spec.job
    whole = job.epochs == int(job.epochs)
    length = (
        Entry(key="num_train_epochs", value=int(job.epochs))
        if whole or steps is None
        else Entry(key="train_iters", value=steps, comment=f"{job.epochs:g} epochs: num_train_epochs takes whole ones")
    )
    return Section(
        title="Training",
        entries=(
            length,
            Entry(key="lr", value=float(job.learning_rate)),
            Entry(key="lr_decay_style", value="cosine"),
            Entry(key="lr_warmup_fraction", value=WARMUP_FRACTION, comment="of all steps"),
            Entry(key="ddp_timeout", value=DDP_TIMEOUT_S, comment="s: tokenising must end in time, and a hang does"),
        ),
    )


def _layout_section(spec: Spec, layout: Layout) -> Section:
    entries = [
        Entry(key="tensor_model_parallel_size", value=layout.tp),
        Entry(
            key="sequence_parallel",
            value=layout.sequence_parallel,
            comment="norms split along the sequence, inside a TP group" if layout.tp > 1 else "needs TP > 1",
        ),
        Entry(key="pipeline_model_parallel_size", value=layout.pp),
    ]
    if layout.pipeline_layout is not None:
        comment = "uneven stages; virtual stages are counted from it"
        entries.append(Entry(key="pipeline_model_parallel_layout", value=layout.pipeline_layout, comment=comment))
    elif layout.vpp > 1:
        entries.append(
            Entry(key="virtual_pipeline_model_parallel_size", value=layout.vpp, comment="model chunks a GPU")
        )
    entries.append(Entry(key="context_parallel_size", value=layout.cp))
    if facts_of(spec.model).is_moe:
        entries += [
            Entry(key="expert_model_parallel_size", value=layout.ep, comment="carved out of the data-parallel ranks"),
            Entry(key="expert_tensor_parallel_size", value=layout.etp, comment="unset it is 1, not TP"),
        ]
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    entries += [
        Entry(key="micro_batch_size", value=layout.micro_batch_size),
        Entry(
            key="global_batch_size",
            value=batch,
            comment=f"micro batch * {layout.gradient_accumulation_steps} accumulations * dp {layout.dp}",
        ),
    ]
    title = f"Layout: dp {layout.dp} = {layout.world_size} GPUs / (tp {layout.tp} * pp {layout.pp} * cp {layout.cp})"
    return Section(title=title, entries=tuple(entries))


def _memory_section(layout: Layout) -> Section:
    recompute = layout.recompute
    entries = [
        Entry(
            key="use_distributed_optimizer",
            value=layout.distributed_optimizer,
            comment="optimizer state split over the ranks of dp and cp",
        )
    ]
    if recompute.granularity == "none":
        comment = "unset, core attention would be recomputed"
        entries.append(Entry(key="recompute_granularity", value="none", comment=comment))
    elif recompute.granularity == "selective":
        modules = list(recompute.modules) or ["core_attn"]
        entries += [
            Entry(key="recompute_granularity", value="selective"),
            Entry(key="recompute_modules", value=modules, comment="recomputed in backward instead of kept"),
        ]
    else:
        entries += [
            Entry(key="recompute_granularity", value="full", comment="needs method and number of layers with it"),
            Entry(key="recompute_method", value=recompute.method or "uniform"),
            Entry(key="recompute_num_layers", value=recompute.num_layers or 1),
        ]
    if layout.optimizer_offload_fraction > 0:
        entries += [
            Entry(key="optimizer_cpu_offload", value=True),
            Entry(
                key="optimizer_offload_fraction",
                value=float(layout.optimizer_offload_fraction),
                comment="of the optimizer state, in host memory",
            ),
        ]
    if layout.precision_aware_optimizer or layout.optimizer_offload_fraction > 0:
        # Megatron-LM training/arguments.py asserts it, which ms-swift does not go through.
        comment = (
            "the path that offload runs on" if layout.optimizer_offload_fraction > 0 else "Transformer Engine's Adam"
        )
        entries.append(Entry(key="use_precision_aware_optimizer", value=True, comment=comment))
    return Section(title="Memory", entries=tuple(entries))


def _speed_section(spec: Spec, layout: Layout) -> Section:
    entries = [
        Entry(
            key="overlap_grad_reduce", value=layout.overlap_grad_reduce, comment="gradients are sent during backward"
        ),
        Entry(
            key="overlap_param_gather", value=layout.overlap_param_gather, comment="parameters arrive during forward"
        ),
        Entry(
            key="cross_entropy_loss_fusion",
            value=layout.cross_entropy_fusion,
            comment="" if layout.cross_entropy_fusion else "on by default; planned without",
        ),
    ]
    if layout.cross_entropy_fusion:
        entries.append(Entry(key="cross_entropy_fusion_impl", value=layout.cross_entropy_fusion_impl))
    entries.append(_rope_fusion(spec.model))
    if facts_of(spec.model).is_moe:
        entries += _dispatcher_entries(spec, spec.job, layout)
    return Section(title="Speed", entries=tuple(entries))


def _rope_fusion(model: Model) -> Entry:
    """docs/Megatron-SWIFT: RoPE fusion is not supported with MLA, mrope and others."""
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    if latent or model.vision is not None:
        comment = "not for latent attention" if latent else "not for positions in three dimensions"
        return Entry(key="apply_rope_fusion", value=False, comment=comment)
    return Entry(key="apply_rope_fusion", value=True, comment="rotary embedding in one kernel; off by default")


def _dispatcher_entries(spec: Spec, job: Job, layout: Layout) -> list[Entry]:
    """How tokens get to their experts, as it was predicted."""
    dispatcher: Any = dispatcher_of(case_of(spec, layout.backend), layout)
    entries = [Entry(key="moe_token_dispatcher_type", value=dispatcher)]
    if dispatcher == "flex":
        entries.append(Entry(key="moe_enable_deepep", value=True, comment="what the flex dispatcher sends with"))
    return [*entries, Entry(key="moe_grouped_gemm", value=True, comment="one launch for all experts of a GPU")]
