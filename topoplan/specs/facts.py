"""The kinds of attention and feed-forward blocks in a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.specs.model import Attention, LatentAttention, LinearAttention, Model, Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a model that rules and trainers ask for, collected once."""

    experts: tuple[int, ...]
    """The distinct numbers of experts in the model's MoE layers."""
    linear_attention: bool
    latent_attention: bool
    grouped: tuple[Attention, ...]
    """The distinct softmax attentions."""

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.experts)


@lru_cache(maxsize=64)
def facts_of(model: Model) -> Facts:
    """Collect the facts about a model's layers."""
    layers = {id(layer): layer for layer in model.layers}.values()
    attentions = dict.fromkeys(layer.attention for layer in layers)
    return Facts(
        experts=tuple(sorted({layer.ffn.experts for layer in layers if isinstance(layer.ffn, Moe)})),
        linear_attention=any(isinstance(attention, LinearAttention) for attention in attentions),
        latent_attention=any(isinstance(attention, LatentAttention) for attention in attentions),
        grouped=tuple(attention for attention in attentions if isinstance(attention, Attention)),
    )
