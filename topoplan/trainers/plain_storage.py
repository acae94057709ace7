"""The sizes of a checkpoint without Megatron: what transformers, DeepSpeed, accelerate and PEFT save in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout
from topoplan.operators.finetuning import elements_of
from topoplan.operators.params import parameter_count
from topoplan.specs.case import case_with
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.traits import MCA

_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0}
"""Bytes of Adam's two moments, a trained parameter."""


def plain_checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """The checkpoints of a run with these trainer keys.

    transformers trainer.py, _save_checkpoint: weights for Hugging Face (of LoRA the adapters alone) in the type that
    they are trained in, and the optimizer's state. DeepSpeed saves an fp32 copy of what is trained and the weights of
    its engine with it (runtime/engine.py, save_checkpoint); accelerate the weights once more with FSDP
    (utils/fsdp_utils.py, save_fsdp_model), both in their own form.
    """
    job = spec.job
    trained = elements_of(spec.model, job).trained
    saved = trained if job.finetuning in ("lora", "qlora") else parameter_count(spec.model)
    width = 2 if job.pure_bf16 or layout.backend == "deepspeed" else 4
    moments = 4.0 if job.pure_bf16 and job.optimizer == "adamw" else _MOMENTS[job.optimizer]
    copies = {"ddp": 0.0, "deepspeed": 4.0 * trained + 2.0 * saved, "fsdp2": float(width) * saved}
    state = 0.0 if values.get("save_only_model") else moments * trained + copies[layout.backend]
    limit = values.get("save_total_limit")
    return CheckpointSize(
        megatron_bytes=0,
        hf_bytes=width * saved,
        optimizer_bytes=round(state),
        at_once=0 if values.get("save_strategy") == "no" else None if limit is None else max(1, int(limit)) + 1,
    )


def megatron_trained_parameters(spec: Spec) -> int:
    """Parameters of Megatron's model that get a gradient: adapters are on its own linear layers, experts among them."""
    parameters = stage_parameters(case_with(spec, MCA), Layout(), 0)
    return parameters.dense + parameters.expert
