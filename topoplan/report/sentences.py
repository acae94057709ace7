"""Sentences that several reports share."""

from __future__ import annotations

from topoplan.planner.plan import Ranking, Rejection
from topoplan.report.text import counted, layout_label
from topoplan.specs.spec import Spec


def spec_line(spec: Spec) -> str:
    """Cluster, model and job: `h100-4x8, 4 x 8 h100-sxm-80gb: Qwen/Qwen3-8B, full sft bf16, 64 x 4,096 tokens`."""
    cluster, job = spec.cluster, spec.job
    machine = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    place = machine if cluster.name in machine else f"{cluster.name}, {machine}"
    work = f"{job.finetuning} {job.stage} {job.precision}, {job.global_batch_size:,} x {job.seq_len:,} tokens"
    return f"{place}: {spec.model.name}, {work}"


def counts_line(ranking: Ranking) -> str:
    """How many layouts there were, what became of them, and how far the search came."""
    counts = ranking.counts
    slower = f", {counts.dominated:,} slower variants of these" if counts.dominated else ""
    line = (
        f"{counted(counts.candidates, 'layout')}: {counts.ranked:,} fit{slower},"
        f" {counts.out_of_memory:,} out of memory, {counts.illegal:,} illegal"
    )
    return line if ranking.searched == 1.0 else f"{line}; stopped after {ranking.searched:.0%} of the search"


def reason_line(rejection: Rejection) -> str:
    """One rejected layout: `tp1 pp1 dp32 mbs1: <reason>; <fix>`."""
    line = f"{layout_label(rejection.layout)}: {rejection.reason}"
    return f"{line}; {rejection.fix}" if rejection.fix else line


def nearest_misses(ranking: Ranking, *, memory: int, rules: int) -> list[Rejection]:
    """The nearest layouts that only lack memory, then examples of broken rules; at most so many of each."""
    over = [out for out in ranking.rejected if out.rule == "memory"]
    illegal = {out.rule: out for out in reversed(ranking.rejected) if out.rule != "memory"}
    return over[:memory] + [*reversed(illegal.values())][:rules]
