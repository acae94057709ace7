"""DDP, DeepSpeed's ZeRO and FSDP2 as one engine: every GPU runs all layers; states and sequences are shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.engines.data_parallel.communication import gathered_linears
from topoplan.engines.data_parallel.layouts import sharded_families, usual_grad_reduce_in_fp32
from topoplan.engines.data_parallel.memory import sharded_memory
from topoplan.engines.data_parallel.parameter_bytes import shards_of
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.data_parallel.sharding import loops_experts, sharding_of
from topoplan.engines.data_parallel.step import sharded_time
from topoplan.engines.engine import Engine, Family, Fastest, Limit, Outcome, Refusal, Refused, TooLarge, TooSlow
from topoplan.engines.prediction import Memory, StageMemory
from topoplan.layout.layout import FULL, SHARDED_BACKENDS, Layout, changed, keys_of
from topoplan.network.placement import Group
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import SHARDED_BANDS
from topoplan.specs.job import ADAPTERS

_CHEAP = ("expandable_segments", "recompute full")


def milder_first(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield each change with its name, mildest first; cheap changes are also tried together with each later one."""
    before: dict[str, Any] = {}
    for name, change in _changes(layout):
        yield name, changed(layout, **change)
        if name in _CHEAP:
            before |= change
        elif any(getattr(layout, key) != value for key, value in before.items()):
            yield f"{name}, recompute full and expandable_segments", changed(layout, **(before | change))


def _changes(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of the allocator, checkpointing, the loss, sharding, offload and sequence sharing."""
    yield "expandable_segments", {"expandable_segments": True}
    if layout.recompute.granularity != "full":
        yield "recompute full", {"recompute": FULL}
    yield "fused_linear_cross_entropy", {"fused_linear_cross_entropy": True}
    if layout.backend == "deepspeed":
        yield from ((f"zero_stage {stage}", {"zero_stage": stage}) for stage in range(layout.zero_stage + 1, 4))
        yield "offload_optimizer", {"offload_optimizer": True}
        both = {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}
        yield "zero_stage 3, offload_optimizer and offload_param", both
    elif layout.backend == "fsdp2":
        yield "offload", {"offload": True}
    else:
        yield "backend deepspeed with zero_stage 3", {"backend": "deepspeed", "zero_stage": 3}
    if layout.backend != "ddp" and layout.dp % 2 == 0:
        ulysses, steps = layout.ulysses * 2, layout.gradient_accumulation_steps * 2
        yield (
            f"ulysses {ulysses}",
            {"ulysses": ulysses, "dp": layout.dp // 2, "gradient_accumulation_steps": steps},
        )


class DataParallel(Engine):
    """The data-parallel family."""

    backends = SHARDED_BACKENDS
    rules = search_rules = SHARDED_RULES
    choices = (
        ("zero stage", "zero_stage"),
        ("ulysses", "ulysses"),
        ("micro batch", "micro_batch_size"),
        ("recompute", "recompute.granularity"),
    )
    miss_keys = ("cp", "zero_stage", "ulysses")
    package = "topoplan.engines.data_parallel"
    families, changes = staticmethod(sharded_families), staticmethod(milder_first)
    memory, time = staticmethod(sharded_memory), staticmethod(sharded_time)

    def outcomes(self, case: Case, family: Family, refusal: Refusal, limit: Limit, *, every: bool) -> Iterator[Outcome]:
        """Yield the outcomes of a family: its layouts are tried in order of speed until one fits."""
        runnable = []
        for layout in family:
            if broken := refusal(layout):
                yield Refused((layout,), broken)
            else:
                runnable.append((self.time(case, layout).step_s, layout))
        runnable.sort(key=lambda one: one[0])
        needed: dict[Layout, Memory] = {}
        for step_s, layout in runnable:
            if step_s > limit():
                yield TooSlow(len(runnable))
                return
            needed[layout] = memory = self.memory(case, layout)
            if memory.fits:
                yield Fastest(layout, memory, step_s, len(runnable))
                return
        yield TooLarge(tuple(needed), len(runnable), needed.__getitem__)

    def groups(self, layout: Layout, cluster: Cluster) -> dict[str, Group]:
        """Return the groups of ranks that share a sequence, states or replicas of states.

        Ranks of a sequence are neighbors. States are shared by all ranks, by those of a node (hybrid sharding), or by
        none.
        """
        shards = shards_of(layout, cluster.gpus_per_node).optimizer
        return {
            "ulysses": Group(layout.ulysses, 1),
            "cp": Group(layout.cp, layout.ulysses),
            "shards": Group(shards, 1),
            "replicas": Group(layout.world_size // shards, shards),
        }

    def group_keys(self, layout: Layout) -> tuple[str, ...]:
        """Return the keys of sharding, and the degrees."""
        own = [key for key in ("zero_stage", "sharding", "ulysses") if key in keys_of(layout.backend)]
        return ("backend", *own, "cp", "dp")

    def place(self, stage: StageMemory) -> str:
        """Return `a GPU`, since all GPUs hold the same amount."""
        return "a GPU"

    def bands(self, case: Case) -> tuple[str, str]:
        """Return the one memory band and the one time band that all cases share."""
        return SHARDED_BANDS

    def warnings(self, case: Case, layout: Layout) -> list[str]:
        """Return a warning if each expert is gathered separately."""
        if not sum(gathered_linears(case, layout)[1:]) or sharding_of(layout).unit != "submodule":
            return []
        # ms-swift docs/source_en/Megatron-SWIFT/Quick-start.md, with transformers below 5.
        return [
            "each expert is gathered separately: published for Qwen3-30B-A3B on 16 A800, 91.2 s per step under ZeRO-3"
            " and 9.6 under Megatron"
        ]

    def assumptions(self, case: Case, layout: Layout) -> list[str]:
        """Return the assumption about how experts run, unless the layout or the stated software decides it."""
        decided = "transformers" in case.cluster.software and case.job.finetuning not in ADAPTERS
        if not facts_of(case.model).is_moe or layout.experts_impl or decided:
            return []
        if loops_experts(case, layout):
            return [
                "assumes that experts run one by one, as in transformers 4; state what the hosts have, "
                "`software: {transformers: '5.6'}`, or experts_impl: grouped_mm, for the faster products of version 5"
            ]
        return [
            "assumes that experts run in grouped products, as in transformers 5 (experts_impl: eager for version 4)"
        ]

    def defaults_not_in_ids(self, case: Case, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dtype in which gradients are reduced, which ids with a sharding do not mention."""
        if "sharding" not in keys:
            return {}
        return {"grad_reduce_in_fp32": usual_grad_reduce_in_fp32(case, keys["backend"], keys["sharding"])}


DATA_PARALLEL = DataParallel()
