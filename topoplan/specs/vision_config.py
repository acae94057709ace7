"""The vision tower of a config.json, with its exact parameter counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.specs.config_fields import Fields, is_number
from topoplan.specs.model import MOST_LAYERS, VisionTower

VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


def _widths(fields: Fields, model_type: str, hidden: int) -> tuple[int, int, int]:
    """Return the width of the patches, of their MLP, and of the merged tokens."""
    if model_type != "qwen2_vl":
        width, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
        return width, inner, fields.integer("out_hidden_size", default=hidden)
    # Qwen2-VL's `hidden_size` is the width of the merged tokens, and `embed_dim` the width of the patches.
    width = fields.integer("embed_dim")
    ratio = 4 if fields.raw("mlp_ratio") is None else fields.raw("mlp_ratio")
    if not is_number(ratio, 1e-9, 1e9):
        raise fields.wrong("mlp_ratio", "a positive number")
    return width, int(width * ratio), fields.integer("hidden_size", default=hidden)


def vision_tower(config: Mapping[str, Any], model_type: str, hidden: int, where: str) -> VisionTower:
    """Return the vision tower of a language model with hidden size `hidden`. Raises ModelError.

    Sources: Qwen2VisionTransformerPretrainedModel, Qwen2_5_VisionTransformerPretrainedModel, Qwen3VLVisionModel and
    Qwen3_5VisionModel in transformers/models/*/modeling_*.py (5.6).
    """
    fields = Fields(config, f"{where}: vision_config")
    depth = fields.integer("depth", "num_hidden_layers", most=MOST_LAYERS)
    channels = fields.integer("in_channels", "in_chans", default=3)
    patch = fields.integer("patch_size", "spatial_patch_size")
    temporal = fields.integer("temporal_patch_size", default=2)
    merge = fields.integer("spatial_merge_size", default=2)
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    width, inner, out = _widths(fields, model_type, hidden)
    if out != hidden:
        what = f"the vision tower puts out {out} values a token and the language model takes {hidden}"
        raise Fields({}, where).refusal(what, "vision_config.out_hidden_size to equal hidden_size")
    merged = width * merge * merge
    merger_mlp = (merged * merged + merged) + (merged * out + out)
    gated = model_type == "qwen2_5_vl"
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    mlp = 3 * width * inner + 2 * inner + width if gated else 2 * width * inner + inner + width
    norm = width if gated else 2 * width  # RMSNorm, or LayerNorm with its bias
    encoder = channels * temporal * patch * patch * width + depth * (2 * norm + attention + mlp)
    if model_type not in ("qwen2_vl", "qwen2_5_vl"):  # Qwen3-VL adds a patch bias and learned positions
        encoder += width + fields.integer("num_position_embeddings") * width
    deepstack = len(fields.indices("deepstack_visual_indexes"))
    return VisionTower(
        layers=depth,
        hidden_size=width,
        heads=heads,
        intermediate_size=inner,
        gated=gated,
        out_hidden_size=out,
        patch_size=patch,
        spatial_merge_size=merge,
        encoder_parameters=encoder,
        projector_parameters=norm + merger_mlp,
        # Each deepstack merger normalizes the merged patches instead of the single ones.
        deepstack_parameters=deepstack * (2 * merged + merger_mlp),
        min_first_stage_layers=deepstack,
    )
