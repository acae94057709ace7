"""What LLaMA-Factory cannot do with DeepSpeed, FSDP2 or plain data parallel training, and ignores without a word.

Sources are named by their file at LLaMA-Factory 0.9.5, transformers 5.6, accelerate 1.11 and DeepSpeed 0.19.
"""

from __future__ import annotations

from topoplan.engines.data_parallel.parameter_bytes import check_packing
from topoplan.errors import LayoutError, ModelError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec

FREEZABLE_MODEL_TYPES = frozenset(
    [
        *("dots_ocr", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "interns1"),
        *("internvl", "Keye", "kimi_vl", "llama4", "llava", "llava_next", "llava_next_video"),
        *("minicpmo", "minicpmv", "minicpmv4_6", "mistral3", "mllama", "paligemma"),
        *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "video_llava"),
    ]
)
"""Types whose parts it can freeze (model/model_utils/visual.py, COMPOSITE_MODELS); for others the keys do nothing."""

LIGER_MODEL_TYPES = frozenset(
    [
        *("gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4v", "gpt_oss", "granite", "llama", "llava"),
        *("mistral", "mixtral", "mllama", "olmo2", "paligemma", "phi3", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3"),
        *("qwen3_5", "qwen3_moe", "qwen3_next"),
    ]
)
"""Types that it has Liger's kernels for (model/model_utils/liger_kernel.py); for others it warns and does without."""

_STAGES = ("pt", "sft", "dpo")
_PRECISIONS = ("bf16", "fp16")


def check_plain(spec: Spec, layout: Layout) -> None:
    """Raise for what the trainer would refuse, ignore in part or train otherwise than planned."""
    if layout.world_size != spec.cluster.world_size:
        raise LayoutError(
            f"cp {layout.cp} * ulysses {layout.ulysses} * dp {layout.dp} = {layout.world_size} GPUs,"
            f" and the cluster has {spec.cluster.world_size}"
        )
    _check_splits(layout)
    _check_job(spec)
    _check_quantization(spec, layout)
    _check_numbers(spec, layout)
    _check_offload(spec, layout)
    _check_liger(spec, layout)


def _check_splits(layout: Layout) -> None:
    if layout.backend == "deepspeed" and layout.zero_stage not in (1, 2, 3):
        raise LayoutError(
            f"zero_stage {layout.zero_stage}", where="layout.zero_stage", expected="expected 1, 2 or 3 with deepspeed"
        )
    if layout.ulysses > 1 or layout.cp > 1:
        # Its experimental v1 trainer has Ulysses (v1/plugins/model_plugins/parallelization), and takes other YAML.
        key = "ulysses" if layout.ulysses > 1 else "cp"
        raise LayoutError(
            f"{key} {max(layout.ulysses, layout.cp)}: LLaMA-Factory's trainer splits no sequences",
            where=f"layout.{key}",
            remedy=f"pin {key}=1, or take another trainer",
        )
    if layout.backend == "fsdp2" and layout.sharding == "hybrid":
        # accelerate has it (ParallelismConfig), and transformers 5 asks that for `sp_backend`, which 1.12 brought;
        # LLaMA-Factory 0.9.5 takes accelerate up to 1.11.
        raise LayoutError(
            "hybrid sharding: LLaMA-Factory's accelerate (1.11) and transformers 5 do not agree on its configuration",
            where="layout.sharding",
            remedy="pin sharding=full, or take another trainer",
        )
    if layout.recompute.granularity == "selective":
        raise LayoutError(
            "selective recomputation is Megatron's: gradient checkpointing takes whole layers",
            where="layout.recompute",
            expected="expected none or full",
        )


def _check_job(spec: Spec) -> None:
    job, model = spec.job, spec.model
    if job.stage not in _STAGES:
        raise SpecError(f"stage {job.stage!r}", where="job.stage", expected="expected pt, sft or dpo")
    if job.precision not in _PRECISIONS:
        raise SpecError(
            f"precision {job.precision!r} is planned for the Megatron backends alone",
            where="job.precision",
            expected="expected bf16 or fp16",
        )
    if job.mtp_num_layers:
        raise SpecError(
            "Hugging Face models are trained without their multi-token-prediction layers",
            where="job.mtp_num_layers",
            remedy="leave it out",
        )
    vision = model.vision is not None
    if (
        vision
        and model.model_type not in FREEZABLE_MODEL_TYPES
        and (job.freeze_vision_tower or job.freeze_multi_modal_projector or job.freeze_language_model)
    ):
        raise ModelError(
            f"LLaMA-Factory does not know the parts of {model.model_type!r}, and would freeze none of them",
            where=model.name,
            remedy="set the freeze_ keys of the job to false, to train all of it",
        )
    if vision and job.finetuning == "freeze" and not (job.freeze_vision_tower and not job.freeze_language_model):
        # model/adapter.py, _setup_freeze_tuning matches `.35.` anywhere in a name, in the vision tower's blocks too.
        raise SpecError(
            "finetuning freeze chooses layers by number, and means those of the language model",
            where="job.freeze_language_model" if job.freeze_language_model else "job.freeze_vision_tower",
            expected="expected freeze_vision_tower: true and freeze_language_model: false",
        )


def _check_quantization(spec: Spec, layout: Layout) -> None:
    job = spec.job
    check_packing(job)
    if job.finetuning != "qlora":
        return
    bits = job.quantization_bit or 4
    if bits == 8 and (layout.backend == "fsdp2" or layout.zero_stage == 3):
        # model/model_utils/quantization.py, configure_quantization.
        raise SpecError(
            "LLaMA-Factory splits 4-bit weights over ranks, and no 8-bit ones (ZeRO-3, FSDP)",
            where="job.quantization_bit",
            remedy="set quantization_bit: 4, or pin backend ddp or zero_stage 2",
        )
    if layout.backend == "fsdp2":
        # accelerate utils/fsdp_utils.py, fsdp2_prepare_model: `model.to(torch.float32)` unless the model is fp32.
        raise LayoutError(
            "QLoRA with FSDP2: accelerate casts every parameter to fp32, the packed 4-bit weights among them",
            where="layout.backend",
            remedy="pin backend ddp or deepspeed",
        )


def _check_numbers(spec: Spec, layout: Layout) -> None:
    job = spec.job
    if job.pure_bf16 and job.precision != "bf16":
        raise SpecError("pure_bf16 with precision fp16", where="job.pure_bf16", remedy="leave one of them out")
    if job.pure_bf16 and layout.backend == "deepspeed":
        # hparams/parser.py refuses ZeRO-3; DeepSpeed stage_1_and_2.py, single_partition_of_fp32_groups, for the others.
        raise SpecError(
            "pure_bf16 with DeepSpeed: LLaMA-Factory refuses it for ZeRO-3, and ZeRO-1 and 2 keep fp32 weights and"
            " moments whatever it says",
            where="job.pure_bf16",
            remedy="leave it out, or pin backend ddp or fsdp2",
        )
    if job.optimizer != "adamw_8bit":
        return
    if layout.backend == "fsdp2":
        # Its kernels take the addresses of plain tensors (bitsandbytes optim/optimizer.py); FSDP2's are DTensors.
        raise SpecError(
            "adamw_8bit with FSDP2: bitsandbytes steps whole tensors, and FSDP2 has shards of them (DTensor)",
            where="job.optimizer",
            remedy="take adamw, or pin backend ddp or deepspeed",
        )
    if layout.offload_optimizer:
        # accelerate utils/deepspeed.py, map_pytorch_optim_to_deepspeed puts DeepSpeedCPUAdam in place of it.
        raise SpecError(
            "adamw_8bit with offload_optimizer: an optimizer in host memory is DeepSpeed's own Adam, in fp32",
            where="job.optimizer",
            remedy="take adamw, or leave offload_optimizer out",
        )


def _check_offload(spec: Spec, layout: Layout) -> None:
    if layout.offload_param and layout.zero_stage != 3:
        # DeepSpeed runtime/zero/config.py: offload_param is "valid only with stage 3".
        raise LayoutError("offload_param needs ZeRO-3", where="layout.offload_param", remedy="pin zero_stage=3")
    offloads = layout.offload_optimizer or layout.offload_param or layout.offload
    if offloads and spec.cluster.host_memory_bytes is None:
        raise SpecError(
            "offload needs host memory, and the spec does not say how much a node has",
            where="host_memory",
            expected="expected a size such as 1TiB",
        )


def _check_liger(spec: Spec, layout: Layout) -> None:
    if not layout.fused_linear_cross_entropy:
        return
    if spec.job.stage == "dpo":
        # model/model_utils/liger_kernel.py, require_logits.
        raise LayoutError(
            "stage dpo needs the logits, and LLaMA-Factory turns Liger's fused loss off for it",
            where="layout.fused_linear_cross_entropy",
            remedy="leave it out",
        )
    if spec.model.model_type not in LIGER_MODEL_TYPES:
        raise ModelError(
            f"LLaMA-Factory has no Liger kernels for {spec.model.model_type!r}, and trains without them",
            where="layout.fused_linear_cross_entropy",
            remedy="leave it out",
        )
