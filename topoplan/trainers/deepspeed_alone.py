"""A DeepSpeed configuration whose trainer is not given: what it means for full fine-tuning of a model.

It is taken to be run by LLaMA-Factory or ms-swift, which both checkpoint activations unless told not to.
"""

from __future__ import annotations

import re
from pathlib import Path

from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.reading.parts import Part
from topoplan.reading.values import Keys, as_whole, at
from topoplan.specs.job import Job
from topoplan.specs.source import read_text
from topoplan.trainers.data_parallel import layout_of
from topoplan.trainers.sharding import of_document
from topoplan.units import shown


def gpus_of(keys: Keys) -> int | None:
    """The only number of GPUs that the three batch sizes allow; None where they leave it open."""
    total, micro, steps = (
        as_whole(keys.given(key))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if not (total and micro and steps) or min(total, micro, steps) < 1 or total % (micro * steps):
        return None
    return total // (micro * steps)


def alone_layout(keys: Keys, world: int) -> Layout:
    """The layout on `world` GPUs."""
    micro = as_whole(keys.given("train_micro_batch_size_per_gpu")) or 1
    steps = as_whole(keys.given("gradient_accumulation_steps")) or 1
    if not (0 < micro < 10**6 and 0 < steps < 10**6):
        keys.fail("train_micro_batch_size_per_gpu", f"a batch of {shown(micro)} * {shown(steps)}")
    return layout_of(
        of_document(keys.configuration.source.data, keys, "zero_optimization"),
        world,
        checkpoints=True,
        fused=False,
        expandable=False,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
    )


def assumptions(job: Job) -> tuple[str, ...]:
    """What the file does not say."""
    return (
        "a DeepSpeed file says nothing of model, training and sequences: give the trainer's YAML or command too",
        f"full fine-tuning with gradient checkpointing, and sequences of {job.seq_len:,} tokens (--seq-len)",
    )


def alone_job(keys: Keys, layout: Layout, seq_len: int) -> Job:
    """The job."""
    is_fp16 = at(keys.configuration.source.data, ("fp16", "enabled")) is True
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision="fp16" if is_fp16 else "bf16",
    )


def model_in_text(part: Part) -> str | None:
    """The one model of the catalog that the document around a configuration names, however often; None for more."""
    if not part.label:
        return None
    try:
        text = read_text(Path(part.name)).lower()
    except SpecError:
        return None
    found = set()
    for name in catalog.model_names():
        word = re.escape(name.rpartition("/")[2].lower())
        if re.search(rf"(?<![a-z0-9.-]){word}(?![a-z0-9.]|-[a-z0-9])", text):
            found.add(name)
    return found.pop() if len(found) == 1 else None
