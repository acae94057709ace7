"""LLaMA-Factory on Megatron-core (MCA): train.yaml, with a reason in each line that is not obvious, and its run.

Sources: LLaMA-Factory hparams/ and train/mca/workflow.py, mcore_adapter training_args.py and models/model_config.py, at
the versions named in `topoplan/catalog/trainer_keys/llamafactory.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout, changed
from topoplan.specs.case import case_with
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.model import LatentAttention, Mlp, Model, Moe
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.codec import entries
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.llamafactory.common import (
    CACHING_ALLOCATOR,
    CHECKPOINTS,
    PADDED,
    RECORD_VRAM,
    RESUME,
    START,
    TRIAL,
    VERSIONS,
    data_section,
    dataset_entry,
    evaluation_entries,
    launcher,
    model_section,
    run_of,
    training_section,
    versions_line,
)
from topoplan.trainers.llamafactory.key_list import templates, trainer_versions
from topoplan.trainers.llamafactory.mca_job import CODEC, LAYOUT_KEYS, ROWS
from topoplan.trainers.llamafactory.mca_refusals import (
    FREEZABLE_MODEL_TYPES,
    caveats,
    job_refusals,
    refusals,
    resumable,
    trainer_warnings,
)
from topoplan.trainers.llamafactory.user_keys import evaluates, user_keys
from topoplan.trainers.megatron_keys import DISPATCHER, MEMORY_KEYS, title
from topoplan.trainers.refusal import FP8_RECIPES
from topoplan.trainers.requirements import install_commands, requirements_of
from topoplan.trainers.steps import megatron_steps, steps
from topoplan.trainers.train_yaml import head, output_section, trainer_files, values_of, warmup_steps
from topoplan.trainers.trainer import ReadmeWords, TrainerFiles, TrainerRun, TrainingPath, torchrun_command
from topoplan.trainers.traits import MCA
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
    is_moe, keeps = facts_of(spec.model).is_moe, layout.recompute.granularity == "none"
    return [
        _model_section(spec),
        data_section(
            spec,
            "read in order; this trainer does not shuffle",
            padded="padded; with expert parallelism always to cutoff_len" if is_moe else PADDED,
        ),
        _training_section(spec, layout, steps, user),
        _layout_section(spec, layout, user),
        Section(
            title="Memory",
            entries=tuple(entries(ROWS, MEMORY_KEYS, spec, layout)),
            notes=("recompute_granularity: not set, nothing is recomputed",) if keeps else (),
        ),
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


def _training_section(spec: Spec, layout: Layout, steps: int | None, user: Mapping[str, Any]) -> Section:
    warmup, why = warmup_steps(steps), "a guess; must be fewer than all steps"
    if steps is not None:
        # Megatron's scheduler asserts that warm-up takes fewer than all steps (core/optimizer_param_scheduler.py).
        warmup, why = min(warmup, steps - 1), f"3% of {steps} steps"
    return training_section(spec, user, warmup, why, *_precision_entries(spec, layout))


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


def _speed_section(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> Section:
    local = spec.cluster.gpu.architecture == "volta"
    lines = entries(ROWS, ("overlap_grad_reduce", "overlap_param_gather"), spec, layout)
    if local:
        lines.append(Entry("transformer_impl", "local", "Transformer Engine has no kernels for Volta"))
    if all(layer.ffn.gated for layer in spec.model.layers if isinstance(layer.ffn, Mlp | Moe)):
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


# What a run needs -----------------------------------------------------------------------------------------------------

_NO_RESUME = """\
the adapter cannot resume from the checkpoints of this layout (torch_dist, because etp differs from tp).
  Generate the bundle again with the last checkpoint as `model_name_or_path` under `job.trainer`, or set it and another
  `output_dir` in `train.yaml` and in the scripts. The weights are kept; optimizer and data start from scratch."""
_PROGRESS = """\
Then every step prints a line with `loss`, `grad_norm` and
`token_per_sec_per_gpu`, and `trainer_log.jsonl` in `output_dir` shows the remaining time."""


def trainer_run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    """Return what a run with these keys needs on a node."""
    versions = trainer_versions()
    wanted = {
        "torch": "",
        "llamafactory": f"=={versions['llamafactory']}",
        "megatron-core": f"=={versions['megatron_core']}",
        **({} if values.get("transformer_impl") == "local" else {"transformer-engine": ""}),
        "mcore_adapter": "",
    }
    requirements = requirements_of(spec, layout, VERSIONS, wanted)
    can_resume = resumable(spec, layout)
    return run_of(
        spec,
        values,
        _steps(spec.job, values),
        requirements=requirements,
        environment=_environment(spec.cluster, layout),
        model_files=("config.json", "mca_config.json"),
        refuses_quantized=(
            "The adapter does not know the scales of quantized weights, and fails at the first one.",
            "are quantized, which the trainer cannot read; convert them to bf16, or use an unquantized model",
        ),
        checkpoint=checkpoint_size(spec, layout, values),
        checkpoints=CHECKPOINTS._replace(resumable=can_resume),
        readme=ReadmeWords(
            engine="LLaMA-Factory on Megatron-core (mcore_adapter)",
            packages="LLaMA-Factory, megatron-core, Transformer Engine and\n"
            "   [mcore_adapter](https://github.com/alibaba/ROLL/tree/main/mcore_adapter)",
            install=install_commands(requirements),
            model_note="The adapter cannot load hub ids.",
            data_note="This trainer reads samples in order, so shuffle them beforehand."
            " It fills up the last batch of an epoch with the first samples.",
            dataset_entry=dataset_entry(spec.job, spec.model),
            progress=_PROGRESS,
            resume=RESUME if can_resume else _NO_RESUME,
        ),
    )


def _environment(cluster: Cluster, layout: Layout) -> tuple[EnvVar, ...]:
    found = [EnvVar("USE_MCA", "1", "train with Megatron-core, through mcore_adapter")]
    if cluster.gpu.architecture != "blackwell" and (layout.tp > 1 or layout.cp > 1):
        # Megatron-LM asserts this in training/arguments.py, which the adapter bypasses.
        reason = "runs kernels in launch order, which the overlap of TP and CP needs before Blackwell"
        found.append(EnvVar("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason))
    return (*found, RECORD_VRAM, CACHING_ALLOCATOR)


_WEIGHT_BYTES = 2  # bf16 or fp16
_STATE_BYTES = {"adam": 12, "sgd": 8}  # fp32: the weight, and two moments or one


def checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """Return the checkpoint sizes of a run with these trainer keys.

    mcore_adapter trainer/trainer.py, save_model and _save_optimizer_and_scheduler; checkpointing.py,
    save_config_and_state_dict: a legacy checkpoint has the files of all ranks with expert data-parallel rank 0, and
    therefore the non-expert weights once per expert-parallel rank. Megatron-core distrib_optimizer.py: the distributed
    optimizer saves every element once, in fp32.
    """
    all_trained = replace(
        spec.job, freeze_language_model=False, freeze_vision_tower=False, freeze_multi_modal_projector=False
    )
    one = changed(layout, tp=1, pp=1, vpp=1, ep=1, etp=1, pipeline_layout=None)
    every = stage_parameters(case_with(replace(spec, job=all_trained), MCA), one, 0)
    trained = stage_parameters(case_with(spec, MCA), one, 0)
    copies = 1 if values.get("ckpt_format") == "torch_dist" or not resumable(spec, layout) else layout.ep
    to_hf = bool(values.get("save_hf_model"))
    weights_alone = bool(values.get("save_only_model"))
    state = 0 if weights_alone else _STATE_BYTES[str(values.get("optimizer", "adam"))]
    state_copies = 1 if layout.distributed_optimizer else layout.ep
    limit = values.get("save_total_limit")
    return CheckpointSize(
        megatron_bytes=0 if weights_alone and to_hf else _WEIGHT_BYTES * (every.expert + copies * every.dense),
        hf_bytes=_WEIGHT_BYTES * every.total if to_hf else 0,
        optimizer_bytes=state * (trained.expert + state_copies * trained.dense),
        at_once=0 if values.get("save_strategy") == "no" else None if limit is None else max(1, int(limit)) + 1,
    )


_steps = partial(steps, drops_last=True)


def _model_warnings(model: Model) -> Iterator[str]:
    if model.model_type not in templates().supported_model_types:
        yield f"the MCA trainer does not support model_type {model.model_type!r}"
    if model.model_type == "qwen3_next":
        yield "mcore_adapter 0.10 cannot build Qwen3-Next on megatron-core 0.15.3 to 0.16.1: try the trainer first"


MEGATRON = TrainingPath(
    backends=("mca",),
    traits={"mca": MCA},
    packages={"mca": ("megatron-core", "mcore_adapter", "Transformer Engine")},
    job_refusals=job_refusals,
    model_warnings=_model_warnings,
    caveats=caveats,
    refusals=refusals,
    steps=_steps,
    files=trainer_file,
    run=trainer_run,
    start=lambda spec, _, node: START + torchrun_command(spec, node, launcher(spec.job)),
    versions=trainer_versions,
    trial=TRIAL,
    codec=CODEC,
)
