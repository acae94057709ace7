"""train.yaml: the plan in the keys of LLaMA-Factory's Megatron (MCA) trainer, each non-obvious line with its reason.

Sources: LLaMA-Factory hparams/ and train/mca/workflow.py, mcore_adapter training_args.py and models/model_config.py,
at the versions named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.specs.facts import facts_of
from topoplan.specs.model import LatentAttention, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.llamafactory.data import PADDED, data_section
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.mca_facts import is_gated, model_directory, training_steps
from topoplan.trainers.llamafactory.mca_refusals import FP8_RECIPES, check_layout
from topoplan.trainers.llamafactory.mca_user_keys import evaluates, user_keys
from topoplan.trainers.llamafactory.mca_warnings import trainer_warnings
from topoplan.trainers.train_yaml import OUTPUT_TITLE, trainer_files
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import DDP_TIMEOUT_S, save_steps, warmup_steps
from topoplan.trainers.yaml_text import Entry, Section

FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""


def trainer_file(spec: Spec, plan: Plan) -> TrainerFiles:
    """train.yaml of a plan; an error names what the trainer cannot do, or which of the user's keys contradicts it."""
    check_layout(spec, plan.layout)
    warnings = [*plan.warnings, *trainer_warnings(spec, plan.layout)]
    user = user_keys(spec, plan.layout, warnings)
    versions = trainer_versions()
    oldest, newest = versions["transformers"]
    head = (
        f"{spec.model.name} on {spec.cluster.name}: plan {plan.id}",
        f"For LLaMA-Factory {versions['llamafactory']} with USE_MCA=1, transformers {oldest} to {newest}.",
        "Relative paths start at the directory in which the node scripts start the trainer.",
    )
    return trainer_files(spec, plan, _sections(spec, plan.layout, user), user=user, head=head, warnings=warnings)


# The file ------------------------------------------------------------------------------------------------------------


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    return [
        _model_section(spec),
        data_section(spec, "read in order, never shuffled by this trainer", padded=_padding(spec.model)),
        _training_section(spec, layout, user),
        _layout_section(spec, layout, user),
        _memory_section(spec, layout),
        _speed_section(spec, layout, user),
        _output_section(spec, layout, user),
    ]


def _model_section(spec: Spec) -> Section:
    job, model = spec.job, spec.model
    entries = [
        Entry(
            key="model_name_or_path",
            value=model_directory(model),
            comment="a directory on every node: the adapter reads no hub ids",
        ),
        Entry(key="stage", value=job.stage),
        Entry(key="do_train", value=True),
        Entry(key="finetuning_type", value="full", comment="the only one that the Megatron trainer implements"),
    ]
    if job.mtp_num_layers:
        entries.append(
            Entry(
                key="mtp_num_layers",
                value=job.mtp_num_layers,
                comment="multi-token prediction is trained too; the adapter's default drops it",
            )
        )
    if model.vision is not None and model.model_type in FREEZABLE_MODEL_TYPES:
        entries += [
            Entry(key="freeze_vision_tower", value=job.freeze_vision_tower),
            Entry(key="freeze_multi_modal_projector", value=job.freeze_multi_modal_projector),
            Entry(key="freeze_language_model", value=job.freeze_language_model),
        ]
    return Section(title="Model and method", entries=tuple(entries))


def _padding(model: Model) -> str:
    return "padded; with expert parallelism always to cutoff_len" if facts_of(model).is_moe else PADDED


def _training_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    job = spec.job
    steps = training_steps(job, user.get("max_steps"))
    if steps is None:
        warmup, why = warmup_steps(steps), "a guess, to be fewer than the steps"
    else:
        # Megatron's scheduler asserts that fewer than all steps warm up (core/optimizer_param_scheduler.py).
        warmup, why = min(warmup_steps(steps), steps - 1), f"3% of {steps} steps"
    entries = [
        Entry(key="num_train_epochs", value=float(job.epochs)),
        Entry(key="learning_rate", value=float(job.learning_rate)),
        Entry(key="lr_scheduler_type", value="cosine"),
        Entry(key="warmup_steps", value=warmup, comment=f"{why}; a whole number, for transformers 4 and 5"),
        *_precision_entries(spec, layout),
        Entry(
            key="ddp_timeout",
            value=DDP_TIMEOUT_S,
            comment="s: tokenising must end in time, and a hang does",
        ),
    ]
    return Section(title="Training", entries=tuple(entries))


def _precision_entries(spec: Spec, layout: Layout) -> list[Entry]:
    precision, architecture = spec.job.precision, spec.cluster.gpu.architecture
    if precision == "fp16":
        comment = "unset, fp16 sums gradients in fp16"
        return [
            Entry(key="fp16", value=True),
            Entry(key="accumulate_allreduce_grads_in_fp32", value=layout.grad_reduce_in_fp32, comment=comment),
        ]
    bf16 = Entry(key="bf16", value=True, comment="gradients are then summed in fp32")
    if precision == "bf16":
        return [bf16]
    recipe = FP8_RECIPES.get(architecture)
    if recipe is None or precision not in ("fp8", recipe):
        raise SpecError(
            f"the Megatron adapter has no {precision} recipe for {spec.cluster.gpu.name}",
            where="job.precision",
            expected="expected bf16, fp8 on Hopper (blockwise), or fp8 or mxfp8 on Blackwell",
        )
    kept = "fp8 alone" if layout.fp8_param else "bf16"
    return [
        bf16,
        Entry(key="fp8", value="e4m3", comment=f"matrix multiplications only; weights stay in {kept}"),
        *([Entry(key="fp8_param", value=True)] if layout.fp8_param else []),
        Entry(key="fp8_recipe", value=recipe, comment=f"what the adapter tests on {architecture.capitalize()}"),
    ]


def _layout_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    product = layout.tp * layout.pp * layout.cp
    pairs = spec.job.sequences_per_sample > 1
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    entries = [
        Entry(key="tensor_model_parallel_size", value=layout.tp),
        Entry(key="pipeline_model_parallel_size", value=layout.pp),
    ]
    if layout.vpp > 1:
        entries.append(
            Entry(
                key="virtual_pipeline_model_parallel_size",
                value=layout.vpp,
                comment="model chunks a GPU",
            )
        )
    if layout.pipeline_layout is not None:
        entries.append(
            Entry(
                key="pipeline_model_parallel_layout",
                value=layout.pipeline_layout,
                comment="uneven stages; the adapter takes them in this form only",
            )
        )
    entries.append(Entry(key="context_parallel_size", value=layout.cp))
    if facts_of(spec.model).is_moe:
        entries.append(
            Entry(key="expert_model_parallel_size", value=layout.ep, comment="carved out of the data-parallel ranks")
        )
        if layout.tp > 1 or layout.etp > 1:
            comment = "unset it follows TP"
            if layout.etp != layout.tp:
                comment += "; checkpoints are torch_dist"
            entries.append(Entry(key="expert_tensor_parallel_size", value=layout.etp, comment=comment))
    entries += [
        Entry(
            key="sequence_parallel",
            value=layout.sequence_parallel,
            comment="norms split along the sequence, inside a TP group" if layout.tp > 1 else "needs TP > 1",
        ),
        Entry(
            key="per_device_train_batch_size",
            value=layout.micro_batch_size,
            comment="pairs; Megatron's micro batch has twice as many sequences" if pairs else "Megatron's micro batch",
        ),
        Entry(
            key="gradient_accumulation_steps",
            value=layout.gradient_accumulation_steps,
            comment=f"micro batch * this * dp {layout.dp} = {batch} {'pairs' if pairs else 'sequences'} a step",
        ),
    ]
    if evaluates(user):
        entries.append(
            Entry(
                key="per_device_eval_batch_size",
                value=layout.micro_batch_size,
                comment="as planned for training; unset it would be 8",
            )
        )
    title = f"Layout: dp {layout.dp} = {layout.world_size} GPUs / (tp {layout.tp} * pp {layout.pp} * cp {layout.cp})"
    return Section(title=title if product > 1 else f"Layout: dp {layout.dp}, one GPU a replica", entries=tuple(entries))


def _memory_section(spec: Spec, layout: Layout) -> Section:
    recompute = layout.recompute
    entries = [
        Entry(
            key="use_distributed_optimizer",
            value=layout.distributed_optimizer,
            comment="optimizer state split over the ranks of dp and cp",
        )
    ]
    notes = []
    if recompute.granularity == "none":
        notes.append("recompute_granularity: left out, nothing is recomputed")
    elif recompute.granularity == "selective":
        modules = ",".join(recompute.modules) or "core_attn"
        entries += [
            Entry(key="recompute_granularity", value="selective"),
            # One string without spaces: the adapter splits it at commas and nothing else.
            Entry(key="recompute_modules", value=modules, comment="recomputed in backward instead of kept"),
        ]
    else:
        block = "; the parser's own list says recompute, Megatron says block" if recompute.method == "block" else ""
        entries += [
            Entry(key="recompute_granularity", value="full", comment="only the input of each layer is kept"),
            Entry(
                key="recompute_method",
                value=recompute.method or "uniform",
                comment=f"full needs method and number together{block}",
            ),
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
    return Section(title="Memory", entries=tuple(entries), notes=tuple(notes))


def _speed_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    model = spec.model
    local = spec.cluster.gpu.architecture == "volta"
    entries = [
        Entry(
            key="overlap_grad_reduce", value=layout.overlap_grad_reduce, comment="gradients are sent during backward"
        ),
        Entry(
            key="overlap_param_gather",
            value=layout.overlap_param_gather,
            comment="parameters arrive during forward; needs both above"
            if layout.overlap_param_gather or user.get("save_strategy") != "no"
            else "the model at the end would be in part that of the step before",
        ),
    ]
    if local:
        entries.append(
            Entry(key="transformer_impl", value="local", comment="Transformer Engine has no kernels for Volta")
        )
    if is_gated(model):
        entries.append(Entry(key="bias_activation_fusion", value=True, comment="SwiGLU in one kernel"))
    entries.append(_rope_fusion(model, layout, local=local))
    if layout.cross_entropy_fusion:
        entries.append(Entry(key="cross_entropy_loss_fusion", value=True, comment="takes effect with TP 1 only"))
    if facts_of(model).is_moe:
        entries += [
            Entry(
                key="moe_token_dispatcher_type",
                value="alltoall",
                comment="the default sends every token everywhere",
            ),
            Entry(key="moe_grouped_gemm", value=not local, comment="one launch for all experts of a GPU"),
        ]
    elif user.get("variable_seq_lengths"):
        entries.append(
            Entry(
                key="moe_token_dispatcher_type",
                value="alltoall",
                comment="variable_seq_lengths is refused with the default, in dense models too",
            )
        )
    return Section(title="Speed", entries=tuple(entries))


def _rope_fusion(model: Model, layout: Layout, *, local: bool) -> Entry:
    """Fused rotary embeddings, where Megatron-core and Transformer Engine have them for this model."""
    key = "apply_rope_fusion"
    if local:
        return Entry(key=key, value=False, comment="the kernel is Transformer Engine's")
    if any(isinstance(layer.attention, LatentAttention) for layer in model.layers):
        # MLATransformerConfig.__post_init__: "apply_rope_fusion for MLA only works with YARN RoPE"; experimental there.
        return Entry(key=key, value=False, comment="latent attention has it as an experiment, and for YaRN only")
    if model.vision is not None and layout.micro_batch_size > 1:
        # rope_utils.apply_rotary_pos_emb falls back with a warning at every call, "an error in v0.16".
        return Entry(key=key, value=False, comment="the kernel has no mRoPE for micro batches above 1")
    return Entry(key=key, value=True, comment="rotary embedding in one kernel")


def _output_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    steps = training_steps(spec.job, user.get("max_steps"))
    exports = can_export(spec, layout)
    entries = [
        Entry(key="save_strategy", value="steps"),
        Entry(key="save_steps", value=save_steps(steps)),
        Entry(
            key="save_total_limit",
            value=2,
            comment="older ones of this run are removed",
        ),
        Entry(
            key="save_hf_model",
            value=exports,
            comment="Hugging Face weights too, for vLLM and the like"
            if exports
            else "with this layout the export fails; README.md has another way",
        ),
        *_evaluation_entries(user, save_steps(steps)),
        Entry(key="logging_steps", value=1),
        Entry(key="report_to", value="none", comment="tensorboard works; wandb would be dropped unsaid"),
    ]
    return Section(title=OUTPUT_TITLE, entries=tuple(entries))


def _evaluation_entries(user: Mapping[str, Any], save_steps: int) -> list[Entry]:
    if user.get("eval_strategy") != "steps":
        return []
    return [Entry(key="eval_steps", value=save_steps, comment="unset it follows logging_steps: after every step")]
