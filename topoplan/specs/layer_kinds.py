"""What the halves of a layer are called, in JSON and on the screen."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, Moe

LAYER_KINDS: Mapping[type, str] = {
    part: str(part.__dataclass_fields__["kind"].default)
    for part in (Attention, LatentAttention, LinearAttention, Mlp, Moe)
}
"""The `kind` that tells the parts of a layer apart in JSON."""


def layer_kind(layer: Layer) -> str:
    """`attention + mlp`, with the window where there is one."""
    words = " + ".join(LAYER_KINDS[type(half)].replace("_", " ") for half in (layer.attention, layer.ffn))
    window = getattr(layer.attention, "window", 0)
    words = f"{words}, window {window}" if window else words
    return f"multi-token prediction of {words}" if layer.predicts_next else words
