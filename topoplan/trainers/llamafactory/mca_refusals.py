"""What LLaMA-Factory's Megatron path (mcore_adapter) cannot train, and what it does contrary to expectation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from topoplan.engines.megatron.rules import sequence_parts
from topoplan.errors import LayoutError, ModelError, listed
from topoplan.layout.layout import Layout
from topoplan.operators.padding import is_padded_to_seq_len, pad_multiple
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import LinearAttention
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import can_export, refused_keys
from topoplan.trainers.llamafactory.common import usual_warnings
from topoplan.trainers.llamafactory.key_list import templates, trainer_versions
from topoplan.trainers.refusal import FP8_RECIPES, Refusal, mca_finetuning, megatron_optimizer, missing_precision
from topoplan.trainers.traits import MCA

STAGES = ("pt", "sft", "dpo")
"""Stages with a Megatron workflow (LLaMA-Factory `train/tuner.py`)."""

MTP_MODEL_TYPES = frozenset({"deepseek_v3", "glm4_moe"})
"""Model types whose multi-token-prediction weights the adapter loads under megatron-core 0.16: convert_mtp_name in
`models/deepseek_v3/__init__.py` and `models/glm4_moe/__init__.py`. qwen3_5's function produces the names of a later
megatron-core (mtp_model_layer), and qwen3_next drops the weights."""


def job_refusals(spec: Spec) -> Iterator[Refusal]:
    """Refuse a model or job that cannot run under any layout."""
    model, job, gpu, where = spec.model, spec.job, spec.cluster.gpu, spec.path or ""
    supported = templates().supported_model_types
    if model.model_type not in supported:
        yield Refusal(
            "model-type",
            f"the MCA trainer does not support model_type {model.model_type!r} ({model.name})",
            where=where,
            expected=f"expected one of {', '.join(supported)}",
            remedy="`topoplan predict` with backend megatron still predicts it",
            kind=ModelError,
            is_predicted=True,
        )
    linear_attention = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
    if gpu.architecture == "volta" and linear_attention:
        # models/qwen3_next and qwen3_5, _get_transformer_layer_spec: only the 'transformer_engine' implementation.
        yield Refusal(
            "transformer-engine",
            f"{model.name} needs Transformer Engine, which has no kernels for {gpu.name} (volta)",
            where=where,
            kind=ModelError,
            is_predicted=True,
        )
    yield from missing_precision(spec)
    recipe = FP8_RECIPES.get(gpu.architecture)
    if job.precision not in ("bf16", "fp16", "fp8" if recipe else "bf16", recipe):
        yield Refusal(
            "precision",
            f"the MCA trainer has no {job.precision} recipe for {gpu.name} ({gpu.architecture})",
            where=where,
            expected="expected bf16, fp8 on Hopper, or fp8 or mxfp8 on Blackwell",
            is_predicted=True,
        )
    yield from mca_finetuning(job, where)
    yield from megatron_optimizer(job, where)
    yield from _token_prediction(spec)
    yield from preferences(spec)
    yield from _frozen_parts(spec)


def preferences(spec: Spec) -> Iterator[Refusal]:
    """Refuse stage dpo on a vision-language model, which crashes on the first batch.

    LLaMA-Factory train/mca/workflow.py, _data_collator_wrapper removes the last token from a pair's ids but not from
    its mask. transformers' get_rope_index indexes one with the other and raises an IndexError. A batch without images
    gets a dummy image and crashes too.
    """
    if spec.job.stage == "dpo" and spec.model.vision is not None:
        yield Refusal(
            "vision-preferences",
            f"stage dpo of {spec.model.name}: the MCA trainer cuts a pair's ids and not its mask, and then cannot"
            " find the images in it",
            where=spec.path or "",
            expected="expected stage pt or sft for a vision-language model",
            is_predicted=True,
        )


def _frozen_parts(spec: Spec) -> Iterator[Refusal]:
    """Refuse frozen parts in stage pt: run_pt (train/mca/workflow.py) does not call _freeze_model_parameters."""
    keys = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    frozen = [key for key in keys if getattr(spec.job, key)]
    if frozen and spec.job.stage == "pt" and spec.model.vision is not None:
        yield Refusal(
            "frozen-parts",
            f"stage pt of {spec.model.name}: the MCA trainer freezes nothing in it, and trains all of the model",
            where=spec.path or "",
            expected=f"expected {listed(frozen)} false",
            remedy="set that, or take backend ddp, deepspeed or fsdp2, which do freeze",
            is_predicted=True,
        )


def _token_prediction(spec: Spec) -> Iterator[Refusal]:
    """Refuse multi-token-prediction layers that the adapter cannot train.

    mtp_num_layers defaults to 0 in `training_args.py`, and `McaModelConfig.update_with_args` overrides the checkpoint's
    number with it, so without the key there are none. With it, `McaGPTModel._get_mtp_block_spec` builds them, and
    `PretrainedModel.from_pretrained` refuses missing or surplus weights.
    """
    model, count, where = spec.model, spec.job.mtp_num_layers, spec.path or ""
    if not count:
        return
    if model.model_type not in MTP_MODEL_TYPES:
        yield Refusal(
            "token-prediction",
            f"mtp_num_layers {count}: the MCA trainer loads no multi-token-prediction layers of {model.model_type}",
            where=where,
            expected=f"expected 0, or a model_type of {', '.join(sorted(MTP_MODEL_TYPES))}",
            remedy="`topoplan predict` with backend megatron predicts it",
        )
    if count != model.mtp_layers:
        yield Refusal(
            "token-prediction",
            f"mtp_num_layers {count}: the checkpoint of {model.name} has {model.mtp_layers}, and the MCA trainer"
            " loads all of them or none",
            where=where,
            expected=f"expected 0 or {model.mtp_layers}" if model.mtp_layers else "expected 0",
        )


def refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse a model, job or layout that the trainer would refuse, or train differently from the plan."""
    job, model = spec.job, spec.model
    supported = templates().supported_model_types
    if model.model_type not in supported:
        yield Refusal(
            "model-type",
            f"LLaMA-Factory's Megatron path does not train {model.model_type!r}",
            where=model.name,
            expected="it knows " + ", ".join(supported),
            kind=ModelError,
        )
    if job.stage not in STAGES:
        yield Refusal("stage", f"stage {job.stage!r}", where="job.stage", expected="expected pt, sft or dpo")
    yield from mca_finetuning(job, "job.finetuning")
    yield from preferences(spec)
    yield from refused_keys(spec, layout)
    yield from _samples(job, layout)
    yield from _sequence_padding(job, layout)


def _samples(job: Job, layout: Layout) -> Iterator[Refusal]:
    """Refuse an epoch without a full batch: trainer/trainer.py divides by the number of batches
    (_inner_training_loop)."""
    if job.samples is None or job.samples >= job.global_batch_size:
        return
    full = layout.micro_batch_size * layout.dp
    if job.samples < full:
        so = f"micro batch {layout.micro_batch_size} * dp {layout.dp} = {full}: the trainer would wait forever for them"
    else:
        so = f"the global batch of {job.global_batch_size}: the trainer would end in a division by zero after a step"
    yield Refusal(
        "samples",
        f"{job.samples} samples are fewer than {so}",
        where="job.samples",
        remedy="lower global_batch_size, or repeat the samples in the data set",
    )


def _sequence_padding(job: Job, layout: Layout) -> Iterator[Refusal]:
    parts, pad = sequence_parts(layout), pad_multiple(MCA.padding, job)
    fixed_length = is_padded_to_seq_len(MCA.padding, job, layout)
    length = math.ceil(job.seq_len / pad) * pad if fixed_length else pad
    if length % parts:
        what = (
            f"cutoff_len {job.seq_len}, padded to {length},"
            if fixed_length
            else f"a length padded to multiples of {pad}"
        )
        yield Refusal(
            "sequence-padding",
            f"{what} cannot be split into {parts} parts (cp {layout.cp}, tp {layout.tp})",
            where="job.seq_len" if fixed_length else "job.packing",
            remedy=f"take a multiple of {math.lcm(pad, parts)}" if fixed_length else "set packing: true",
            kind=LayoutError,
        )


FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Model types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""


def resumable(spec: Spec, layout: Layout) -> bool:
    """Whether the adapter can resume from the checkpoints that it saves for a layout.

    If etp differs from tp, checkpoints are torch_dist (mcore_adapter training_args.py). trainer/trainer.py,
    _load_from_checkpoint then passes no models to checkpointing.py, _load_dist_checkpoint, which needs their shapes.
    """
    return not facts_of(spec.model).is_moe or layout.etp == layout.tp


_QUANTIZED = re.compile(r"-(?:fp8|awq|gptq|int[48]|w[48]a16|bnb)\b", re.IGNORECASE)
"""Matches hub ids of quantized weights; DeepSeek's own deepseek_v3 models are in fp8 without saying so in the name."""

_FUSED_EXPERTS = frozenset(["qwen3_vl_moe", "qwen3_5_moe"])
"""Model types whose experts Hugging Face keeps in one tensor per layer; a separate export routine gathers them."""


def trainer_warnings(spec: Spec, layout: Layout) -> list[str]:
    """Warn about valid settings that may surprise the user."""
    job = spec.job
    found = [*_weights(spec), *caveats(spec, layout)]
    if job.samples is None and not {"max_steps", "warmup_steps", "warmup_ratio"} & set(job.trainer):
        found.append(
            "job.samples is not in the spec (--set samples=N), so the number of warm-up steps is a guess: Megatron's"
            " scheduler fails an assertion if the run has no more steps than that"
        )
    pad = pad_multiple(MCA.padding, job)
    if job.seq_len % pad:
        longest = math.ceil(job.seq_len / pad) * pad
        padded = f"full sequences are padded to {longest} tokens"
        found.append(f"cutoff_len {job.seq_len} is not a multiple of {pad}: {padded}")
    return [*found, *usual_warnings(spec)]


def _weights(spec: Spec) -> Iterator[str]:
    model = spec.model
    in_fp8 = model.model_type == "deepseek_v3" and model.name.startswith("deepseek-ai/")
    if model.config_path is None and (in_fp8 or _QUANTIZED.search(model.name)):
        yield (
            f"the published weights of {model.name} are quantized, and the adapter cannot read weights with scales:"
            " convert them to bf16, and set model to their directory"
        )


def caveats(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about what the adapter cannot do with a model or its checkpoints."""
    model = spec.model
    adapter = f"mcore_adapter {trainer_versions()['mcore_adapter'].rpartition(' ')[2]}"
    if model.model_type == "qwen3_next":
        # models/qwen3_next/__init__.py, constant_mca_config; megatron-core 0.16 transformer_config.py.
        yield (
            f"{adapter} sets linear_attention_type for qwen3_next, which is experimental_attention_variant in"
            " megatron-core 0.16, and fails with a TypeError: rename it in its models/qwen3_next/__init__.py"
        )
    if not resumable(spec, layout):
        yield (
            f"checkpoints have the format torch_dist because etp differs from tp, and {adapter} cannot resume from"
            " those: to continue from the weights of one, set model_name_or_path to it, and another output_dir"
        )
    if not can_export(spec, layout):
        yield (
            f"no Hugging Face weights are saved, because {adapter} fails with a TypeError when it exports experts with"
            " etp other than tp: convert a checkpoint afterwards with `python -c 'from"
            " mcore_adapter.models.converter.post_converter import convert_checkpoint_to_hf as convert;"
            ' convert("CHECKPOINT", "OUT", low_mem=False)\'`'
        )
    if model.model_type in _FUSED_EXPERTS and layout.ep > 1 and layout.etp > 1:
        # models/converter/model_converter.py, _convert_moe_weight_with_allgather.
        yield (
            f"{adapter} gathers the experts of {model.model_type} over ep but not over etp {layout.etp}, so the Hugging"
            " Face weights that it saves are incomplete: pin etp 1, or convert them from the Megatron checkpoint"
        )
