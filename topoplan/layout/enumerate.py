"""Every layout that the trainer can express, and every one that it cannot with the rule it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from topoplan.errors import LayoutError
from topoplan.layout.forms import recompute_from_value, with_overlap
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.rules import (
    GRID_RULES,
    MODE_RULES,
    SEARCH_RULES,
    SPLIT_RULES,
    STEP_RULES,
    Rule,
    broken_rule,
    facts_of,
    tensor_parallel_domain,
)
from topoplan.layout.stages import balanced_pipeline_layout, vpp_of
from topoplan.specs.model import LatentAttention
from topoplan.specs.spec import Spec

MIN_TOKENS_PER_CP_RANK = 1024
"""Below this a context-parallel rank's attention takes less time than its messages. Not searched unless pinned."""
MAX_MICRO_BATCH_SIZE = 32
"""Sequences; a larger micro batch only makes the pipeline's bubble larger. Not searched unless pinned."""

MIN_LAYERS_PER_VIRTUAL_STAGE = 2
"""With one layer a chunk every layer waits for a message, and its gradients travel alone. Searched only when pinned."""


def _divisors(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def _powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(max(1, limit).bit_length())]


def recompute_modes(spec: Spec) -> list[Recompute]:
    """Recompute modes worth comparing for a model, from none to full.

    core_attn only on Volta: flash attention, from Ampere on, keeps nothing that recomputing it would free. Attention
    itself is the costly part of a long sequence, so the other selective modes are the MLP or the experts, their
    activation, and MLA's up projections.
    """
    facts = facts_of(spec.model)
    selective: list[tuple[str, ...]] = []
    if spec.cluster.gpu.architecture == "volta":
        selective.append(("core_attn",))
    if facts.is_moe:
        selective += [("moe_act",), ("moe",)]
    else:
        selective.append(("mlp",))
    if any(isinstance(layer.attention, LatentAttention) for layer in spec.model.layers):
        selective += [("mla_up_proj",), ("mla_up_proj", "moe_act" if facts.is_moe else "mlp")]
        if facts.is_moe:
            selective.append(("mla_up_proj", "moe"))
    return [
        Recompute(),
        *(Recompute(granularity="selective", modules=modules) for modules in selective),
        Recompute(granularity="full", method="uniform", num_layers=1),
    ]


class _Choices:
    """Values to try for each key, narrowed to the pin where there is one."""

    def __init__(self, pin: dict[str, Any]) -> None:
        self.pin = pin

    def of(self, key: str, values: list[Any]) -> list[Any]:
        return [self.pin[key]] if key in self.pin else values


SWITCHES = (
    "distributed_optimizer",
    "optimizer_offload_fraction",
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "cross_entropy_fusion",
    "cross_entropy_fusion_impl",
    "precision_aware_optimizer",
    "fp8_param",
)
"""Keys that a search leaves at their usual value unless they are pinned."""


def shapes(spec: Spec, backend: str = "mca") -> Iterator[tuple[Layout, tuple[Rule, str] | None]]:
    """Every combination of degrees, with the rule it breaks, if any. Micro batch and recompute are at their simplest.

    Degrees run over the divisors of the world; tp goes one step beyond the domain, so that the rule shows.
    """
    world, pin = spec.cluster.world_size, spec.job.pin
    facts = facts_of(spec.model)
    choices = _Choices(dict(pin))
    longest_cp = max(1, spec.job.seq_len // MIN_TOKENS_PER_CP_RANK)
    switches = with_overlap({key: pin[key] for key in SWITCHES if key in pin})
    for tp in choices.of("tp", _divisors(world, 2 * tensor_parallel_domain(spec))):
        for pp in choices.of("pp", _divisors(max(1, world // tp), spec.model.num_layers)):
            splits = _splits(spec, pp, choices)
            for cp in choices.of("cp", [n for n in _powers_of_two(longest_cp) if (world // (tp * pp)) % n == 0]):
                if world < tp * pp * cp or pin.get("dp", world // (tp * pp * cp)) * tp * pp * cp != world:
                    continue
                dp = world // (tp * pp * cp)
                base = Layout(backend=backend, tp=tp, pp=pp, cp=cp, dp=dp, gradient_accumulation_steps=1, **switches)
                if broken := broken_rule(spec, base, SPLIT_RULES):
                    yield base, broken
                    continue
                stage = tp * cp * dp
                eps = [n for n in _divisors(max(facts.experts), stage) if stage % n == 0] if facts.is_moe else [1]
                for ep in choices.of("ep", eps):
                    for etp in choices.of("etp", sorted({1, tp}) if facts.is_moe else [1]):
                        for vpp, pipeline_layout in splits:
                            layout = replace(base, ep=ep, etp=etp, vpp=vpp, pipeline_layout=pipeline_layout)
                            yield layout, broken_rule(spec, layout, _REST)


_REST = GRID_RULES + SEARCH_RULES


def _splits(spec: Spec, pp: int, choices: _Choices) -> list[tuple[int, str | None]]:
    """(vpp, pipeline layout) pairs: even splits, or a balanced uneven one where the layers do not divide."""
    layers = spec.model.num_layers
    if text := choices.pin.get("pipeline_layout"):
        try:
            return [(n, text) for n in choices.of("vpp", [vpp_of(text, pp)])]
        except LayoutError:
            return [(choices.pin.get("vpp", 1), text)]  # the rule says what is wrong with it
    usual = (
        [1] if pp == 1 or layers % pp else _divisors(layers // pp, max(1, layers // pp // MIN_LAYERS_PER_VIRTUAL_STAGE))
    )
    return [
        (n, balanced_pipeline_layout(layers, pp, n, spec.job.mtp_num_layers) if layers % (pp * n) else None)
        for n in choices.of("vpp", usual)
    ]


def steps(spec: Spec, shape: Layout) -> Iterator[tuple[Layout, tuple[Rule, str] | None]]:
    """Every micro batch, sequence-parallel switch and recompute mode of a legal shape."""
    pin, batch = spec.job.pin, spec.job.global_batch_size
    choices = _Choices(dict(pin))
    if batch % shape.dp and "micro_batch_size" not in pin:
        yield shape, broken_rule(spec, shape, STEP_RULES)
        return
    modes = [recompute_from_value(pin["recompute"])] if "recompute" in pin else recompute_modes(spec)
    for micro_batch in choices.of("micro_batch_size", _divisors(max(1, batch // shape.dp), MAX_MICRO_BATCH_SIZE)):
        accumulation = max(1, batch // (micro_batch * shape.dp))
        if pin.get("gradient_accumulation_steps", accumulation) != accumulation:
            continue
        for sequence_parallel in choices.of("sequence_parallel", [True, False] if shape.tp > 1 else [False]):
            layout = replace(
                shape,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                sequence_parallel=sequence_parallel,
            )
            if broken := broken_rule(spec, layout, STEP_RULES):
                yield layout, broken
                continue
            for mode in modes:
                candidate = layout if mode == layout.recompute else replace(layout, recompute=mode)
                yield candidate, broken_rule(spec, candidate, MODE_RULES)
