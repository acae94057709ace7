"""train.yaml for LLaMA-Factory's Megatron (MCA) trainer: the plan in its keys, each non-obvious line with its reason.

Sources: LLaMA-Factory hparams/ and train/mca/workflow.py, mcore_adapter training_args.py and models/model_config.py, at
the versions named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.model import LatentAttention, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import entries
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.mca_job import LAYOUT_KEYS, ROWS
from topoplan.trainers.llamafactory.mca_refusals import FREEZABLE_MODEL_TYPES, is_gated, trainer_warnings
from topoplan.trainers.llamafactory.sections import (
    PADDED,
    data_section,
    evaluation_entries,
    model_section,
    training_section,
    versions_line,
)
from topoplan.trainers.llamafactory.user_keys import evaluates, user_keys
from topoplan.trainers.megatron_keys import DISPATCHER, MEMORY_KEYS, title
from topoplan.trainers.refusal import FP8_RECIPES
from topoplan.trainers.steps import megatron_steps
from topoplan.trainers.train_yaml import head, output_section, trainer_files, values_of
from topoplan.trainers.trainer import TrainerFiles
from topoplan.trainers.usual import warmup_steps
from topoplan.trainers.yaml_text import Entry, Section


def trainer_file(spec: Spec, layout: Layout) -> TrainerFiles:
    """Write a layout's train.yaml. Raises an error for what the trainer cannot do and for contradicting user keys."""
    warnings = [*trainer_warnings(spec, layout)]
    user = user_keys(spec, layout, values_of(_sections(spec, layout, {})), warnings, "mca")
    what = f"LLaMA-Factory {trainer_versions()['llamafactory']} with USE_MCA=1, {versions_line()}"
    sections = _sections(spec, layout, user)
    return trainer_files(spec, layout, sections, user=user, head=head(spec, layout, what), warnings=warnings)


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    steps = megatron_steps(spec.job, user.get("max_steps"))
    is_moe = facts_of(spec.model).is_moe
    return [
        _model_section(spec),
        data_section(
            spec,
            "read in order; this trainer does not shuffle",
            padded="padded; with expert parallelism always to cutoff_len" if is_moe else PADDED,
        ),
        _training_section(spec, layout, steps),
        _layout_section(spec, layout, user),
        _memory_section(spec, layout),
        _speed_section(spec, layout, user),
        _output_section(spec, layout, steps, user),
    ]


def _model_section(spec: Spec) -> Section:
    method = [Entry("finetuning_type", "full", "the only method that the Megatron trainer implements")]
    if layers := spec.job.mtp_num_layers:
        why = "trains multi-token prediction too; the adapter's default drops it"
        method.append(Entry("mtp_num_layers", layers, why))
    where = "a directory on every node; the adapter cannot load hub ids"
    return model_section(spec, FREEZABLE_MODEL_TYPES, where, *method)


def _training_section(spec: Spec, layout: Layout, steps: int | None) -> Section:
    warmup, why = warmup_steps(steps), "a guess; must be fewer than all steps"
    if steps is not None:
        # Megatron's scheduler asserts that warm-up takes fewer than all steps (core/optimizer_param_scheduler.py).
        warmup, why = min(warmup, steps - 1), f"3% of {steps} steps"
    return training_section(spec, warmup, why, *_precision_entries(spec, layout))


def _precision_entries(spec: Spec, layout: Layout) -> list[Entry]:
    precision, architecture = spec.job.precision, spec.cluster.gpu.architecture
    if precision == "fp16":
        return [Entry("fp16", True), *entries(ROWS, ["accumulate_allreduce_grads_in_fp32"], spec, layout)]
    bf16 = Entry("bf16", True, "gradients are accumulated and reduced in fp32")
    if precision == "bf16":
        return [bf16]
    recipe = FP8_RECIPES.get(architecture)
    if recipe is None or precision not in ("fp8", recipe):
        raise SpecError(
            f"the Megatron adapter has no {precision} recipe for {spec.cluster.gpu.name}",
            where="job.precision",
            expected="expected bf16, fp8 on Hopper (blockwise), or fp8 or mxfp8 on Blackwell",
        )
    kept = "fp8 only" if layout.fp8_param else "bf16"
    why = f"the recipe that the adapter tests on {architecture.capitalize()}"
    return [
        bf16,
        Entry("fp8", "e4m3", f"matrix multiplications only; weights stay in {kept}"),
        *entries(ROWS, ["fp8_param"], spec, layout),
        Entry("fp8_recipe", recipe, why),
    ]


def _layout_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    lines = entries(ROWS, LAYOUT_KEYS, spec, layout)
    if evaluates(user):
        why = "as in training; the default is 8"
        lines.append(Entry("per_device_eval_batch_size", layout.micro_batch_size, why))
    alone = layout.tp * layout.pp * layout.cp == 1
    name = f"Layout: dp {layout.dp}, one GPU per replica" if alone else title(layout)
    return Section(title=name, entries=tuple(lines))


def _memory_section(spec: Spec, layout: Layout) -> Section:
    none = layout.recompute.granularity == "none"
    notes = ("recompute_granularity: not set, nothing is recomputed",) if none else ()
    return Section(title="Memory", entries=tuple(entries(ROWS, MEMORY_KEYS, spec, layout)), notes=notes)


def _speed_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    local = spec.cluster.gpu.architecture == "volta"
    lines = entries(ROWS, ("overlap_grad_reduce", "overlap_param_gather"), spec, layout)
    if local:
        lines.append(Entry("transformer_impl", "local", "Transformer Engine has no kernels for Volta"))
    if is_gated(spec.model):
        lines.append(Entry("bias_activation_fusion", True, "fused SwiGLU kernel"))
    lines.append(Entry("apply_rope_fusion", *_rope_fusion(spec.model, layout, local=local)))
    lines += entries(ROWS, ["cross_entropy_loss_fusion"], spec, layout)
    if facts_of(spec.model).is_moe:
        lines.append(Entry(DISPATCHER, "alltoall", "the default, allgather, sends every token to every rank"))
        lines.append(Entry("moe_grouped_gemm", not local, "one kernel for all experts of a GPU"))
    elif user.get("variable_seq_lengths"):
        why = "the default is refused with variable_seq_lengths, even for dense models"
        lines.append(Entry(DISPATCHER, "alltoall", why))
    return Section(title="Speed", entries=tuple(lines))


def _rope_fusion(model: Model, layout: Layout, *, local: bool) -> tuple[bool, str]:
    """Whether Megatron-core and Transformer Engine can fuse rotary embeddings for this model, and the reason."""
    if local:
        return False, "the kernel is part of Transformer Engine"
    if any(isinstance(layer.attention, LatentAttention) for layer in model.layers):
        # MLATransformerConfig.__post_init__: "apply_rope_fusion for MLA only works with YARN RoPE"; experimental there.
        return False, "experimental for latent attention, and only with YaRN"
    if model.vision is not None and layout.micro_batch_size > 1:
        # rope_utils.apply_rotary_pos_emb falls back with a warning at every call, "an error in v0.16".
        return False, "the kernel does not support mRoPE with micro batches above 1"
    return True, "fused rotary embedding kernel"


def _output_section(spec: Spec, layout: Layout, steps: int | None, user: Mapping[str, Any]) -> Section:
    exports = can_export(spec, layout)
    fails = "the export fails with this layout; see README.md"
    return output_section(
        steps,
        Entry("save_hf_model", exports, "also save Hugging Face weights, for vLLM and others" if exports else fails),
        *evaluation_entries(user, steps),
        Entry("logging_steps", 1),
        Entry("report_to", "none", "tensorboard works; wandb is silently ignored"),
    )
