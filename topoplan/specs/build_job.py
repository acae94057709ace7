"""Build a job from a checked form: check its values against each other, the cluster and the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from topoplan.errors import listed
from topoplan.specs.blocks import as_base
from topoplan.specs.cluster import Cluster
from topoplan.specs.document import Document
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job, usual_learning_rate
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import Model
from topoplan.specs.pins import check_pin

if TYPE_CHECKING:
    from topoplan.specs.forms import JobForm


def build_job(document: Document, cluster: Cluster, model: Model, form: JobForm, lengths: Lengths | None) -> Job:
    """Return the job, checked against the cluster and the model. Raises SpecError, or LayoutError for a pin."""
    pin = form.pin.given() if form.pin else {}
    job = as_base(Job, form, lengths=lengths, pin=pin)
    if not document.has("job", "packing"):
        job = replace(job, packing=job.stage == "pt")
    if not document.has("job", "learning_rate"):
        job = replace(job, learning_rate=usual_learning_rate(job.finetuning, job.stage))
    if lengths is not None and job.samples is None:
        sequences = sequences_of(job, lengths)
        if sequences < 1:
            document.fail(
                ("job", "seq_len"),
                f"{lengths.samples} samples of {lengths.source} fill no sequence of {job.seq_len} tokens",
                remedy="lower seq_len, or take more data",
            )
        job = replace(job, samples=sequences)
    _check_precision(document, job, cluster.gpu)
    _check_something_trained(document, job, model)
    _check_tuner(document, job, model)
    _check_token_prediction(document, job, model)
    check_pin(pin, cluster, job, where=lambda key: document.place(("job", "pin", key)))
    return job


def sequences_of(job: Job, lengths: Lengths) -> int:
    """Return the sequences (packed ones with packing) in one epoch, after the trainer's val_size is held out.

    It is below 1 if nothing is left.
    """
    held_back = job.trainer.get("val_size")
    rest = lengths.samples
    if isinstance(held_back, int | float) and held_back > 0:
        rest -= math.ceil(rest * held_back) if held_back < 1 else int(held_back)
    if rest > 0:
        packing = replace(job, lengths=replace(lengths, samples=rest)).packed
        rest = packing.sequences if packing else rest
    return rest


def _check_precision(document: Document, job: Job, gpu: Gpu) -> None:
    rates = {"fp8": gpu.fp8_flops, "mxfp8": gpu.fp8_flops, "nvfp4": gpu.fp4_flops}
    # A run document describes a run that happened, and some call Hopper's block-scaled fp8 mxfp8.
    has_mx = gpu.architecture == "blackwell" or document.is_run_document
    names = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    usable = [name for name in names if rates.get(name, 1.0) and (name != "mxfp8" or has_mx)]
    if job.precision not in usable:
        what = f"{gpu.name} ({gpu.architecture}) does not compute in {job.precision}"
        document.fail(("job", "precision"), what, expected=f"expected {listed(usable, 'or')}")


def _check_something_trained(document: Document, job: Job, model: Model) -> None:
    frozen = job.freeze_language_model and (
        model.vision is None or (job.freeze_vision_tower and job.freeze_multi_modal_projector)
    )
    if frozen and job.finetuning in ("full", "freeze"):
        document.fail(
            ("job", "freeze_language_model"),
            "everything is frozen, so nothing would be trained",
            remedy="leave it out" if model.vision is None else "set one of the freeze_ keys to false",
        )


def _check_tuner(document: Document, job: Job, model: Model) -> None:
    if job.quantization_bit not in (None, 4, 8):
        document.fail(("job", "quantization_bit"), str(job.quantization_bit), expected="expected 4 or 8")
    layers, most = job.freeze_trainable_layers, model.num_layers
    if job.finetuning == "freeze" and not 1 <= abs(layers) <= most:
        expected = f"expected 1 to {most}, or -1 to -{most}"
        document.fail(("job", "freeze_trainable_layers"), f"{layers} of {most} layers", expected=expected)


def _check_token_prediction(document: Document, job: Job, model: Model) -> None:
    count, path = job.mtp_num_layers, ("job", "mtp_num_layers")
    if 0 < model.mtp_layers < count:
        what = f"{count} > {model.mtp_layers} multi-token-prediction layers of {model.name}"
        document.fail(path, what, expected=f"expected at most {model.mtp_layers}")
    if count and model.learned_positions:
        # Megatron-LM `training/arguments.py` allows rotary positions or none.
        document.fail(path, f"{model.name} has learned positions, and Megatron's layers need rotary ones")
    if count and job.stage == "dpo":
        # `core/models/gpt/gpt_model.py::_postprocess` clones the labels, which are not passed to the model under DPO.
        document.fail(path, "Megatron's layers take their loss from labels, which stage dpo has none of")
