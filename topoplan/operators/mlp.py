"""The dense feed-forward block with its norm; a shared expert is a feed-forward block without one."""

from __future__ import annotations

from typing import Any

from topoplan.operators.eager import EagerBuilder
from topoplan.operators.machine import Product
from topoplan.operators.op import BF16, FP32, SavedTensor
from topoplan.operators.te import QUANTISED_BYTES, TeBuilder
from topoplan.specs.model import Mlp, Moe


def te(build: TeBuilder, mlp: Mlp) -> None:
    """Add megatron-core's MLP and the norm before it."""
    hidden, tokens, local, by = build.hidden, build.tokens, build.local, ("mlp",)
    build.norm("pre_mlp_layernorm", freed_by=by)
    build.keep("mlp layernorm input", BF16 * local * hidden)
    build.keep("mlp layernorm statistics", FP32 * local)
    into, saved_bytes = te_feed_forward(build, mlp, by)
    # At the activation's backward: the layer's output gradient, and the gradients of fc2's input (whose saved copy is
    # freed) and of fc1's output.
    gradients = BF16 * tokens * (hidden + into.outputs + mlp.intermediate_size / build.shard.tp) - saved_bytes
    build.add("activation's backward", "elementwise", None, gradients_bytes=gradients)
    back = Product(into.rows, hidden, mlp.intermediate_size / build.shard.tp)
    build.tensor_parallel("mlp collectives", into, row=back, freed_by=by)


def te_feed_forward(
    build: TeBuilder, mlp: Mlp, by: tuple[str, ...], prefix: str = "", moe: Moe | None = None
) -> tuple[Product, float]:
    """Add two linear layers and the activation between them.

    Fused, the activation is a part of the products of experts: the first one also writes its quantized result, twice,
    and backward of the second one reads the first one's output and writes its quantized gradient, twice (Transformer
    Engine `pytorch/ops/fused/grouped_mlp.py`).

    Returns (the first product, the bytes that the second layer saves). A shared expert's input is saved by the router.
    `moe` is given if every expert has such layers.
    """
    is_shared = bool(prefix) and moe is None
    all_first, name = mlp.intermediate_size * (2 if mlp.gated else 1), f"{prefix}linear_fc1"
    common: dict[str, Any] = {"freed_by": by, "moe": moe, "bias": mlp.bias}
    label = None if is_shared else ""
    is_fused = moe is not None and build.shard.fuses_experts
    sides = ("output", "input") if is_fused else ("", "")
    into = build.linear(name, build.hidden, all_first, label=label, is_normed=not prefix, activation=sides[0], **common)
    width = mlp.intermediate_size / (build.shard.etp if moe else build.shard.tp)
    moved, activated = BF16 * into.rows * into.count, (*by, "moe_act") if moe else by
    ahead, back = moved * (into.outputs + width), moved * (2 * into.outputs + width)
    if is_fused:
        written = 2 * QUANTISED_BYTES[build.shard.precision] / BF16
        ahead, back = moved * written * width, moved * ((1 + written) * into.outputs - width)
    build.moved(f"{prefix}activation", ahead, back, kernels=0 if is_fused else 1, freed_by=activated)
    build.keep(f"{name} output", moved * into.outputs, by)
    before, name, divides = len(build.ops), f"{prefix}linear_fc2", "expert width" if moe else "MLP width"
    common |= {"input_freed_by": activated, "divides": divides, "activation": sides[1]}
    build.linear(name, mlp.intermediate_size, build.hidden, "row", **common)
    return into, build.saved_bytes(before)


def eager(build: EagerBuilder, mlp: Mlp) -> None:
    """Add the MLP of `models/llama/modeling_llama.py`."""
    hidden, use, width = build.hidden, build.use, mlp.intermediate_size
    # Gradients of the output, of the product, and of the product's factors.
    gradients = build.tokens * (use.residual_bytes * hidden + BF16 * width * (3 if mlp.gated else 2))
    eager_feed_forward(build, mlp, gradients)


def eager_feed_forward(build: EagerBuilder, mlp: Mlp, gradients_bytes: float = 0.0) -> None:
    """Add two or three linear layers and the activation between them."""
    hidden, width, is_fused = build.hidden, mlp.intermediate_size, build.use.fused
    names = ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)
    saved = build.inputs(names, hidden)
    for name in names:
        build.linear(name, hidden, width, saved=saved)
        saved = ()
    elements = build.tokens * width
    forward, backward, kernels = (10, 18, 2) if mlp.gated and not is_fused else (6, 10, 1) if mlp.gated else (4, 6, 1)
    build.moved(
        "activation, product" if mlp.gated else "activation",
        forward * elements,
        backward * elements,
        kernels=kernels,
        saved=activation_saved(BF16 * elements, gated=mlp.gated, is_fused=is_fused),
        gradients_bytes=gradients_bytes,
    )
    build.linear("down_proj", width, hidden)


def activation_saved(size: float, *, gated: bool, is_fused: bool) -> tuple[SavedTensor, ...]:
    """Return what an eager activation saves; Liger's kernel recomputes the gate's activation in backward."""
    if not gated:
        return (SavedTensor("up", size),)
    both = SavedTensor("gate, up", 2 * size)
    return (both,) if is_fused else (both, SavedTensor("activation", size))
