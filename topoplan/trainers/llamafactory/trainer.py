"""LLaMA-Factory: on Megatron-core through mcore_adapter, and on transformers with DeepSpeed, FSDP2 or plain DDP."""

from __future__ import annotations

import re

from topoplan.trainers.llamafactory.common import VERSIONS
from topoplan.trainers.llamafactory.mca import MEGATRON
from topoplan.trainers.llamafactory.plain import PLAIN
from topoplan.trainers.llamafactory.reading import LLAMAFACTORY
from topoplan.trainers.log import Log, loss_key, tqdm_bar
from topoplan.trainers.trainer import Trainer

_LOG = Log(
    bar=tqdm_bar(),
    loss=loss_key("loss"),
    steps=re.compile(r'"current_steps": (?P<step>[0-9]{1,12}), "total_steps": (?P<total>[0-9]{1,12})'),
)
"""It prints through transformers: `ProgressCallback` (transformers/trainer_callback.py) draws a tqdm bar on standard
error on the first rank of all, with the number of steps, and writes `{'loss': ...}` on its standard output; with
`disable_tqdm` it is `PrinterCallback`, on the first rank of every node, and no line says which step it is. Its own
`LogCallback` (llamafactory/train/callbacks.py) writes lines of JSON to trainer_log.jsonl."""

LLAMA_FACTORY = Trainer(
    name="llamafactory",
    title=VERSIONS.title,
    ways=(MEGATRON, PLAIN),
    log=_LOG,
    versions=VERSIONS,
    recognisers=(LLAMAFACTORY,),
    rules="topoplan.trainers.llamafactory.rules",
    usual_for=("full", "freeze", "qlora"),
)
