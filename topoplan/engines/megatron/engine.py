"""Megatron-core as an engine: tensor, pipeline, context and expert parallelism, under any of its trainers."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.engines.engine import Engine
from topoplan.engines.megatron.fastest import outcomes_of_shape, rough_step_s
from topoplan.engines.megatron.layouts import shapes
from topoplan.engines.megatron.memory import predict_memory
from topoplan.engines.megatron.rules import (
    MODE_RULES,
    RULES,
    RULES_OF_A_GIVEN_LAYOUT,
    STEP_RULES,
    tensor_parallel_domain,
)
from topoplan.engines.megatron.step import predict_time
from topoplan.engines.prediction import StageMemory
from topoplan.layout.layout import FULL, MEGATRON_BACKENDS, Layout, changed
from topoplan.network.placement import Group, GroupName, group
from topoplan.operators.adapters import adapters_of
from topoplan.operators.dispatch import dispatcher_of
from topoplan.operators.routing import imbalance_of
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import band_keys


def milder_first(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield each change with its name, mildest first: a switch, a smaller micro-batch, recomputation, more splits."""
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence_parallel", changed(layout, sequence_parallel=True)
    if layout.micro_batch_size % 2 == 0:
        half, steps = layout.micro_batch_size // 2, layout.gradient_accumulation_steps * 2
        yield (
            f"micro_batch_size {half}",
            changed(layout, micro_batch_size=half, gradient_accumulation_steps=steps),
        )
    recomputes = layout.recompute.granularity == "full"
    if not recomputes:
        yield "recompute full", changed(layout, recompute=FULL)
    for key in ("tp", "pp", "cp") if layout.dp % 2 == 0 else ():
        name = f"{key} {getattr(layout, key) * 2}"
        fewer = _doubled(layout, key)
        yield name, fewer
        if not recomputes:
            yield f"{name} and recompute full", changed(fewer, recompute=FULL)
    yield "optimizer_offload_fraction 1.0", changed(layout, optimizer_offload_fraction=1.0)


def _doubled(layout: Layout, key: str) -> Layout:
    """Return the layout with twice the tp, pp or cp, half the dp, and evenly split stages."""
    twice = {key: getattr(layout, key) * 2}
    steps = layout.gradient_accumulation_steps * 2
    fewer = changed(layout, dp=layout.dp // 2, gradient_accumulation_steps=steps, pipeline_layout=None, **twice)
    if key != "tp":
        return fewer
    etp = fewer.tp if layout.etp == layout.tp > 1 else layout.etp
    return changed(fewer, sequence_parallel=True, etp=etp)


class Megatron(Engine):
    """Megatron-core."""

    backends = MEGATRON_BACKENDS
    rules = RULES_OF_A_GIVEN_LAYOUT
    search_rules = RULES
    last_rules = frozenset(rule.name for rule in STEP_RULES + MODE_RULES)
    choices = (
        ("tp", "tp"),
        ("pp", "pp"),
        ("cp", "cp"),
        ("ep", "ep"),
        ("micro batch", "micro_batch_size"),
        ("recompute", "recompute.granularity"),
    )
    miss_keys = ("tp", "pp", "cp", "ep", "etp")
    ids_name_backend = False
    package = "topoplan.engines.megatron"
    families, outcomes = staticmethod(shapes), staticmethod(outcomes_of_shape)
    memory, time = staticmethod(predict_memory), staticmethod(predict_time)
    changes, search_priority = staticmethod(milder_first), staticmethod(rough_step_s)

    def groups(self, layout: Layout, cluster: Cluster) -> dict[str, Group]:
        """Return the groups of the two grids: dense gradients are reduced over dp_cp, expert gradients over edp."""
        names: tuple[GroupName, ...] = ("tp", "cp", "dp", "dp_cp", "ep", "etp", "edp", "pp")
        same = {"dp_cp": layout.cp == 1, "edp": layout.ep == layout.etp == 1}
        return {name: group(layout, name) for name in names if not same.get(name)}

    def group_keys(self, layout: Layout) -> tuple[str, ...]:
        """Return the degrees."""
        return ("tp", "pp", "cp", "dp", "ep", "etp")

    def place(self, stage: StageMemory) -> str:
        """Return `stage 3`, since pipeline stages differ."""
        return f"stage {stage.stage}"

    def bands(self, case: Case) -> tuple[str, str]:
        """Return the bands; dense models, MoE models, adapters and 8-bit precisions have their own."""
        return band_keys(case.model, case.job)

    def graded_bands(self, case: Case) -> tuple[str, str]:
        """Return the bands, without the time band for adapters.

        Adapters save a third of the work that the speed bands refer to, so runs with adapters grade memory only.
        """
        memory, time = self.bands(case)
        return memory, "" if case.job.finetuning == "lora" else time

    def warnings(self, case: Case, layout: Layout) -> list[str]:
        """Return warnings about adapters, uneven stages, and degrees beyond what the links of a node carry well."""
        cluster, adapters = case.cluster, adapters_of(case.job)
        found = []
        if adapters and cluster.margin is not None:
            # catalog/measured/megatron.jsonl
            found.append(
                "published runs of LoRA with Megatron took 17 to 31% more memory than predicted; mind the margin"
            )
        if adapters and facts_of(case.model).is_moe and adapters.on("experts.linear_fc1"):
            found.append("every expert has adapters of its own; as other backends build the model, experts have none")
        if layout.moe_router_force_load_balancing:
            found.append("forced balance of tokens is for benchmarks: files that are written do not ask for it")
        if layout.tp > 1 and not cluster.nvlink_bytes_per_s:
            found.append(f"tp {layout.tp} over PCIe: no NVLink in these nodes")
        if layout.ep * layout.etp > (domain := tensor_parallel_domain(case)):
            found.append(f"ep {layout.ep} * etp {layout.etp} crosses nodes: an NVLink domain has {domain} GPUs")
        return found

    def assumptions(self, case: Case, layout: Layout) -> list[str]:
        """Return the assumptions about how tokens reach their experts."""
        found = []
        if layout.ep > 1 and case.job.token_imbalance is None and not layout.moe_router_force_load_balancing:
            imbalance = imbalance_of(case, layout)
            what = "tokens are spread evenly over the experts"
            if imbalance > 1.0:
                what = f"the busiest rank's experts get {imbalance:.2f} times the average number of tokens"
            found.append(f"assumes that {what} (token_imbalance of the job)")
        is_usual = layout.ep > 1 and layout.moe_token_dispatcher_type is None
        if is_usual and dispatcher_of(case, layout) == "flex":
            found.append("assumes the flex dispatcher, DeepEP or HybridEP, between nodes (moe_token_dispatcher_type)")
        return found


MEGATRON = Megatron()
