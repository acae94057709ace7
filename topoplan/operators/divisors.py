"""What a model offers to be divided by tensor parallel: head counts and widths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.layers import whole_ops
from topoplan.specs.model import Layer, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisors:
    """What the operators of all layers of a model say that they divide, gathered once."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    expert_widths: tuple[int, ...]
    """What expert tensor parallel divides; tp all the others."""
    split_widths: tuple[tuple[str, int], ...]
    """Sides of matrices that tp splits, by name, those of MLPs last."""


@lru_cache(maxsize=64)
def divisors_of(model: Model) -> Divisors:
    """Head counts and widths of all layers of a model."""
    # Dictionaries as sets that keep their order; of one layer, names are in alphabetical order.
    found: dict[tuple[str, int], None] = {}
    for layer in {id(layer): layer for layer in model.layers}.values():
        divided = [one for op in whole_ops(model, layer) for one in op.divided]
        found |= dict.fromkeys(sorted(divided, key=lambda one: one[0].casefold()))

    def sizes(name: str) -> tuple[int, ...]:
        return tuple(sorted(size for one, size in found if one == name))

    named = {name: sizes(name) for name in ("heads", "KV heads", "MLP width", "expert width")}
    mlp_widths = named["MLP width"]
    return Divisors(
        heads=named["heads"],
        kv_heads=named["KV heads"],
        mlp_widths=mlp_widths,
        expert_widths=named["expert width"],
        split_widths=(*(one for one in found if one[0] not in named), *(("MLP width", size) for size in mlp_widths)),
    )


def attention_heads(model: Model, layer: Layer) -> tuple[int, int] | None:
    """Heads and KV heads of a layer's softmax attention; None where it has another kind of mixer."""
    cores = (op.work for op in whole_ops(model, layer) if isinstance(op.work, CoreAttention))
    core = next(cores, None)
    return (int(core.heads), int(core.kv_heads)) if core else None
