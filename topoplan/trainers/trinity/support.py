"""What Trinity-RFT's trainer needs for a context beyond the model's own."""

from __future__ import annotations

from typing import Any

from topoplan.specs.model import Model

ROPE_THETA = "ROPE_THETA"
"""The environment variable that the node scripts set from the model's config.json."""


def rope_scaling(model: Model, seq_len: int) -> dict[str, Any] | None:
    """Return YaRN's settings for a sequence longer than the model's own context; None within it.

    transformers 5 requires rope_theta with the factor (`modeling_rope_utils.py`). It is read on the nodes, since this
    machine may not have the model's directory.
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
    """Return the number of positions that YaRN stretches: the model's own context.

    For Qwen3 it is 32,768, as the model cards say for YaRN: config.json adds 8,192 for a prompt.
    """
    own = model.max_position_embeddings
    return 32768 if model.model_type in ("qwen3", "qwen3_moe") and own == 40960 else own


def yarn_factor(model: Model, seq_len: int) -> float | None:
    """Return the length divided by the positions that YaRN stretches; None for a length within the model's own."""
    own = model.max_position_embeddings
    return seq_len / trained_positions(model) if own and seq_len > own else None
