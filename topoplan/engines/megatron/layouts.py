"""Every layout that the trainer can express, and the others with the rule that each breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, product

from topoplan.engines.engine import MAX_MICRO_BATCH_SIZE, chosen, divisors
from topoplan.engines.megatron.rules import (
    GRID_RULES,
    MODE_RULES,
    SEARCH_RULES,
    SPLIT_RULES,
    STEP_RULES,
    tensor_parallel_domain,
)
from topoplan.engines.rule import Broken, broken_rule
from topoplan.errors import LayoutError
from topoplan.layout.forms import recompute_from_value, with_loss, with_overlap
from topoplan.layout.layout import FULL, PART_OF, Layout, Recompute, changed, recomputing, stages_of
from topoplan.layout.stages import sized_pipeline_layout, spread_pipeline_layout, vpp_of
from topoplan.operators.flops import ends_in_layers
from topoplan.specs.case import Case
from topoplan.specs.facts import facts_of
from topoplan.specs.layout_parts import StageSizes, Step, stage_sizes_in
from topoplan.specs.model import LatentAttention, Moe

MIN_TOKENS_PER_CP_RANK = 1024
"""Minimum tokens per context-parallel rank. Below it attention takes less time than its messages. Fewer only if
pinned."""

MIN_LAYERS_PER_VIRTUAL_STAGE = 2
"""Minimum layers per model chunk. With one layer, every layer waits for a message, and its gradients travel alone.
Fewer only if pinned."""
MAX_UNEVEN_VPP = 4
"""Virtual stages per rank up to which uneven splits are searched; with more, the stages are too short to even out."""
UNEVEN_SPLITS = 3
"""Uneven splits that are searched for each pp and vpp."""

OFFLOAD_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Fractions of the optimizer that are searched if the spec states the host memory, so that the fit can be checked."""


def _powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(max(1, limit).bit_length())]


def recompute_modes(case: Case) -> list[Recompute]:
    """Return the recompute modes of a model: none, every set of modules that frees something on its own, and full.

    core_attn only on Volta: flash attention, available from Ampere on, keeps nothing that recomputing it would free.
    layernorm only beside experts and latent attention: elsewhere Transformer Engine fuses the norm into the linear
    layer. moe includes moe_act and shared_experts.
    """
    layers = {id(layer): layer for layer in case.model.layers}.values()
    latent = any(isinstance(layer.attention, LatentAttention) for layer in layers)
    experts = [layer.ffn for layer in layers if isinstance(layer.ffn, Moe)]
    feed_forward: list[tuple[str, ...]] = [(), ("moe_act",), ("moe",)] if experts else [(), ("mlp",)]
    if any(moe.shared_intermediate_size for moe in experts):
        feed_forward += [("shared_experts",), ("moe_act", "shared_experts")]
    choices = (
        [(), ("core_attn",)] if case.cluster.gpu.architecture == "volta" else [()],
        [(), ("layernorm",)] if latent or experts else [()],
        [(), ("mla_up_proj",)] if latent else [()],
        feed_forward,
    )
    selective = [tuple(chain.from_iterable(modules)) for modules in product(*choices)]
    return [
        Recompute(),
        *(Recompute(granularity="selective", modules=modules) for modules in selective if modules),
        FULL,
    ]


def shapes(case: Case, backend: str) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    """Yield every combination of degrees, with the simplest micro-batch and recompute mode.

    Layouts that differ only in their pipeline split come together; one that breaks a rule comes alone, with the rule.
    Degrees are divisors of the world size; tp goes one step beyond the NVLink domain, so that the rule is shown.
    """
    world, pin = case.cluster.world_size, case.job.pin
    facts = facts_of(case.model)
    ends = ends_in_layers(case.model, case.job)
    longest_cp = max(1, case.job.seq_len // MIN_TOKENS_PER_CP_RANK)
    # A search leaves these keys at their defaults unless they are pinned.
    pinned = {key: value for key, value in pin.items() if PART_OF.get(key) in ("states", "switches")}
    usual = Layout.of(backend=backend, **with_loss(with_overlap(pinned, case.job), backend))
    for tp in chosen(pin, "tp", divisors(world, 2 * tensor_parallel_domain(case))):
        for pp in chosen(pin, "pp", divisors(max(1, world // tp), case.model.num_layers)):
            splits = _splits(case, pp, ends)
            for cp in chosen(pin, "cp", [n for n in _powers_of_two(longest_cp) if (world // (tp * pp)) % n == 0]):
                if world < tp * pp * cp or pin.get("dp", world // (tp * pp * cp)) * tp * pp * cp != world:
                    continue
                dp = world // (tp * pp * cp)
                stage = tp * cp * dp
                eps = [n for n in divisors(max(facts.experts), stage) if stage % n == 0] if facts.is_moe else [1]
                # How the ranks of a sequence attend to all of it, if the trainer has a key for that.
                ways = ["p2p", "a2a"] if cp > 1 and not case.traits.is_adapter else ["p2p"]
                for way in chosen(pin, "cp_comm_type", ways):
                    base = changed(usual, tp=tp, pp=pp, cp=cp, dp=dp, cp_comm_type=way)
                    if broken := broken_rule(case, base, SPLIT_RULES):
                        yield (base,), broken
                        continue
                    for ep in chosen(pin, "ep", eps):
                        for etp in chosen(pin, "etp", sorted({1, tp}) if facts.is_moe else [1]):
                            for vpp, pipeline_layouts in splits.items():
                                shape = changed(base, ep=ep, etp=etp, vpp=vpp)
                                yield from _legal_splits(case, shape, pipeline_layouts)


def _legal_splits(
    case: Case, shape: Layout, pipeline_layouts: Sequence[str | None]
) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    """Yield a shape's pipeline splits: those that break a rule one by one, then all legal ones together."""
    legal: list[Layout] = []
    for text in pipeline_layouts:
        layout = changed(shape, pipeline_layout=text) if text else shape
        if broken := broken_rule(case, layout, _REST):
            yield (layout,), broken
        else:
            legal.append(layout)
    if legal:
        yield tuple(legal), None


_REST = GRID_RULES + SEARCH_RULES


def _splits(case: Case, pp: int, ends: tuple[float, float]) -> dict[int, tuple[str | None, ...]]:
    """Return pipeline layouts by vpp: the even split if it divides the layers, and the best balanced uneven ones."""
    layers, pin = case.model.num_layers, case.job.pin
    if text := pin.get("pipeline_layout"):
        try:
            return dict.fromkeys(chosen(pin, "vpp", [vpp_of(text, pp)]), (text,))
        except LayoutError:
            return {pin.get("vpp", 1): (text,)}  # the rule says what is wrong with it
    sizes = stage_sizes_in(pin)
    if pp == 1:
        return dict.fromkeys(chosen(pin, "vpp", [1]), (None,))
    longest = max(1, layers // pp // MIN_LAYERS_PER_VIRTUAL_STAGE)
    if sizes:
        found = {vpp: _sized(case, pp, vpp, sizes) for vpp in chosen(pin, "vpp", list(range(1, longest + 1)))}
        # If no sizes fit, the rule reports what is wrong with them.
        return {vpp: one for vpp, one in found.items() if one} or {pin.get("vpp", 1): (None,)}
    usual = [n for n in range(1, longest + 1) if n <= MAX_UNEVEN_VPP or layers % (pp * n) == 0]
    splits: dict[int, tuple[str | None, ...]] = {}
    for vpp in chosen(pin, "vpp", usual):
        uneven: tuple[str, ...] = ()
        if vpp <= MAX_UNEVEN_VPP:
            uneven = uneven_pipeline_layouts(layers, pp, vpp, ends, case.job.mtp_num_layers)
        # If nothing else is left, the rule on the even split reports why it is not legal.
        splits[vpp] = (None, *uneven) if layers % (pp * vpp) == 0 or not uneven else uneven
    return splits


def _sized(case: Case, pp: int, vpp: int, sizes: StageSizes) -> tuple[str | None, ...]:
    """Return the split that matches the pinned stage sizes, or nothing if there is none."""
    try:
        return (sized_pipeline_layout(case.model.num_layers, pp, vpp, sizes, case.job.mtp_num_layers),)
    except LayoutError:
        return ()


@lru_cache(maxsize=1 << 12)
def uneven_pipeline_layouts(
    layers: int, pp: int, vpp: int, ends: tuple[float, float], mtp_layers: int = 0
) -> tuple[str, ...]:
    """Return the layout strings of the splits with the least work on their slowest virtual stage, least first.

    `ends` is the work before the first layer (vision tower) and after the last one (multi-token prediction, output
    layer), in units of a layer's work. No string equals the even split.
    """
    count, (before, behind) = pp * vpp, ends
    mean = layers / count
    found: dict[str, tuple[float, float, int]] = {}
    for last in range(max(0, int(mean - behind)), int(mean) + 2):
        rest = (layers - last) / (count - 1)
        for first in {layers - last} if count == 2 else range(max(1, int(rest - before)), int(rest) + 2):
            text = spread_pipeline_layout(layers, pp, vpp, first, last, mtp_layers)
            if text is None or (layers % count == 0 and first == last == layers // count):
                continue
            middle = -(-(layers - first - last) // (count - 2)) if count > 2 else 0
            loads = (first + before, float(middle), last + behind)
            # Among equally slow splits, prefer a shorter first stage, which holds the most micro-batches.
            found[text] = (max(loads), sum(load * load for load in loads), first)
    return tuple(sorted(found, key=lambda text: found[text])[:UNEVEN_SPLITS])


def steps(
    case: Case, shape: tuple[Layout, ...]
) -> Iterator[tuple[tuple[Layout, ...], tuple[Recompute, ...], Broken | None]]:
    """Yield every micro-batch size and sequence-parallel switch of a legal shape, with each of its splits.

    Layouts come with the first of their recompute modes; the other modes, which are all slower, come beside them.
    Layouts that break a rule come with the rule and without modes.
    """
    pin, batch = case.job.pin, case.job.global_batch_size
    first = shape[0]
    if batch % first.dp and "micro_batch_size" not in pin:
        yield shape, (), broken_rule(case, first, STEP_RULES)
        return
    modes = [recompute_from_value(pin["recompute"])] if "recompute" in pin else recompute_modes(case)
    # These rules depend on the mode only, and the next ones on everything but the mode and the split.
    judged = [(mode, broken_rule(case, recomputing(first, mode), MODE_RULES)) for mode in modes]
    legal = tuple(mode for mode, broken in judged if broken is None)
    for micro_batch in chosen(pin, "micro_batch_size", divisors(max(1, batch // first.dp), MAX_MICRO_BATCH_SIZE)):
        accumulation = max(1, batch // (micro_batch * first.dp))
        if pin.get("gradient_accumulation_steps", accumulation) != accumulation:
            continue
        for sequence_parallel in chosen(pin, "sequence_parallel", [True, False] if first.tp > 1 else [False]):
            step = Step(
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                sequence_parallel=sequence_parallel,
            )
            layouts = tuple(recomputing(layout, modes[0], step) for layout in shape)
            if broken := broken_rule(case, layouts[0], STEP_RULES):
                yield layouts, (), broken
                continue
            for mode, broken in judged:
                if broken:
                    yield with_mode(layouts, mode), (), broken
            if legal:
                yield with_mode(layouts, legal[0]), legal[1:], None


def with_mode(layouts: tuple[Layout, ...], mode: Recompute) -> tuple[Layout, ...]:
    """Return the layouts under a recompute mode."""
    return layouts if mode == layouts[0].recompute else tuple(recomputing(layout, mode) for layout in layouts)


def lighter_modes(case: Case, layout: Layout) -> tuple[Recompute, ...]:
    """Return the recompute modes that may be enough for a layout, each faster than the next; its own is last.

    A layout that recomputes every layer may instead recompute only the first layers of each virtual stage (Megatron's
    method block). Other layouts, and a pinned mode, have no alternative.
    """
    if "recompute" in case.job.pin or layout.recompute.granularity != "full":
        return (layout.recompute,)
    stages = stages_of(case.model, case.job, layout)
    most = max(chunk.num_layers for stage in stages for chunk in stage)
    return (*_block_modes(most), layout.recompute)


@lru_cache(maxsize=256)
def _block_modes(most: int) -> tuple[Recompute, ...]:
    """Return recompute modes of method block with 1 to `most` - 1 layers."""
    return tuple(Recompute(granularity="full", method="block", num_layers=layers) for layers in range(1, most))


def offloaded(case: Case, layout: Layout) -> list[Layout]:
    """Return the layout with parts of its optimizer in host memory, smallest part and fastest layout first."""
    if "optimizer_offload_fraction" in case.job.pin or case.cluster.host_memory_bytes is None:
        return []
    return [changed(layout, optimizer_offload_fraction=fraction) for fraction in OFFLOAD_FRACTIONS]
