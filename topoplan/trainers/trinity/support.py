"""What Trinity-RFT's trainer needs for a context beyond the model's own."""

from __future__ import annotations

from typing import Any

from topoplan.specs.model import Model

ROPE_THETA = "ROPE_THETA"
"""The environment variable that the node scripts set from the model's config.json."""


def rope_scaling(model: Model, seq_len: int) -> dict[str, Any] | None:
    """YaRN for a sequence that is longer than the model's own context; None within it.

    transformers 5 wants rope_theta beside the factor (`modeling_rope_utils.py`); it is in the model's directory, which
    a node has and this machine may not.
    """
    factor = yarn_factor(model, seq_len)
    if factor is None:
        return None
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained_positions(model),
        "rope_theta": f"${{oc.decode:${{oc.env:{ROPE_THETA}}}}}",
    }


def trained_positions(model: Model) -> int:
    """Positions that YaRN stretches: those of the model's own context.

    Of Qwen3 32,768, as its model cards write for YaRN: config.json adds 8,192 for a prompt.
    """
    own = model.max_position_embeddings
    return 32768 if model.model_type in ("qwen3", "qwen3_moe") and own == 40960 else own


def yarn_factor(model: Model, seq_len: int) -> float | None:
    """The length over the positions that YaRN stretches; None where the model reaches it by itself."""
    own = model.max_position_embeddings
    return seq_len / trained_positions(model) if own and seq_len > own else None
