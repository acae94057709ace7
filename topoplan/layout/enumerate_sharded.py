"""Every layout of a backend that splits data alone, and every one that it cannot run with the rule it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from topoplan.layout.enumerate import MAX_MICRO_BATCH_SIZE, Broken, divisors
from topoplan.layout.forms import keys_of, recompute_from_value
from topoplan.layout.layout import Layout, Recompute, changed
from topoplan.layout.rules import Rule, broken_rule
from topoplan.layout.sharded_rules import SHARDED_RULES
from topoplan.specs.spec import Spec

MIN_TOKENS_PER_ULYSSES_RANK = 1024
"""Below this a sequence's ranks spend more time on messages than on attention. Not searched unless pinned."""
_OTHERS_DEGREES = ("tp", "pp", "vpp", "ep", "etp")
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def _states(spec: Spec, backend: str) -> list[dict[str, Any]]:
    """What is sharded, in each way that a backend has."""
    if backend == "deepspeed":
        return [{"zero_stage": stage} for stage in (1, 2, 3)]
    if backend == "fsdp2":
        return [{"sharding": "full"}, *([{"sharding": "hybrid"}] if spec.cluster.nodes > 1 else [])]
    return [{}]


def _offloads(spec: Spec, backend: str, states: dict[str, Any]) -> list[dict[str, Any]]:
    """What is in host memory, the least first. Searched where host memory is stated, so that it can be checked."""
    off: list[dict[str, Any]] = [{}]
    if spec.cluster.host_memory_bytes is None:
        return off
    if backend == "deepspeed":
        off.append({"offload_optimizer": True})
        if states["zero_stage"] == 3:
            off.append({"offload_optimizer": True, "offload_param": True})
    elif backend == "fsdp2":
        off.append({"offload": True})
    return off


_USUAL = {field.name: field.default for field in fields(Layout)}


_PIN = Rule("pin", "layout keys of a backend", lambda spec, layout: None, "leave it out, or take another backend")


def _pin_of_others(spec: Spec, backend: str) -> tuple[Layout, Broken] | None:
    """A pin that asks for what the backend does not have: a layout that shows it, and why it is out."""
    everyone = _everyone(spec, backend)
    for key, value in spec.job.pin.items():
        value = recompute_from_value(value) if key == "recompute" else value
        if key not in keys_of(backend) and value != _USUAL.get(key, value):
            return everyone, (_PIN, f"{key} {value} with backend {backend}, which does not have it")
        if key in _OTHERS_DEGREES and value != 1:
            layout = changed(everyone, **{key: value})
            if broken := broken_rule(spec, layout, SHARDED_RULES):
                return layout, broken
    return None


def _everyone(spec: Spec, backend: str) -> Layout:
    return Layout(backend=backend, dp=spec.cluster.world_size, gradient_accumulation_steps=1)


def sharded_families(spec: Spec, backend: str) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    """Legal layouts that differ in checkpointing, offload and the allocator alone, together; others with their rule.

    There is at least one: where the pin leaves nothing, a layout that says so.
    """
    if out := _pin_of_others(spec, backend):
        layout, broken = out
        yield (layout,), broken
        return
    is_empty = True
    for family in _families(spec, backend):
        is_empty = False
        yield family
    if is_empty:
        words = ", ".join(f"{key} {value}" for key, value in spec.job.pin.items())
        yield (_everyone(spec, backend),), (_PIN, f"no layout of {spec.cluster.world_size} GPUs has {words}")


def _families(spec: Spec, backend: str) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    pin = spec.job.pin

    def chosen(key: str, values: list[Any]) -> list[Any]:
        return [pin[key]] if key in pin else values

    def kept(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Options that do not contradict the pin; a pinned key that none has is put into all."""
        keys = {key for option in options for key in option}
        fits = [option for option in options if all(pin.get(key, option.get(key)) == option.get(key) for key in keys)]
        return fits or [{key: pin[key] for key in keys if key in pin}]

    cp = pin.get("cp", 1)
    world, batch = spec.cluster.world_size, spec.job.global_batch_size
    longest = max(1, spec.job.seq_len // MIN_TOKENS_PER_ULYSSES_RANK)
    sequence_ranks = [1] if backend == "ddp" else divisors(spec.cluster.gpus_per_node, longest)
    modes = [recompute_from_value(pin["recompute"])] if "recompute" in pin else [Recompute(), FULL]
    for states in kept(_states(spec, backend)):
        for ulysses in chosen("ulysses", sequence_ranks):
            if world % (ulysses * cp):
                continue
            dp = world // (ulysses * cp)
            micro_batches = [1] if batch % dp else divisors(batch // dp, MAX_MICRO_BATCH_SIZE)
            for micro_batch in chosen("micro_batch_size", micro_batches):
                base = Layout(
                    backend=backend,
                    cp=cp,
                    dp=dp,
                    ulysses=ulysses,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=max(1, batch // (micro_batch * dp)),
                    distributed_optimizer=False,
                    fused_linear_cross_entropy=pin.get("fused_linear_cross_entropy", False),
                    **states,
                )
                if any(key in pin and pin[key] != getattr(base, key) for key in ("cp", "dp")):
                    continue
                if pin.get("gradient_accumulation_steps", base.gradient_accumulation_steps) != (
                    base.gradient_accumulation_steps
                ):
                    continue
                if broken := broken_rule(spec, base, SHARDED_RULES):
                    yield (base,), broken
                    continue
                yield (
                    tuple(
                        changed(base, recompute=mode, expandable_segments=expandable, **offload)
                        for offload in kept(_offloads(spec, backend, states))
                        for mode in modes
                        for expandable in chosen("expandable_segments", [False, True])
                    ),
                    None,
                )
