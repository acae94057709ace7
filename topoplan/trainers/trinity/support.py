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
        "original_max_position_embeddings": model.max_position_embeddings,
        "rope_theta": f"${{oc.decode:${{oc.env:{ROPE_THETA}}}}}",
    }


def yarn_factor(model: Model, seq_len: int) -> float | None:
    """The length over the model's own context, where it is longer: Trinity-RFT's advice for rope_scaling."""
    native = model.max_position_embeddings
    return seq_len / native if native and seq_len > native else None
