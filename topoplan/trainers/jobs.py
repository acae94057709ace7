"""What a backend cannot run with any layout, and what is known of the models that it runs."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import MEGATRON_BACKENDS
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory import mca_refusals as mca
from topoplan.trainers.swift import refusals as swift


def check_backend(spec: Spec, backend: str) -> None:
    """Raise ModelError or SpecError for a job that is not predicted under a backend."""
    if backend in MEGATRON_BACKENDS:
        swift.check_finetuning(spec.job, spec.model, backend, spec.path or "")
        mca.check_optimizer(spec.job, spec.path or "")
    if backend == "mca":
        mca.check_token_prediction(spec)


def check_search(spec: Spec, backend: str) -> None:
    """Raise ModelError or SpecError for a job that the trainers of a backend cannot run with any layout."""
    if backend == "mca":
        mca.check_job(spec)
    else:
        check_backend(spec, backend)
        if backend == "megatron" and spec.job.finetuning == "lora":
            swift.check_model_type(spec.model)
    mca.check_precision(spec)


def model_warnings(model: Model, backend: str) -> Iterator[str]:
    """What a user should know of a model under a backend."""
    if backend != "mca":
        return
    if model.model_type not in mca.SUPPORTED_MODEL_TYPES:
        yield f"the MCA trainer does not support model_type {model.model_type!r}"
    if model.model_type == "qwen3_next":
        yield "mcore_adapter 0.10 cannot build Qwen3-Next on megatron-core 0.15.3 to 0.16.1: try the trainer first"
