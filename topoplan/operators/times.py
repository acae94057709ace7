"""Seconds of one layer and one micro-batch: its operators timed, and their sums."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from topoplan.layout.layout import Recompute
from topoplan.operators.combined import hidden_exchange
from topoplan.operators.eager import LayerUse, eager_case
from topoplan.operators.layers import eager_ops, te_ops
from topoplan.operators.machine import Kernel, Moved, kernels_of
from topoplan.operators.op import PARTS, Op
from topoplan.operators.params import layer_parameters
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.model import Layer


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro-batch."""

    forward_s: tuple[float, ...]
    """By part, in the order of PARTS."""
    backward_s: tuple[float, ...]
    recompute_s: float
    """Forward work that backward repeats, not included in backward_s. 0 for eager layers, where the step counts it."""
    forward_kernels: int
    """Operations that the host launches in eager PyTorch."""
    backward_kernels: int


def _time_of(kernels: tuple[Kernel, ...], recompute_s: float) -> LayerTime:
    forward, backward = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for kernel in kernels:
        forward[kernel.part] += kernel.forward_s
        backward[kernel.part] += kernel.backward_s
    launches = (sum(kernel.launches[way] for kernel in kernels) for way in (0, 1))
    return LayerTime(tuple(forward.values()), tuple(backward.values()), recompute_s, *launches)


@lru_cache(maxsize=1 << 14)
def layer_kernels(case: Case, layer: Layer, shard: Shard) -> tuple[Kernel, ...]:
    """Return all kernels and collectives of a megatron-core layer."""
    kernels = kernels_of(te_ops(case.model, layer, shard), case, shard)
    if shard.combined_share:
        hidden = hidden_exchange(kernels, shard.combined_share, case.profile.expert_overlap)
        kernels += () if hidden is None else (hidden,)
    return kernels


@lru_cache(maxsize=1 << 15)
def layer_time(case: Case, layer: Layer, shard: Shard, recompute: Recompute) -> LayerTime:
    """Return forward, backward and recomputed seconds of a megatron-core layer.

    `recompute` with granularity full means that this very layer is recomputed.
    """
    kernels = layer_kernels(case, layer, shard)
    return _time_of(kernels, sum(kernel.recompute_s(recompute) for kernel in kernels))


@lru_cache(maxsize=1 << 12)
def eager_kernels(case: Case, layer: Layer, use: LayerUse, shard: Shard) -> tuple[Kernel, ...]:
    """Return all kernels and collectives of a layer of a Hugging Face model."""
    ops = eager_ops(case.model, layer, use, shard)
    if use.trains_weights:
        # The gradients of a further micro-batch are added to the accumulated ones: two reads and a write in 16 bits.
        elements = layer_parameters(case.model, layer, 1, 1, 1).total
        ops += (Op("accumulation of gradients", "elementwise", Moved(0, 6 * elements, 0, 1)),)
    return kernels_of(ops, eager_case(case), shard)


@lru_cache(maxsize=1 << 12)
def eager_time(case: Case, layer: Layer, use: LayerUse, shard: Shard) -> LayerTime:
    """Return forward and backward seconds of a layer of a Hugging Face model."""
    return _time_of(eager_kernels(case, layer, use, shard), 0.0)
