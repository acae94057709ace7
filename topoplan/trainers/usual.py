"""Defaults for every trainer's files if the spec says nothing: warm-up, saving, data-loading processes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator

from topoplan.layout.layout import Layout
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.units import file_name

DIGEST_CHARACTERS = 8
WARMUP_FRACTION = 0.03
"""Fraction of all steps."""
DDP_TIMEOUT_S = 7200
SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""Value for accelerator_config; otherwise transformers `trainer.py` runs all but the last micro-batch in no_sync."""
WHY_SYNC = "reduces gradients to their shards after each micro batch; otherwise each GPU accumulates full gradients"
_WARMUP_STEPS_WHEN_UNKNOWN = 20
_SAVES_A_RUN = 5
_SAVE_STEPS_WHEN_UNKNOWN = 200
_MOST_WORKERS = 16
_MOST_LOADERS = 4


def run_name(model: Model, plan_id: str, identity: object) -> str:
    """Return the name of a run and its output: model, plan, and a digest of everything that distinguishes runs."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{file_name(model.name.rstrip('/').rpartition('/')[2], 'model')}-{plan_id}-{digest}"


def must_say_sync(layout: Layout) -> bool:
    """Whether a trainer that uses accelerate needs SYNC_EACH_BATCH in its files to reduce gradients as planned."""
    return layout.backend == "fsdp2" and layout.sync_each_batch and layout.gradient_accumulation_steps > 1


def says_sync(accelerator_config: object) -> bool:
    """Whether an accelerator_config makes the trainer reduce gradients after every micro-batch."""
    config = accelerator_config if isinstance(accelerator_config, dict) else {}
    kwargs = config.get("gradient_accumulation_kwargs")
    return isinstance(kwargs, dict) and kwargs.get("sync_each_batch") is True


def warmup_steps(steps: int | None) -> int:
    """Return the number of warm-up steps for a run of `steps`; None if that number is unknown."""
    return _WARMUP_STEPS_WHEN_UNKNOWN if steps is None else max(1, round(WARMUP_FRACTION * steps))


def save_steps(steps: int | None) -> int:
    """Return the number of steps between checkpoints."""
    return _SAVE_STEPS_WHEN_UNKNOWN if steps is None else max(1, math.ceil(steps / _SAVES_A_RUN))


def workers(cluster: Cluster) -> int:
    """Return the number of tokenizing processes per node."""
    return _MOST_WORKERS if cluster.cpu_cores is None else min(_MOST_WORKERS, cluster.cpu_cores)


def loaders(cluster: Cluster) -> int:
    """Return the number of data-loading processes per GPU."""
    if cluster.cpu_cores is None:
        return _MOST_LOADERS
    return max(1, min(_MOST_LOADERS, cluster.cpu_cores // cluster.gpus_per_node // 2))


def slow_precision(spec: Spec) -> Iterator[str]:
    """Warn if another precision is faster on this card."""
    gpu = spec.cluster.gpu
    if gpu.architecture == "volta" and spec.job.precision == "bf16":
        yield f"{gpu.name} has no bf16 units: precision fp16 is faster"


def why_accumulation(spec: Spec, layout: Layout) -> str:
    """Return the equation by which gradient accumulation gives the batch size."""
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    what = "pairs" if spec.job.sequences_per_sample > 1 else "sequences"
    return f"micro batch * this * dp {layout.dp} = {batch} {what} per step"
