"""How a configuration of a data-parallel trainer shares out its states: DeepSpeed, FSDP, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from topoplan.check.job.processes import processes_for
from topoplan.check.job.values import Keys
from topoplan.check.read.setup import Configuration, Setup
from topoplan.specs.source import below

_NAMED_STAGE = re.compile(r"(?:zero|(?:^|[/_])z)_?([0-3])(?!\d)", re.IGNORECASE)
"""`zero2`, `zero3_offload` (ms-swift's own), `ds_z3_offload_config.json` (LLaMA-Factory's examples)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a data-parallel configuration shares out its states."""

    name: str
    """`ZeRO-2`, `FSDP`, `plain data parallelism`."""
    stage: int
    offload_optimizer: str = ""
    """cpu or nvme; empty on the GPU."""
    offload_param: str = ""
    keys: tuple[str, ...] = ("deepspeed",)
    """Where it is said."""
    is_sure: bool = True
    """Nothing that was not given may say otherwise: `accelerate launch` with FSDP in a file of its own does."""

    @property
    def uses_nvme(self) -> bool:
        """Some of what is offloaded goes to disks."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


def sharding_of(keys: Keys, setup: Setup) -> Sharding | None:
    """The sharding of a configuration; None where files or a launcher that are not known decide it."""
    configuration = keys.configuration
    written = keys.given("deepspeed")
    if written:
        return _of_deepspeed(written, configuration, setup)
    launch = processes.launch if (processes := processes_for(setup, configuration)) else None
    starter = launch.starter if launch else ""
    if keys.given("fsdp"):
        words = str(keys.given("fsdp")).split()
        if "full_shard" in words and "offload" not in words:
            return Sharding(name="FSDP full_shard", stage=3, keys=("fsdp",))
        return None
    if starter in ("accelerate", "deepspeed"):
        return None  # the sharding is in a file of theirs
    if configuration.trainer == "swift" and not starter and not (launch and launch.variable("NPROC_PER_NODE")):
        return None  # one process, which spreads the model over all GPUs that it sees
    keys_of_tuning = ("finetuning_type", "train_type", "tuner_type")
    return Sharding(name="plain data parallelism", stage=0, keys=keys_of_tuning, is_sure=launch is not None)


def _of_deepspeed(written: Any, configuration: Configuration, setup: Setup) -> Sharding | None:
    document = written if isinstance(written, Mapping) else _document(str(written), configuration, setup)
    if document is None:
        name = PurePath(str(written)).name
        match = _NAMED_STAGE.search(name)
        if match is None:
            return None
        stage, offloads = int(match[1]), "cpu" if "offload" in name else ""
        return Sharding(
            name=f"ZeRO-{stage}", stage=stage, offload_optimizer=offloads, offload_param=offloads if stage == 3 else ""
        )
    zero = document.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return None
    places = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    devices = [str(place.get("device", "cpu")) if isinstance(place, Mapping) else "" for place in places]
    optimizer, param = ("" if device == "none" else device for device in devices)
    return Sharding(name=f"ZeRO-{stage}", stage=stage, offload_optimizer=optimizer, offload_param=param)


def _document(name: str, configuration: Configuration, setup: Setup) -> Mapping[str, Any] | None:
    """The DeepSpeed file that a key names, among what was given or beside it; else the only one that was given."""
    given = list(setup.of("deepspeed"))
    for one in given:
        if PurePath(one.part.name).name == PurePath(name).name:
            return one.source.data
    for base in (Path.cwd(), Path(configuration.part.name).parent):
        try:
            found = json.loads(below(base, name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None
