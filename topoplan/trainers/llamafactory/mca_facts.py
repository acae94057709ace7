"""Properties of jobs and models that matter to LLaMA-Factory's Megatron (MCA) trainer."""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.model import Mlp, Model, Moe
from topoplan.specs.spec import Spec

FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Model types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""


def resumable(spec: Spec, layout: Layout) -> bool:
    """Whether the adapter can resume from the checkpoints that it saves for a layout.

    If etp differs from tp, checkpoints are torch_dist (mcore_adapter training_args.py). trainer/trainer.py,
    _load_from_checkpoint then passes no models to checkpointing.py, _load_dist_checkpoint, which needs their shapes.
    """
    return not facts_of(spec.model).is_moe or layout.etp == layout.tp


def is_gated(model: Model) -> bool:
    """Whether every feed-forward layer is gated (SwiGLU)."""
    return all(layer.ffn.gated for layer in model.layers if isinstance(layer.ffn, Mlp | Moe))
