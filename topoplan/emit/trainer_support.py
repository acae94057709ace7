"""What the Megatron (MCA) trainer cannot do, and what it does otherwise than one would think."""

from __future__ import annotations

import math

from topoplan.emit.trainer_keys import templates
from topoplan.errors import LayoutError, ModelError, SpecError, nearest
from topoplan.layout.layout import Layout
from topoplan.layout.rules import pad_multiple, pads_to_seq_len, sequence_parts
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec

_STAGES = ("pt", "sft", "dpo")


def check_supported(spec: Spec, layout: Layout) -> None:
    """Raise for a model, job or layout that the trainer would refuse, or train otherwise than planned."""
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
    parts, pad, fixed_length = sequence_parts(layout), pad_multiple(job), pads_to_seq_len(job, layout)
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


def trainer_warnings(spec: Spec, layout: Layout) -> list[str]:
    """What is right to write and may still surprise."""
    job, model = spec.job, spec.model
    found = []
    if job.samples is not None and job.samples < job.global_batch_size:
        found.append(
            f"{job.samples} samples are fewer than the global batch of {job.global_batch_size}: no step can be filled"
        )
    if job.dataset is not None and any(name.strip().endswith((".json", ".jsonl")) for name in job.dataset.split(",")):
        found.append(
            f"the trainer takes no files as data sets: enter {job.dataset} in dataset_info.json and set job.dataset to"
            " the name there"
        )
    pad = pad_multiple(job)
    if job.seq_len % pad:
        longest = math.ceil(job.seq_len / pad) * pad
        found.append(f"cutoff_len {job.seq_len} is no multiple of {pad}: full sequences are padded to {longest} tokens")
    if model.vision is not None and job.stage == "pt":
        found.append("stage pt freezes nothing: the vision tower and its projector are trained too")
    if job.template is not None and job.template not in templates().names:
        close = nearest(job.template, templates().names)
        found.append(
            f"LLaMA-Factory {templates().version} has no template {job.template!r}" + (f"; {close}" if close else "")
        )
    if spec.cluster.gpu.architecture == "volta" and job.precision == "bf16":
        found.append(f"{spec.cluster.gpu.name} has no bf16 units: precision fp16 is the faster one")
    return found
