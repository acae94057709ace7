"""train.yaml: the plan in the keys of LLaMA-Factory's Megatron (MCA) trainer, each non-obvious line with its reason.

Sources: LLaMA-Factory hparams/ and train/mca/workflow.py, mcore_adapter training_args.py and models/model_config.py,
at the versions named in `topoplan/catalog/trainer_keys/llamafactory_mca.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from topoplan.emit.trainer_keys import check_key, default_template, known_keys, templates, trainer_versions
from topoplan.emit.yaml_text import Entry, Section, mapping_text
from topoplan.errors import LayoutError, ModelError, SpecError, nearest
from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.specs.job import Job
from topoplan.specs.model import LatentAttention, Mlp, Model, Moe
from topoplan.specs.spec import Spec

DATASET_TO_FILL_IN = "SET_ME"
"""Stands for the dataset that the spec does not name; the node scripts refuse to start with it."""

FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""

_STAGES = ("pt", "sft", "dpo")
_SFT_PAD, _PT_PAD = 64, 8  # pad_to_multiple_of of the collators in train/mca/workflow.py
_DDP_TIMEOUT_S = 7200
_WARMUP_FRACTION = 0.03
_WARMUP_STEPS_WHEN_UNKNOWN = 20
_SAVES_A_RUN = 5
_SAVE_STEPS_WHEN_UNKNOWN = 200
_MOST_WORKERS = 16
_OUTPUT_TITLE = "Checkpoints and logs"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

_JOB_KEYS = {
    "bf16": "precision",
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "fp16": "precision",
    "fp8": "precision",
    "fp8_recipe": "precision",
    "freeze_language_model": "freeze_language_model",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_vision_tower": "freeze_vision_tower",
    "image_max_pixels": "image_max_pixels",
    "num_train_epochs": "epochs",
    "packing": "packing",
    "stage": "stage",
}
"""Trainer keys that follow from a key of the job, on which memory and time were predicted."""

_ACCOUNT_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFile:
    """train.yaml, and what other files of the bundle need to know of it."""

    text: str
    values: Mapping[str, Any]
    """What a YAML reader gets from the text."""
    run_name: str
    """Names this run: model, plan, and a hash of everything in the file."""
    warnings: tuple[str, ...]
    """Sentences for the reader of the bundle."""


def training_steps(job: Job, max_steps: int | None = None) -> int | None:
    """Optimizer steps of the job; None when the spec does not say how many samples there are.

    The trainer drops the last incomplete batch of each epoch (mcore_adapter trainer.py, _prepare_train_loop).
    """
    if max_steps is not None and max_steps > 0:
        return max_steps
    if job.samples is None:
        return None
    return math.ceil(max(1, job.samples // job.global_batch_size) * job.epochs)


def trainer_file(spec: Spec, plan: Plan) -> TrainerFile:
    """train.yaml of a plan; an error names what the trainer cannot do, or which of the user's keys contradicts it."""
    _check_supported(spec, plan.layout)
    warnings = [*plan.warnings, *_warnings(spec, plan.layout)]
    user = _user_keys(spec, plan.layout, warnings)
    sections = _with_user_keys(_sections(spec, plan.layout, user), user, spec)

    identity = json.dumps(
        [spec.cluster.world_size, {entry.key: entry.value for section in sections for entry in section.entries}],
        sort_keys=True,
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    run_name = f"{_slug(spec.model.name.rstrip('/').rpartition('/')[2])}-{plan.id}-{digest}"
    sections = _with_output_dir(sections, user, run_name)

    versions = trainer_versions()
    oldest, newest = versions["transformers"]
    head = (
        f"{spec.model.name} on {spec.cluster.name}: plan {plan.id}",
        f"For LLaMA-Factory {versions['llamafactory']} with USE_MCA=1, transformers {oldest} to {newest}.",
        "Relative paths start at the directory in which the node scripts start the trainer.",
    )
    return TrainerFile(
        text=mapping_text(head, sections),
        values={entry.key: entry.value for section in sections for entry in section.entries},
        run_name=run_name,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def model_directory(model: Model) -> str:
    """Where the model lies on every node: its own directory, or below the working directory for a hub id."""
    if model.config_path is not None:
        path = PurePosixPath(model.config_path)
        return str(path.parent if path.name == "config.json" else path)
    return str(PurePosixPath("models", model.name))


def is_hub_id(name: str) -> bool:
    """True for `org/name`, which the Megatron adapter cannot load: it reads local directories only."""
    return _HUB_ID.fullmatch(name) is not None


# What the trainer can do ---------------------------------------------------------------------------------------------


def _check_supported(spec: Spec, layout: Layout) -> None:
    job, model, cluster = spec.job, spec.model, spec.cluster
    if layout.backend != "mca":
        raise LayoutError(f"no bundle can be written for the backend {layout.backend!r}", expected="expected mca")
    if layout.world_size != cluster.world_size:
        raise LayoutError(
            f"tp {layout.tp} * pp {layout.pp} * cp {layout.cp} * dp {layout.dp} = {layout.world_size} GPUs,"
            f" and the cluster has {cluster.world_size}"
        )
    supported = templates().supported_model_types
    if model.model_type not in supported:
        raise ModelError(
            f"LLaMA-Factory's Megatron path does not train {model.model_type!r}",
            where=model.name,
            expected="it knows " + ", ".join(supported),
        )
    if job.stage not in _STAGES:
        raise SpecError(f"stage {job.stage!r}", where="job.stage", expected="expected pt, sft or dpo")
    if job.finetuning != "full":
        raise SpecError(
            f"finetuning {job.finetuning!r}: the Megatron trainer builds no adapter and freezes no layers,"
            " it would train everything",
            where="job.finetuning",
            expected="expected full",
        )
    if job.samples is not None and job.samples < layout.micro_batch_size * layout.dp:
        raise SpecError(
            f"{job.samples} samples are fewer than micro batch {layout.micro_batch_size} * dp {layout.dp} ="
            f" {layout.micro_batch_size * layout.dp}: the trainer would wait for ever for a full batch",
            where="job.samples",
        )
    _check_sequence_padding(job, layout)


def _check_sequence_padding(job: Job, layout: Layout) -> None:
    """Sequences that are not packed are padded by the collator, to a length that CP and SP must be able to split."""
    parts = math.lcm(2 * layout.cp if layout.cp > 1 else 1, layout.cp * layout.tp if layout.sequence_parallel else 1)
    pad = _PT_PAD if job.stage == "pt" else _SFT_PAD
    # SFT and DPO with EP pad to cutoff_len, rounded up (pad_to_max in train/mca/workflow.py).
    fixed_length = _packs(job) or (layout.ep > 1 and job.stage != "pt")
    length = math.ceil(job.seq_len / pad) * pad if fixed_length else pad
    if length % parts:
        what = (
            f"cutoff_len {job.seq_len}, padded to {length},"
            if fixed_length
            else f"a length padded to multiples of {pad}"
        )
        raise LayoutError(
            f"{what} cannot be split into {parts} parts (cp {layout.cp}, tp {layout.tp})",
            where="job.seq_len" if fixed_length else "job.packing",
            remedy=f"take a multiple of {math.lcm(pad, parts)}" if fixed_length else "set packing: true",
        )


def _warnings(spec: Spec, layout: Layout) -> list[str]:
    job, model = spec.job, spec.model
    found = []
    if job.samples is not None and job.samples < job.global_batch_size:
        found.append(
            f"{job.samples} samples are fewer than the global batch of {job.global_batch_size}: no step can be filled."
        )
    pad = _PT_PAD if job.stage == "pt" else _SFT_PAD
    if job.seq_len % pad:
        longest = math.ceil(job.seq_len / pad) * pad
        found.append(
            f"cutoff_len {job.seq_len} is no multiple of {pad}: full sequences are padded to {longest} tokens."
        )
    if model.vision is not None and job.stage == "pt":
        found.append("Stage pt freezes nothing: the vision tower and its projector are trained too.")
    if job.template is not None and job.template not in templates().names:
        close = nearest(job.template, templates().names)
        found.append(
            f"template {job.template!r} is not among those of LLaMA-Factory {templates().version}."
            + (f" {close[0].upper()}{close[1:]}" if close else "")
        )
    if layout.vpp > 1 and layout.distributed_optimizer:
        found.append(
            "Watch the loss of the first steps: in one test on CPUs, virtual pipeline together with the distributed"
            " optimizer drove it to ln(vocabulary) and held it there; whether GPUs do so too is not known."
        )
    if spec.cluster.gpu.architecture == "volta" and job.precision == "bf16":
        found.append(f"{spec.cluster.gpu.name} has no bf16 units: precision fp16 is the faster one.")
    return found


def _packs(job: Job) -> bool:
    return job.packing and job.stage != "dpo"


# The file ------------------------------------------------------------------------------------------------------------


def _sections(spec: Spec, layout: Layout, user: Mapping[str, Any]) -> list[Section]:
    return [
        _model_section(spec),
        _data_section(spec),
        _training_section(spec, user),
        _layout_section(spec, layout),
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
    if model.vision is not None and model.model_type in FREEZABLE_MODEL_TYPES:
        entries += [
            Entry(key="freeze_vision_tower", value=job.freeze_vision_tower),
            Entry(key="freeze_multi_modal_projector", value=job.freeze_multi_modal_projector),
            Entry(key="freeze_language_model", value=job.freeze_language_model),
        ]
    return Section(title="Model and method", entries=tuple(entries))


def _data_section(spec: Spec) -> Section:
    job, model = spec.job, spec.model
    notes: list[str] = []
    if job.dataset is None:
        dataset = Entry(
            key="dataset",
            value=DATASET_TO_FILL_IN,
            comment="a name in dataset_info.json; the spec has none",
        )
    else:
        dataset = Entry(key="dataset", value=job.dataset, comment="read in order, never shuffled by this trainer")
    entries = [
        dataset,
        Entry(key="dataset_dir", value=job.dataset_dir or "data", comment="holds dataset_info.json"),
    ]
    template = job.template or default_template(model.name, model.model_type)
    if template is not None:
        comment = "" if job.template else "LLaMA-Factory's choice for this model"
        entries.append(Entry(key="template", value=template, comment=comment))
    else:
        notes.append("template: not in the spec and not known for this model; the tokenizer's own is parsed instead")
    entries.append(Entry(key="cutoff_len", value=job.seq_len, comment="the seq_len that was planned for"))
    if job.stage == "pt" and job.packing:
        # DataArguments.__post_init__ takes one off cutoff_len for an explicit `packing: true`; the default of stage pt
        # is applied later, and run_pt adds the token that the shift of the labels takes.
        notes.append("packing: on by default in stage pt; written here it would cost a token of each sequence")
    elif job.stage == "pt":
        entries.append(Entry(key="packing", value=False, comment="stage pt packs unless told not to"))
    elif job.stage == "sft":
        comment = "samples share sequences; longer ones are dropped" if job.packing else "padded to the longest"
        if not job.packing and _is_moe(model):
            comment = "padded; with expert parallelism always to cutoff_len"
        entries.append(Entry(key="packing", value=job.packing, comment=comment))
    if model.vision is not None:
        entries.append(Entry(key="image_max_pixels", value=job.image_max_pixels, comment="larger ones are scaled down"))
    workers = _MOST_WORKERS if spec.cluster.cpu_cores is None else min(_MOST_WORKERS, spec.cluster.cpu_cores)
    entries += [
        Entry(key="preprocessing_num_workers", value=workers, comment="processes that tokenise, once on each node"),
        Entry(key="dataloader_num_workers", value=_loader_workers(spec), comment="a GPU"),
    ]
    return Section(title="Data", entries=tuple(entries), notes=tuple(notes))


def _loader_workers(spec: Spec) -> int:
    usual = 4
    if spec.cluster.cpu_cores is None:
        return usual
    return max(1, min(usual, spec.cluster.cpu_cores // spec.cluster.gpus_per_node // 2))


def _training_section(spec: Spec, user: Mapping[str, Any]) -> Section:
    job = spec.job
    steps = training_steps(job, user.get("max_steps"))
    if steps is None:
        warmup, why = _WARMUP_STEPS_WHEN_UNKNOWN, "job.samples is not in the spec"
    else:
        warmup, why = max(1, round(_WARMUP_FRACTION * steps)), f"3% of {steps} steps"
    entries = [
        Entry(key="num_train_epochs", value=float(job.epochs)),
        Entry(key="learning_rate", value=float(job.learning_rate)),
        Entry(key="lr_scheduler_type", value="cosine"),
        Entry(key="warmup_steps", value=warmup, comment=f"{why}; a whole number, for transformers 4 and 5"),
        *_precision_entries(spec),
        Entry(
            key="ddp_timeout",
            value=_DDP_TIMEOUT_S,
            comment="s: tokenising must end in time, and a hang does",
        ),
    ]
    return Section(title="Training", entries=tuple(entries))


def _precision_entries(spec: Spec) -> list[Entry]:
    precision, architecture = spec.job.precision, spec.cluster.gpu.architecture
    if precision == "fp16":
        return [Entry(key="fp16", value=True)]
    bf16 = Entry(key="bf16", value=True, comment="gradients are then summed in fp32")
    if precision == "bf16":
        return [bf16]
    # training_args.py, fp8_recipe: "'mxfp8' on blackwell, 'blockwise' on hopper. Other recipes are not tested yet."
    recipe = {"hopper": "blockwise", "blackwell": "mxfp8"}.get(architecture)
    if recipe is None or precision not in ("fp8", recipe):
        raise SpecError(
            f"the Megatron adapter has no {precision} recipe for {spec.cluster.gpu.name}",
            where="job.precision",
            expected="expected bf16, fp8 on Hopper (blockwise), or fp8 or mxfp8 on Blackwell",
        )
    return [
        bf16,
        Entry(key="fp8", value="e4m3", comment="matrix multiplications only; weights stay in bf16"),
        Entry(key="fp8_recipe", value=recipe, comment=f"what the adapter tests on {architecture.capitalize()}"),
    ]


def _layout_section(spec: Spec, layout: Layout) -> Section:
    product = layout.tp * layout.pp * layout.cp
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
    if _is_moe(spec.model):
        entries.append(
            Entry(key="expert_model_parallel_size", value=layout.ep, comment="carved out of the data-parallel ranks")
        )
        if layout.tp > 1:
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
        Entry(key="per_device_train_batch_size", value=layout.micro_batch_size, comment="Megatron's micro batch"),
        Entry(
            key="gradient_accumulation_steps",
            value=layout.gradient_accumulation_steps,
            comment=f"micro batch * this * dp {layout.dp} = {batch} sequences a step",
        ),
    ]
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
            comment="parameters arrive during forward; needs both above",
        ),
    ]
    if local:
        entries.append(
            Entry(key="transformer_impl", value="local", comment="Transformer Engine has no kernels for Volta")
        )
    if _is_gated(model):
        entries.append(Entry(key="bias_activation_fusion", value=True, comment="SwiGLU in one kernel"))
    entries.append(_rope_fusion(model, layout, local=local))
    if layout.cross_entropy_fusion:
        entries.append(Entry(key="cross_entropy_loss_fusion", value=True, comment="takes effect with TP 1 only"))
    if _is_moe(model):
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
    save_steps = _SAVE_STEPS_WHEN_UNKNOWN if steps is None else max(1, math.ceil(steps / _SAVES_A_RUN))
    entries = [
        Entry(key="save_strategy", value="steps"),
        Entry(key="save_steps", value=save_steps),
        Entry(
            key="save_total_limit",
            value=2,
            comment="older ones of this run are removed",
        ),
        Entry(
            key="save_hf_model",
            value=True,
            comment="Hugging Face weights too, for vLLM and the like",
        ),
        Entry(key="logging_steps", value=1),
        Entry(key="report_to", value="none", comment="tensorboard works; wandb would be dropped unsaid"),
    ]
    return Section(title=_OUTPUT_TITLE, entries=tuple(entries))


def _with_output_dir(sections: list[Section], user: Mapping[str, Any], run_name: str) -> list[Section]:
    if "output_dir" in user:
        return sections
    entry = Entry(
        key="output_dir",
        value=f"saves/{run_name}",
        comment="of this plan only: a checkpoint found there is resumed unasked; on storage that all nodes share",
    )
    return [
        replace(section, entries=(entry, *section.entries)) if section.title == _OUTPUT_TITLE else section
        for section in sections
    ]


# The user's own keys -------------------------------------------------------------------------------------------------


def _user_keys(spec: Spec, layout: Layout, warnings: list[str]) -> dict[str, Any]:
    """`job.trainer`, checked key by key and against the plan."""
    given = dict(spec.job.trainer)
    if "warmup_ratio" in given and "warmup_steps" not in given:
        given = _with_warmup_steps(given, spec)
    fixed = _fixed_values(spec, layout)
    checked: dict[str, Any] = {}
    for name, value in given.items():
        where = _where(spec, str(name))
        checked[name] = check_key(str(name), value, where)
        if name in fixed and checked[name] not in fixed[name]:
            _refuse_contradiction(name, checked[name], fixed[name][0], where)
        if known_keys()[name].transformers:
            only = known_keys()[name].transformers
            warnings.append(f"The key {name} is known to transformers {only} only: version 4 refuses the file.")
    _check_combinations(checked, spec, layout)
    return checked


def _with_warmup_steps(given: dict[str, Any], spec: Spec) -> dict[str, Any]:
    """A ratio as the number of steps that it stands for: transformers 5 has given up warmup_ratio."""
    ratio, steps = given["warmup_ratio"], training_steps(spec.job)
    is_ratio = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio < 1
    if steps is None or not is_ratio:
        return given  # check_key refuses it, and says what to write
    return {
        **{key: value for key, value in given.items() if key != "warmup_ratio"},
        "warmup_steps": math.ceil(ratio * steps),
    }


def _fixed_values(spec: Spec, layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Key -> the values that agree with the plan; the first one is its own. For the keys that the plan decides."""
    job, recompute = spec.job, layout.recompute
    full, selective = recompute.granularity == "full", recompute.granularity == "selective"
    fp8 = job.precision not in ("bf16", "fp16")
    fixed: dict[str, tuple[Any, ...]] = {
        "tensor_model_parallel_size": (layout.tp,),
        "pipeline_model_parallel_size": (layout.pp,),
        "virtual_pipeline_model_parallel_size": (layout.vpp,) if layout.vpp > 1 else (None,),
        "pipeline_model_parallel_layout": (layout.pipeline_layout,),
        "context_parallel_size": (layout.cp,),
        "expert_model_parallel_size": (layout.ep,) if layout.ep > 1 else (1, None),
        "expert_tensor_parallel_size": (layout.etp,) if _is_moe(spec.model) else (None, 1),
        "sequence_parallel": (layout.sequence_parallel,),
        "per_device_train_batch_size": (layout.micro_batch_size,),
        "gradient_accumulation_steps": (layout.gradient_accumulation_steps,),
        "use_distributed_optimizer": (layout.distributed_optimizer,),
        "overlap_grad_reduce": (layout.overlap_grad_reduce,),
        "overlap_param_gather": (layout.overlap_param_gather,),
        "accumulate_allreduce_grads_in_fp32": (True,) if job.precision != "fp16" else (False, True),
        "optimizer_cpu_offload": (layout.optimizer_offload_fraction > 0,),
        "optimizer_offload_fraction": (float(layout.optimizer_offload_fraction),),
        "cross_entropy_loss_fusion": (layout.cross_entropy_fusion,),
        "recompute_granularity": (None if recompute.granularity == "none" else recompute.granularity,),
        "recompute_method": (recompute.method or "uniform",) if full else (None,),
        "recompute_num_layers": (recompute.num_layers or 1,) if full else (None,),
        "recompute_modules": (",".join(recompute.modules) or "core_attn",) if selective else (None,),
        "moe_layer_recompute": (False,),
        **dict.fromkeys(_ACCOUNT_FLAGS, (None, False)),
        "stage": (job.stage,),
        "do_train": (True,),
        "finetuning_type": ("full",),
        "cutoff_len": (job.seq_len,),
        "num_train_epochs": (float(job.epochs),),
        "packing": (True, None) if _packs(job) else (False, None, job.packing),
        "bf16": (job.precision != "fp16",),
        "fp16": (job.precision == "fp16",),
    }
    if not fp8:
        fixed |= {"fp8": (None,), "fp8_recipe": (None,)}
    if spec.model.vision is not None:
        fixed |= {
            "freeze_vision_tower": (job.freeze_vision_tower,),
            "freeze_multi_modal_projector": (job.freeze_multi_modal_projector,),
            "freeze_language_model": (job.freeze_language_model,),
            "image_max_pixels": (job.image_max_pixels,),
        }
    return fixed


def _refuse_contradiction(name: str, value: Any, planned: Any, where: str) -> None:
    what = f"{name} is {value!r}, and the plan was made for {planned!r}"
    if name in _JOB_KEYS:
        raise SpecError(what, where=where, remedy=f"set job.{_JOB_KEYS[name]} and leave {name} out")
    raise LayoutError(what, where=where, remedy="leave it out, or ask for it under job.pin, so that it is predicted")


def _check_combinations(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """Keys that are right alone and wrong together, or with this plan."""
    packs_exactly = user.get("neat_packing") or user.get("sequence_packing")
    if packs_exactly:
        key = "neat_packing" if user.get("neat_packing") else "sequence_packing"
        where = _where(spec, key)
        if spec.job.stage != "sft" or not spec.job.packing:
            raise SpecError(f"{key} packs, which needs stage sft and packing: true", where=where)
        if layout.cp > 1:
            raise LayoutError(
                f"{key} fails under context parallelism (cp {layout.cp}): sub-sequences are not multiples of 2 * cp",
                where=where,
                remedy="leave it out or pin cp=1",
            )
    if user.get("moe_token_dispatcher_type") == "allgather" and (
        _is_moe(spec.model) or user.get("variable_seq_lengths")
    ):
        raise LayoutError(
            "the plan was made for the alltoall dispatcher",
            where=_where(spec, "moe_token_dispatcher_type"),
            remedy="leave it out",
        )
    path = user.get("model_name_or_path")
    if path == spec.model.name and spec.model.config_path is None and is_hub_id(path):
        raise SpecError(
            f"{path!r} is a hub id, and the Megatron adapter reads local directories only",
            where=_where(spec, "model_name_or_path"),
            remedy=f"leave it out ({model_directory(spec.model)} is the default) or name a directory on every node",
        )
    additional = user.get("additional_configs")
    if isinstance(additional, Mapping):
        _check_additional_configs(additional, spec, layout)


def _check_additional_configs(additional: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    where = _where(spec, "additional_configs")
    for name in additional:
        if str(name).startswith(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")):
            raise LayoutError(
                f"the adapter refuses {name}: layers must divide evenly by its own count",
                where=where,
                remedy="pin a pipeline_layout for uneven stages",
            )
        if name in _fixed_values(spec, layout):
            raise LayoutError(
                f"{name} is decided by the plan", where=where, remedy="leave it out, or ask for it under job.pin"
            )


def _with_user_keys(sections: list[Section], user: Mapping[str, Any], spec: Spec) -> list[Section]:
    """The user's values in place of ours, and the keys that we do not write in a section of their own."""
    ours = {entry.key for section in sections for entry in section.entries}
    origin = "from job.trainer in the spec"
    merged = [
        replace(
            section,
            entries=tuple(
                replace(entry, value=user[entry.key], comment=origin)
                if entry.key in user and user[entry.key] != entry.value
                else entry
                for entry in section.entries
            ),
        )
        for section in sections
    ]
    further = tuple(Entry(key=key, value=value) for key, value in user.items() if key not in ours)
    return [*merged, Section(title="Further keys of the spec (job.trainer)", entries=further)]


def _where(spec: Spec, name: str) -> str:
    return ": ".join(part for part in (spec.path, f"job.trainer.{name}") if part)


# The model -----------------------------------------------------------------------------------------------------------


def _is_moe(model: Model) -> bool:
    return any(isinstance(layer.ffn, Moe) for layer in model.layers)


def _is_gated(model: Model) -> bool:
    return all(layer.ffn.gated for layer in model.layers if isinstance(layer.ffn, Mlp | Moe))


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
