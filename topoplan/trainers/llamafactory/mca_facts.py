"""What a job and a model mean to the Megatron (MCA) trainer of LLaMA-Factory."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath

from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Mlp, Model, Moe
from topoplan.specs.spec import Spec

FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def training_steps(job: Job, max_steps: int | None = None) -> int | None:
    """Optimizer steps of the job; None when the spec does not say how many samples there are.

    The trainer drops the last incomplete batch of each epoch (mcore_adapter trainer.py, _prepare_train_loop).
    """
    if max_steps is not None and max_steps > 0:
        return max_steps
    if job.samples is None:
        return None
    return math.ceil(max(1, job.samples // job.global_batch_size) * job.epochs)


def model_directory(model: Model) -> str:
    """Where the model lies on every node: its own directory, or below the working directory for a hub id."""
    if model.config_path is not None:
        path = PurePosixPath(model.config_path)
        return str(path.parent if path.name == "config.json" else path)
    return str(PurePosixPath("models", model.name))


def resumable(spec: Spec, layout: Layout) -> bool:
    """False where the adapter saves checkpoints that it cannot resume from.

    Where etp differs from tp they are torch_dist (mcore_adapter training_args.py). trainer/trainer.py,
    _load_from_checkpoint passes no models on to checkpointing.py, _load_dist_checkpoint, which asks them for shapes.
    """
    return not facts_of(spec.model).is_moe or layout.etp == layout.tp


def is_hub_id(name: str) -> bool:
    """True for `org/name`, which the Megatron adapter cannot load: it reads local directories only."""
    return _HUB_ID.fullmatch(name) is not None


def is_gated(model: Model) -> bool:
    """True when every feed-forward is a gated one (SwiGLU)."""
    return all(layer.ffn.gated for layer in model.layers if isinstance(layer.ffn, Mlp | Moe))
