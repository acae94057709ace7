"""A DeepSpeed configuration without its trainer's: what it means for full fine-tuning of a model.

The trainer is assumed to be LLaMA-Factory or ms-swift, which both use gradient checkpointing by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration
from topoplan.reading.values import Keys, as_whole, at
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.source import read_text
from topoplan.trainers.codec import Codec, Reading, Row, by_key
from topoplan.trainers.data_parallel import ALLOCATOR_ROW, read_layout, recompute_row, zero_words
from topoplan.trainers.models import model_of
from topoplan.trainers.sharding import sharding_of_document
from topoplan.units import shown


def gpus_of(keys: Keys) -> int | None:
    """Return the number of GPUs that follows from the three batch sizes; None if they leave it open."""
    total, micro, steps = (
        as_whole(keys.given(key))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if not (total and micro and steps) or min(total, micro, steps) < 1 or total % (micro * steps):
        return None
    return total // (micro * steps)


def _size(reading: Reading, key: str) -> int:
    """Return a factor of the batch size; `auto` is taken to be 1."""
    size = as_whole(reading.keys.given(key)) or 1
    if not 0 < size < 10**6:
        reading.keys.fail(key, f"{key} is {shown(size)}")
    return size


ROWS = by_key(
    Row("zero_optimization", show=lambda _, layout: zero_words(layout)),
    Row("train_micro_batch_size_per_gpu", "micro_batch_size", _size),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps", _size),
    recompute_row("gradient_checkpointing"),
    replace(ALLOCATOR_ROW, read=lambda reading, key: False),
)


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    sharding = sharding_of_document(keys.configuration.source.data, keys, "zero_optimization")
    reading.sharding = replace(sharding, checkpoints=True)
    return read_layout(ROWS, reading)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    is_fp16 = at(reading.keys.configuration.source.data, ("fp16", "enabled")) is True
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision="fp16" if is_fp16 else "bf16",
    )


def _assumptions(reading: Reading, _: Layout, job: Job) -> Iterator[str]:
    yield "a DeepSpeed file says nothing of model, training and sequences: give the trainer's YAML or command too"
    yield f"full fine-tuning with gradient checkpointing, and sequences of {job.seq_len:,} tokens (--seq-len)"


def _model(configuration: Configuration, given: str, seq_len: int) -> tuple[Model, str]:
    reference = given or model_in_text(configuration.part)
    if reference is None:
        raise SpecError(
            "only a DeepSpeed configuration, without a model",
            where=configuration.part.place(None),
            remedy="name it with --model, or give the trainer's YAML or command too",
        )
    model, _ = model_of(configuration, reference, seq_len)
    return model, "" if given else f"the model is {model.name}, the only one that the text names"


def model_in_text(part: Part) -> str | None:
    """Return the only catalog model named in the document around a configuration; None if there are none or several."""
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


CODEC = Codec(
    reads="deepspeed",
    rows=ROWS,
    defaults=dict,
    needs_length=False,
    model=_model,
    gpus=gpus_of,
    layout=_layout,
    job=_job,
    assumptions=_assumptions,
)
