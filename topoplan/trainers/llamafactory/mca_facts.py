"""What a job and a model mean to the Megatron (MCA) trainer of LLaMA-Factory."""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.model import Mlp, Model, Moe
from topoplan.specs.spec import Spec

FREEZABLE_MODEL_TYPES = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
"""Types whose parts train/mca/workflow.py can freeze (_freeze_model_parameters)."""


def resumable(spec: Spec, layout: Layout) -> bool:
    """False where the adapter saves checkpoints that it cannot resume from.

    Where etp differs from tp they are torch_dist (mcore_adapter training_args.py). trainer/trainer.py,
    _load_from_checkpoint passes no models on to checkpointing.py, _load_dist_checkpoint, which asks them for shapes.
    """
    return not facts_of(spec.model).is_moe or layout.etp == layout.tp


def is_gated(model: Model) -> bool:
    """True when every feed-forward is a gated one (SwiGLU)."""
    return all(layer.ffn.gated for layer in model.layers if isinstance(layer.ffn, Mlp | Moe))
