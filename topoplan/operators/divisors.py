"""The dimensions of a model that tensor parallelism divides: head counts and widths."""

from __future__ import annotations

from functools import lru_cache

from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.layers import whole_ops
from topoplan.specs.model import Layer, Model


@lru_cache(maxsize=64)
def divided(model: Model) -> tuple[tuple[str, int], ...]:
    """Return the (name, size) pairs that the operators of all layers divide.

    Every pair appears once; the pairs of one layer are in alphabetical order. Expert tensor parallelism divides `expert
    width`, tensor parallelism all the others.
    """
    found: dict[tuple[str, int], None] = {}
    for layer in {id(layer): layer for layer in model.layers}.values():
        own = [one for op in whole_ops(model, layer) for one in op.divided]
        found |= dict.fromkeys(sorted(own, key=lambda one: one[0].casefold()))
    return tuple(found)


@lru_cache(maxsize=256)
def sizes_divided(model: Model, name: str) -> tuple[int, ...]:
    """Return all sizes that have this name: `heads`, `KV heads`, `MLP width`, `expert width`."""
    return tuple(sorted(size for one, size in divided(model) if one == name))


def attention_heads(model: Model, layer: Layer) -> tuple[int, int] | None:
    """Return the heads and KV heads of a layer's softmax attention, or None if it has another kind of mixer."""
    cores = (op.work for op in whole_ops(model, layer) if isinstance(op.work, CoreAttention))
    core = next(cores, None)
    return (int(core.heads), int(core.kv_heads)) if core else None
