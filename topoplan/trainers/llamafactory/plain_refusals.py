"""What LLaMA-Factory refuses or silently ignores with DeepSpeed, FSDP2 or plain data parallelism.

Sources are files of LLaMA-Factory 0.9.5, transformers 5.6, accelerate 1.11 and DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.errors import LayoutError, ModelError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.common import usual_warnings
from topoplan.trainers.llamafactory.mca_refusals import STAGES
from topoplan.trainers.loading import too_large_to_load
from topoplan.trainers.refusal import Refusal, offload, pure_fp16, quantized_weights

FREEZABLE_MODEL_TYPES = frozenset(
    [
        *("dots_ocr", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "interns1"),
        *("internvl", "Keye", "kimi_vl", "llama4", "llava", "llava_next", "llava_next_video"),
        *("minicpmo", "minicpmv", "minicpmv4_6", "mistral3", "mllama", "paligemma"),
        *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "video_llava"),
    ]
)
"""Model types whose parts can be frozen (model/model_utils/visual.py, COMPOSITE_MODELS); others ignore the keys."""

LIGER_MODEL_TYPES = frozenset(
    [
        *("gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4v", "gpt_oss", "granite", "llama", "llava"),
        *("mistral", "mixtral", "mllama", "olmo2", "paligemma", "phi3", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3"),
        *("qwen3_5", "qwen3_moe", "qwen3_next"),
    ]
)
"""Model types with Liger kernels (model/model_utils/liger_kernel.py); for others LLaMA-Factory only warns."""

_PRECISIONS = ("bf16", "fp16")


def refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse what the engine allows but the trainer would refuse, partly ignore, or train differently from the plan."""
    yield from _splits(layout)
    yield from _job(spec)
    yield from quantized_weights(spec.job)
    yield from _packed_weights(spec, layout)
    yield from too_large_to_load(spec, layout)
    yield from _numbers(spec, layout)
    yield from offload(spec, layout)
    yield from _liger(spec, layout)


def _splits(layout: Layout) -> Iterator[Refusal]:
    if layout.ulysses > 1 or layout.cp > 1:
        # LLaMA-Factory's experimental v1 trainer has Ulysses (v1/plugins/model_plugins/parallelization), with other
        # YAML.
        key = "ulysses" if layout.ulysses > 1 else "cp"
        yield Refusal(
            "sequence-split",
            f"{key} {max(layout.ulysses, layout.cp)}: LLaMA-Factory's trainer splits no sequences",
            where=f"layout.{key}",
            remedy=f"pin {key}=1, or take another trainer",
        )
    if layout.backend == "fsdp2" and layout.sharding == "hybrid":
        # accelerate supports it (ParallelismConfig), but transformers 5 needs `sp_backend` there, which accelerate 1.12
        # added; LLaMA-Factory 0.9.5 allows accelerate up to 1.11.
        yield Refusal(
            "hybrid-sharding",
            "hybrid sharding: LLaMA-Factory's accelerate (1.11) and transformers 5 do not agree on its configuration",
            where="layout.sharding",
            remedy="pin sharding=full, or take another trainer",
        )
    if layout.recompute.granularity == "selective":
        yield Refusal(
            "recompute",
            "selective recomputation is Megatron's: gradient checkpointing takes whole layers",
            where="layout.recompute",
            expected="expected none or full",
        )


def _job(spec: Spec) -> Iterator[Refusal]:
    job, model = spec.job, spec.model
    if job.stage not in STAGES:
        yield Refusal("stage", f"stage {job.stage!r}", where="job.stage", expected="expected pt, sft or dpo")
    if job.precision not in _PRECISIONS:
        yield Refusal(
            "precision",
            f"precision {job.precision!r} is planned for the Megatron backends alone",
            where="job.precision",
            expected="expected bf16 or fp16",
        )
    if model.vision is None:
        return
    freezes = job.freeze_vision_tower or job.freeze_multi_modal_projector or job.freeze_language_model
    if model.model_type not in FREEZABLE_MODEL_TYPES and freezes:
        yield Refusal(
            "frozen-parts",
            f"LLaMA-Factory does not know the parts of {model.model_type!r}, and would freeze none of them",
            where=model.name,
            remedy="set the freeze_ keys of the job to false, to train all of it",
            kind=ModelError,
        )
    if job.finetuning == "freeze" and not (job.freeze_vision_tower and not job.freeze_language_model):
        # model/adapter.py, _setup_freeze_tuning matches `.35.` anywhere in a name, including the vision tower's blocks.
        yield Refusal(
            "frozen-layers",
            "finetuning freeze chooses layers by number, and means those of the language model",
            where="job.freeze_language_model" if job.freeze_language_model else "job.freeze_vision_tower",
            expected="expected freeze_vision_tower: true and freeze_language_model: false",
        )


def _packed_weights(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    if spec.job.finetuning == "qlora" and layout.backend == "fsdp2":
        # accelerate utils/fsdp_utils.py, fsdp2_prepare_model: `model.to(torch.float32)` unless the model is fp32.
        yield Refusal(
            "packed-weights",
            "QLoRA with FSDP2: accelerate casts every parameter to fp32, the packed 4-bit weights among them",
            where="layout.backend",
            remedy="pin backend ddp or deepspeed",
        )


def _numbers(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    job = spec.job
    yield from pure_fp16(job)
    if job.optimizer != "adamw_8bit":
        return
    if layout.backend == "fsdp2":
        # bitsandbytes' kernels take the addresses of plain tensors (optim/optimizer.py), but FSDP2's tensors are
        # DTensors.
        yield Refusal(
            "optimizer",
            "adamw_8bit with FSDP2: bitsandbytes steps whole tensors, and FSDP2 has shards of them (DTensor)",
            where="job.optimizer",
            remedy="take adamw, or pin backend ddp or deepspeed",
        )
    if layout.offload_optimizer:
        # accelerate utils/deepspeed.py, map_pytorch_optim_to_deepspeed replaces it with DeepSpeedCPUAdam.
        yield Refusal(
            "optimizer",
            "adamw_8bit with offload_optimizer: an optimizer in host memory is DeepSpeed's own Adam, in fp32",
            where="job.optimizer",
            remedy="take adamw, or leave offload_optimizer out",
        )


def _liger(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    if not layout.fused_linear_cross_entropy:
        return
    where, remedy = "layout.fused_linear_cross_entropy", "leave it out"
    if spec.job.stage == "dpo":
        # model/model_utils/liger_kernel.py, require_logits.
        what = "stage dpo needs the logits, and LLaMA-Factory turns Liger's fused loss off for it"
        yield Refusal("liger", what, where=where, remedy=remedy, kind=LayoutError)
    if spec.model.model_type not in LIGER_MODEL_TYPES:
        what = f"LLaMA-Factory has no Liger kernels for {spec.model.model_type!r}, and trains without them"
        yield Refusal("liger", what, where=where, remedy=remedy, kind=ModelError)


def support_warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about valid settings that may surprise the user."""
    job = spec.job
    yield from usual_warnings(spec)
    if layout.backend == "fsdp2" and job.finetuning == "lora" and not job.pure_bf16:
        yield "accelerate keeps FSDP2's shards in fp32, also those of frozen weights; pure_bf16 keeps them in bf16"
    if layout.offload_optimizer and spec.cluster.nodes > 1:
        yield "offload compiles DeepSpeed's CPU Adam at start-up: every node needs a compiler and a CUDA toolkit"
