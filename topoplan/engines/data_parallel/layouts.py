"""Every layout of a backend that splits data only, and the illegal ones with the rule that each breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.engine import MAX_MICRO_BATCH_SIZE, chosen, divisors
from topoplan.engines.rule import Broken, broken_rule
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import DEFAULTS, FULL, Layout, Recompute, changed
from topoplan.specs.case import Case

MIN_TOKENS_PER_ULYSSES_RANK = 1024
"""Minimum tokens per Ulysses rank. Below it, ranks spend more time on messages than on attention. Fewer only if
pinned."""
STATES = ("zero_stage", "sharding")
OFFLOADS = ("offload_optimizer", "offload_param", "offload")


def _states(case: Case, backend: str) -> list[dict[str, Any]]:
    """Return the options of what is sharded under a backend."""
    if backend == "deepspeed":
        return [{"zero_stage": stage} for stage in (1, 2, 3)]
    if backend == "fsdp2":
        return [{"sharding": "full"}, *([{"sharding": "hybrid"}] if case.cluster.nodes > 1 else [])]
    return [{}]


def _offloads(case: Case, backend: str, states: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of what is in host memory, least first; searched only if the spec states the host memory."""
    off: list[dict[str, Any]] = [{}]
    if case.cluster.host_memory_bytes is None:
        return off
    if backend == "deepspeed":
        off.append({"offload_optimizer": True})
        if states.get("zero_stage") == 3:
            off.append({"offload_optimizer": True, "offload_param": True})
    elif backend == "fsdp2":
        off.append({"offload": True})
    return off


def usual_grad_reduce_in_fp32(case: Case, backend: str, sharding: str | None) -> bool:
    """Return whether the trainer reduces gradients in fp32 if no key says; only verl runs hybrid sharding."""
    return backend != "fsdp2" or case.traits.reduces_in_fp32 or sharding == "hybrid"


def sharded_families(case: Case, backend: str) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    """Yield families of legal layouts, and each illegal layout with the rule that it breaks.

    Layouts of a family differ only in checkpointing, offload and the allocator.
    """
    pin = case.job.pin

    def kept(options: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the options that agree with the pin.

        If none does, return the pin itself, so that a rule reports what is wrong.
        """
        pinned = {key: pin[key] for key in keys if key in pin}
        fits = [one for one in options if all(one.get(key, DEFAULTS[key]) == value for key, value in pinned.items())]
        return fits or [pinned]

    world, batch = case.cluster.world_size, case.job.global_batch_size
    longest = max(1, case.job.seq_len // MIN_TOKENS_PER_ULYSSES_RANK)
    sequence_ranks = [1] if backend == "ddp" else divisors(case.cluster.gpus_per_node, longest)
    modes = [recompute_from_value(pin["recompute"])] if "recompute" in pin else [Recompute(), FULL]
    degrees = {key: pin[key] for key in ("tp", "pp", "vpp", "ep", "etp") if key in pin}
    for states in kept(_states(case, backend), STATES):
        reduces_in_fp32 = usual_grad_reduce_in_fp32(case, backend, states.get("sharding"))
        offloads = kept(_offloads(case, backend, states), OFFLOADS)
        for ulysses in chosen(pin, "ulysses", sequence_ranks):
            dp = max(1, world // (ulysses * degrees.get("tp", 1) * degrees.get("pp", 1)))
            micro_batches = [1] if batch % dp else divisors(batch // dp, MAX_MICRO_BATCH_SIZE)
            for micro_batch in chosen(pin, "micro_batch_size", micro_batches):
                base = Layout.of(
                    backend=backend,
                    **degrees,
                    dp=dp,
                    ulysses=ulysses,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=max(1, batch // (micro_batch * dp)),
                    distributed_optimizer=False,
                    fused_linear_cross_entropy=pin.get("fused_linear_cross_entropy", False),
                    experts_impl=pin.get("experts_impl"),
                    sync_each_batch=pin.get("sync_each_batch", True),
                    grad_reduce_in_fp32=pin.get("grad_reduce_in_fp32", reduces_in_fp32),
                    **states,
                    **offloads[0],
                )
                derived = ("cp", "dp", "gradient_accumulation_steps")
                if any(key in pin and pin[key] != getattr(base, key) for key in derived):
                    continue
                if broken := broken_rule(case, base, SHARDED_RULES):
                    yield (base,), broken
                    continue
                yield (
                    tuple(
                        changed(base, recompute=mode, expandable_segments=expandable, **offload)
                        for offload in offloads
                        for mode in modes
                        for expandable in chosen(pin, "expandable_segments", [False, True])
                    ),
                    None,
                )
