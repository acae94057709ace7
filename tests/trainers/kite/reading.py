"""How Kite's files are recognized, and what their keys mean: one row per key, which writes it and reads it back."""

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.recognizer import Recognizer
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, Row, by_key, layout_of
from topoplan.trainers.data_parallel import recompute_row
from topoplan.trainers.refusal import Refusal


def _claim(data: Mapping[str, Any], _known: int) -> float:
    return 2.0 * sum(key.startswith("kite_") for key in data)


RECOGNIZER = Recognizer(
    trainer="kite",
    claim=_claim,
    keys=lambda: ("kite_model", "kite_data", "kite_tokens"),
    model_keys=("kite_model",),
    programs=r"kite\.fly",
    program_substring="kite",
)

ROWS = by_key(
    Row("kite_batch", "micro_batch_size", comment="a GPU, as it was planned"),
    Row("kite_waits", "gradient_accumulation_steps"),
    Row(
        "kite_shards",
        "backend",
        lambda reading, key: "fsdp2" if reading.keys.flag(key) else "ddp",
        write=lambda _, layout: layout.backend == "fsdp2",
    ),
    recompute_row("kite_forgets"),
)


def _layout(reading: Reading) -> Layout:
    is_sharded = reading.keys.flag("kite_shards")
    return layout_of(ROWS, reading, distributed_optimizer=False, grad_reduce_in_fp32=not is_sharded)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    return Job(seq_len=seq_len, global_batch_size=batch, stage=str(reading.keys.value("kite_stage")))


def _refusals(spec: Spec) -> Iterator[Refusal]:
    if spec.job.stage != "sft":
        yield Refusal("stage", f"stage {spec.job.stage}: Kite has supervised fine-tuning alone")


CODEC = Codec(
    reads="kite",
    rows=ROWS,
    defaults=lambda: {"kite_stage": "sft"},
    length="kite_tokens",
    layout=_layout,
    job=_job,
    refusals=_refusals,
)
