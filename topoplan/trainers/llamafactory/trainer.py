"""LLaMA-Factory: on Megatron-core through mcore_adapter, and on transformers with DeepSpeed, FSDP2 or plain DDP."""

from __future__ import annotations

import re

from topoplan.on_demand import OnDemand
from topoplan.trainers.llamafactory.common import VERSIONS
from topoplan.trainers.llamafactory.mca import MEGATRON
from topoplan.trainers.llamafactory.plain import PLAIN
from topoplan.trainers.log import Log, loss_key, tqdm_bar, value_of
from topoplan.trainers.trainer import Trainer

_LOG = Log(
    bar=tqdm_bar(),
    loss=loss_key("loss"),
    steps=re.compile(r'"current_steps": ?(?P<step>[0-9]{1,12}), ?"total_steps": ?(?P<total>[0-9]{1,12})'),
    elapsed=re.compile(
        r'"elapsed_time": ?"(?:(?P<days>[0-9]{1,6}) days?, )?(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{2}):'
        r'(?P<seconds>[0-9]{2})"'
    ),
    allocated=value_of("vram_allocated", "gib"),
    reserved=value_of("vram_reserved", "gib"),
    peaks_of_rank_0=True,
    file="trainer_log.jsonl",
)
"""LLaMA-Factory logs through transformers. `ProgressCallback` (transformers/trainer_callback.py) draws a tqdm bar with
the number of steps on standard error of global rank 0, and writes `{'loss': ...}` to its standard output. With
`disable_tqdm`, `PrinterCallback` prints on the first rank of every node, without the step number. LLaMA-Factory's own
`LogCallback` (llamafactory/train/callbacks.py) writes lines of JSON to trainer_log.jsonl: the time since the start in
whole seconds and, with RECORD_VRAM=1, the memory peaks of the writing process, which is global rank 0."""

LLAMA_FACTORY = Trainer(
    name="llamafactory",
    title=VERSIONS.title,
    training_paths=(MEGATRON, PLAIN),
    log=_LOG,
    versions=VERSIONS,
    recognizers=OnDemand("topoplan.trainers.llamafactory.reading:LLAMAFACTORY"),
    rules="topoplan.trainers.llamafactory.rules",
    usual_for=("full", "freeze", "qlora"),
)
