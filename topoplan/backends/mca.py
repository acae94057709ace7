"""What LLaMA-Factory's Megatron path (mcore_adapter) can train at all."""

from __future__ import annotations

from topoplan.errors import ModelError, SpecError
from topoplan.specs.spec import Spec

SUPPORTED_MODEL_TYPES = frozenset(
    "deepseek_v3 glm4_moe llama mistral mixtral qwen2 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3 qwen3_moe "
    "qwen3_next qwen3_5 qwen3_5_moe".split()
)
"""MCA_SUPPORTED_MODELS in LLaMA-Factory 0.9.5, `extras/constants.py`."""


def check_job(spec: Spec) -> None:
    """Raise ModelError or SpecError for a model or a job that no layout would help."""
    model_type = spec.model.model_type
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"the MCA trainer does not support model_type {model_type!r} ({spec.model.name})",
            where=spec.path or "",
            expected=f"expected one of {', '.join(sorted(SUPPORTED_MODEL_TYPES))}",
            remedy="`topoplan predict` with backend megatron still predicts it",
        )
    check_precision(spec)
    if spec.job.finetuning != "full":
        raise SpecError(
            f"finetuning {spec.job.finetuning!r}: the MCA trainer parses it and trains all weights all the same",
            where=spec.path or "",
            expected="expected full",
        )


def check_precision(spec: Spec) -> None:
    """Raise SpecError when the card lacks the job's precision."""
    gpu, precision = spec.cluster.gpu, spec.job.precision
    if precision == "bf16" and gpu.bf16_flops < gpu.fp16_flops / 2:
        raise SpecError(
            f"{gpu.name} has no bf16 tensor cores", where=spec.path or "", remedy="set precision: fp16 in the job"
        )
    if precision in ("fp8", "mxfp8") and not gpu.fp8_flops:
        raise SpecError(f"{gpu.name} has no fp8 tensor cores", where=spec.path or "", remedy="set precision: bf16")
    if precision == "mxfp8" and gpu.architecture != "blackwell":
        raise SpecError(f"{gpu.name} has no mxfp8; Blackwell does", where=spec.path or "", remedy="set precision: fp8")
    if precision == "nvfp4" and not gpu.fp4_flops:
        raise SpecError(f"{gpu.name} has no fp4 tensor cores", where=spec.path or "", remedy="set precision: bf16 or fp8")


