"""The display name of a layer's kind."""

from __future__ import annotations

from topoplan.specs.model import Layer


def layer_kind(layer: Layer) -> str:
    """Return `attention + mlp`, with the size of the sliding window if there is one."""
    words = " + ".join(half.kind.replace("_", " ") for half in (layer.attention, layer.ffn))
    window = getattr(layer.attention, "window", 0)
    words = f"{words}, window {window}" if window else words
    return f"multi-token prediction of {words}" if layer.predicts_next else words
