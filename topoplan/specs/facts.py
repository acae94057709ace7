"""What a model offers to be divided: head counts, widths and numbers of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.specs.model import Attention, LatentAttention, LinearAttention, Mlp, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The divisors that a model offers, gathered once."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    expert_widths: tuple[int, ...]
    experts: tuple[int, ...]
    linear_attention: bool
    latent_attention: bool
    grouped: tuple[Attention, ...]
    """The distinct softmax attentions."""
    split_widths: tuple[tuple[str, int], ...]
    """Sides of matrices that tp splits, by name; the experts' are in `expert_widths`."""

    @property
    def is_moe(self) -> bool:
        """Whether some layer has experts."""
        return bool(self.experts)


@lru_cache(maxsize=64)
def facts_of(model: Model) -> Facts:
    """Head counts, widths and expert counts of all layers of a model."""
    heads: set[int] = set()
    kv_heads: set[int] = set()
    mlp: set[int] = set()
    expert: set[int] = set()
    experts: set[int] = set()
    linear = latent = False
    # Dictionaries as sets that keep their order.
    grouped: dict[Attention, None] = {}
    widths: dict[tuple[str, int], None] = {}
    for layer in {id(layer): layer for layer in model.layers}.values():
        attention, ffn = layer.attention, layer.ffn
        if isinstance(attention, LinearAttention):
            linear = True
            heads |= {attention.key_heads, attention.value_heads}
            keys, values = (
                attention.key_heads * attention.key_head_dim,
                attention.value_heads * attention.value_head_dim,
            )
            widths["linear attention projection", 2 * (keys + values + attention.value_heads)] = None
            widths["linear attention width", values] = None
        elif isinstance(attention, LatentAttention):
            latent = True
            heads.add(attention.heads)
            nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
            for dim in (nope + rope, nope + attention.v_head_dim, attention.v_head_dim):
                widths["latent attention width", attention.heads * dim] = None
        else:
            heads.add(attention.heads)
            kv_heads.add(attention.kv_heads)
            grouped[attention] = None
            widths["attention width", attention.heads * attention.head_dim] = None
            widths["QKV width", qkv_width(attention)] = None
        if isinstance(ffn, Mlp):
            mlp.add(ffn.intermediate_size)
        else:
            experts.add(ffn.experts)
            expert.add(ffn.intermediate_size)
            if ffn.shared_intermediate_size:
                mlp.add(ffn.shared_intermediate_size)
    widths |= {("MLP width", width): None for width in sorted(mlp)}
    return Facts(
        heads=tuple(sorted(heads)),
        kv_heads=tuple(sorted(kv_heads)),
        mlp_widths=tuple(sorted(mlp)),
        expert_widths=tuple(sorted(expert)),
        experts=tuple(sorted(experts)),
        linear_attention=linear,
        latent_attention=latent,
        grouped=tuple(grouped),
        split_widths=tuple(widths),
    )


def qkv_width(attention: Attention) -> int:
    """Rows of the one matrix of queries, gate, keys and values."""
    query_heads = attention.heads * (2 if attention.output_gate else 1)
    return (query_heads + 2 * attention.kv_heads) * attention.head_dim
