"""Every layout that the trainer can express, and every one that it cannot with the rule it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.rules import SHAPE_RULES, STEP_RULES, Rule, broken_rule, facts_of, tensor_parallel_domain
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.specs.model import LatentAttention
from topoplan.specs.spec import Spec

MIN_TOKENS_PER_CP_RANK = 1024
"""Below this a context-parallel rank's attention is shorter than the messages that feed it; not searched unless pinned."""
MAX_MICRO_BATCH_SIZE = 32
"""Sequences; a larger micro batch only makes the pipeline's bubble larger. Not searched unless pinned."""


def _divisors(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def _powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(max(1, limit).bit_length())]


def recompute_modes(spec: Spec) -> list[Recompute]:
    """Recompute modes worth comparing for a model, from none to full.

    Not core_attn: flash attention keeps nothing that recomputing it would free. Attention itself is the costly part of
    a long sequence, so selective modes are the MLP or the experts, their activation, and MLA's up projections.
    """
    facts = facts_of(spec.model)
    selective: list[tuple[str, ...]] = []
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


def shapes(spec: Spec, backend: str = "mca") -> Iterator[tuple[Layout, tuple[Rule, str] | None]]:
    """Every combination of degrees, with the rule it breaks, if any. Micro batch and recompute are at their simplest.

    Degrees run over the divisors of the world; tp goes one step beyond the domain, so that the rule shows.
    """
    world, model = spec.cluster.world_size, spec.model
    facts = facts_of(model)
    choices = _Choices(dict(spec.job.pin))
    domain = tensor_parallel_domain(spec)
    longest_cp = max(1, spec.job.seq_len // MIN_TOKENS_PER_CP_RANK)
    fixed = {
        key: spec.job.pin[key]
        for key in (
            "distributed_optimizer",
            "optimizer_offload_fraction",
            "grad_reduce_in_fp32",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "cross_entropy_fusion",
            "precision_aware_optimizer",
        )
        if key in spec.job.pin
    }
    for tp in choices.of("tp", [n for n in _divisors(world, 2 * domain)]):
        for pp in choices.of("pp", _divisors(max(1, world // tp), model.num_layers)):
            for cp in choices.of("cp", [n for n in _powers_of_two(longest_cp) if (world // (tp * pp)) % n == 0]):
                if world < tp * pp * cp or ("dp" in choices.pin and choices.pin["dp"] * tp * pp * cp != world):
                    continue
                dp = world // (tp * pp * cp)
                base = Layout(
                    backend=backend, tp=tp, pp=pp, cp=cp, dp=dp, gradient_accumulation_steps=1, **fixed
                )
                early = broken_rule(spec, replace(base, etp=1), SHAPE_RULES[:6])
                if early:
                    yield base, early
                    continue
                stage = tp * cp * dp
                eps = [n for n in _divisors(max(facts.experts), stage)] if facts.is_moe else [1]
                for ep in choices.of("ep", [n for n in eps if stage % n == 0]):
                    for etp in choices.of("etp", sorted({1, tp}) if facts.is_moe else [1]):
                        for vpp, pipeline_layout in _splits(spec, pp, choices):
                            layout = replace(
                                base, ep=ep, etp=etp, vpp=vpp, pipeline_layout=pipeline_layout
                            )
                            yield layout, broken_rule(spec, layout, SHAPE_RULES)


def _splits(spec: Spec, pp: int, choices: _Choices) -> list[tuple[int, str | None]]:
    """(vpp, pipeline layout) pairs: even splits, or a balanced uneven one where the layers do not divide."""
    layers = spec.model.num_layers
    if "pipeline_layout" in choices.pin:
        return [(choices.pin.get("vpp", 1), choices.pin["pipeline_layout"])]
    if pp == 1:
        return [(n, None) for n in choices.of("vpp", [1])]
    if layers % pp:
        return [(n, balanced_pipeline_layout(layers, pp, n)) for n in choices.of("vpp", [1])]
    return [(n, None) for n in choices.of("vpp", _divisors(layers // pp, layers))]


def steps(spec: Spec, shape: Layout) -> Iterator[tuple[Layout, tuple[Rule, str] | None]]:
    """Every micro batch, sequence-parallel switch and recompute mode of a legal shape."""
    choices = _Choices(dict(spec.job.pin))
    batch = spec.job.global_batch_size
    if batch % shape.dp and "micro_batch_size" not in choices.pin:
        yield shape, broken_rule(spec, shape, STEP_RULES)
        return
    modes = [recompute_from_value(choices.pin["recompute"])] if "recompute" in choices.pin else recompute_modes(spec)
    micro_batches = _divisors(max(1, batch // shape.dp), MAX_MICRO_BATCH_SIZE)
    for micro_batch in choices.of("micro_batch_size", micro_batches):
        accumulation = max(1, batch // (micro_batch * shape.dp))
        if choices.pin.get("gradient_accumulation_steps", accumulation) != accumulation:
            continue
        for sequence_parallel in choices.of("sequence_parallel", [True, False] if shape.tp > 1 else [False]):
            layout = replace(
                shape,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                sequence_parallel=sequence_parallel,
            )
            broken = broken_rule(spec, layout, STEP_RULES)
            if broken:
                yield layout, broken
                continue
            for mode in modes:
                yield (layout if mode == layout.recompute else replace(layout, recompute=mode)), None
