"""Build a job from a checked form: check its values against each other, the cluster and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan.errors import LayoutError, listed
from topoplan.specs.blocks import as_base
from topoplan.specs.cluster import Cluster
from topoplan.specs.draft import Document
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import ADAPTERS, USUAL_LORA_DROPOUT, Job, usual_learning_rate
from topoplan.specs.layout_parts import completed_recompute
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import Model
from topoplan.units import multiples_around

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
    if job.finetuning in ADAPTERS and job.lora_dropout is None and not document.is_run_document:
        # Every plan trains the same adapters. A run document describes a run that took its trainer's default.
        job = replace(job, lora_dropout=USUAL_LORA_DROPOUT)
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
    """Return the (packed) sequences of an epoch without the trainer's val_size; below 1 if nothing is left."""
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


_OF_BATCH = ("dp", "micro_batch_size", "gradient_accumulation_steps")


def check_pin(pin: Mapping[str, Any], cluster: Cluster, job: Job, *, where: Callable[[str], str]) -> None:
    """Raise LayoutError, with the failed equation, for a pin that no layout of this cluster and batch can meet."""

    def fail(key: str, what: str, remedy: str = "") -> NoReturn:
        raise LayoutError(f"pin: {what}", where=where(key), remedy=remedy)

    def product(keys: tuple[str, ...]) -> tuple[int, str, str]:
        """Return value, equation and last key of the product of the pinned keys."""
        pinned = [key for key in keys if key in pin]
        equation = " * ".join(f"{key} {pin[key]}" for key in pinned)
        return math.prod(pin[key] for key in pinned), equation, pinned[-1] if pinned else ""

    def must_divide(keys: tuple[str, ...], total: int, total_words: str, *, is_whole: bool) -> None:
        value, equation, key = product(keys)
        if not key:
            return
        if is_whole and all(key in pin for key in keys) and value != total:
            fail(key, f"{equation} = {value} != {total_words}", f"change one of them, or leave {keys[-1]} out")
        if total % value:
            rest = f"= {total % value}" if " * " not in equation else f"({value}) = {total % value}"
            other = f", or {total_words.split()[0]} {multiples_around(total, value)}" if keys is _OF_BATCH else ""
            fail(key, f"{total_words} % ({equation}) {rest}", f"expected a divisor of {total}{other}")

    domain = max(cluster.nvlink_domain_gpus, cluster.gpus_per_node)
    if pin.get("tp", 1) > domain:
        kind = "the NVLink domain" if cluster.nvlink_domain_gpus >= cluster.gpus_per_node else "one node"
        fail("tp", f"tp {pin['tp']} > {domain} GPUs of {kind}", f"expected tp of at most {domain}")
    gpus = cluster.world_size
    gpus_words = f"{gpus} GPUs ({cluster.nodes} nodes * {cluster.gpus_per_node})"
    must_divide(("tp", "pp", "cp", "dp"), gpus, gpus_words, is_whole=True)
    must_divide(("etp", "ep", "pp"), gpus, gpus_words, is_whole=False)
    batch = job.global_batch_size
    must_divide(_OF_BATCH, batch, f"global_batch_size {batch}", is_whole=True)
    if pin.get("vpp", 1) > 1 and pin.get("pp") == 1:
        fail("vpp", f"vpp {pin['vpp']} > 1 with pp 1", "a virtual pipeline needs pp of at least 2")
    if pin.get("sequence_parallel") and pin.get("tp") == 1:
        fail("sequence_parallel", "sequence_parallel with tp 1", "it splits along the TP group: needs tp of at least 2")
    if pin.get("overlap_param_gather") and pin.get("distributed_optimizer") is False:
        fail("overlap_param_gather", "overlap_param_gather without distributed_optimizer", "leave one of them out")
    try:
        completed_recompute(pin.get("recompute", {}), "")
    except LayoutError as error:
        fail("recompute", f"{error.what}; {error.expected}")
