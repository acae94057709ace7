"""The host memory that an offloaded configuration needs on a node, compared with what the node has."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import changed
from topoplan.lint.translate import Translation
from topoplan.planner.account import memory_account
from topoplan.planner.plan import Plan
from topoplan.planner.predict import memory_of
from topoplan.reading.finding import Finding
from topoplan.reading.slurm import memory_of_node
from topoplan.terms import Term
from topoplan.trainers.case import case_of
from topoplan.trainers.layout_keys import KEYS_OF_RULE, key_line
from topoplan.units import GIB


def offload_findings(translation: Translation, plan: Plan) -> Iterator[Finding]:
    """Report host memory that is unstated or too small, with a breakdown of the need and a way to need less."""
    spec, memory = translation.spec, plan.memory
    if not memory.host_bytes:
        return
    capacity, node = spec.cluster.host_memory_bytes, f"each node of {spec.cluster.gpus_per_node} GPUs"
    needed = _both_units(memory.host_bytes)
    if capacity is None:
        what = f"what is offloaded takes {needed} of host memory on {node}"
    elif memory.host_bytes > capacity:
        what = (
            f"what is offloaded takes {needed} of a node's host memory, and it has {_both_units(capacity)}:"
            " Linux kills a process that asks for more (exit code -9)"
        )
    else:
        return
    yield Finding(
        rule="layout-host-memory",
        severity="warning" if capacity is None else "error",
        part=translation.configuration.part,
        line=key_line(translation.configuration, KEYS_OF_RULE["host-memory"]),
        what=what,
        why=_made_of(memory_account(spec, plan).host),
        remedy=_remedy(translation, plan),
    )


def job_memory_findings(translation: Translation, plan: Plan) -> Iterator[Finding]:
    """Report a job that asks Slurm for less host memory than what is offloaded takes."""
    launch = translation.processes.launch if translation.processes else None
    asked = memory_of_node(launch) if launch else None
    if launch is None or asked is None or plan.memory.host_bytes <= asked[0]:
        return
    needed = f"what is offloaded takes {_both_units(plan.memory.host_bytes)} of host memory on each node"
    yield Finding(
        rule="layout-host-memory",
        severity="warning",
        part=launch.part,
        line=asked[1],
        what=f"{needed}, and the job asks for {_both_units(asked[0])}",
        why="Slurm ends a job that takes more: 'oom_kill event' (sbatch(1), --mem)",
        remedy="write --mem=0 for all of the node's memory",
    )


def _both_units(size_bytes: float) -> str:
    return f"{size_bytes / GIB:,.0f} GiB ({size_bytes / 1e9:,.0f} GB)"


def _made_of(host: Term | None) -> str:
    """Return `872 GB of optimizer: fp32 weights and moments (12 bytes x 72.7B elements), 177 GB of ...`."""
    if host is None:
        return ""
    rows = []
    for term in host.children:
        product = "element_bytes" in term.facts
        factors = f" ({term.facts['element_bytes']:g} bytes x {term.facts['elements'] / 1e9:.2f}B)" if product else ""
        rows.append(f"{term.value / 1e9:,.0f} GB of {term.name}{factors}")
    return ", ".join(rows) + (f"; {host.what}" if host.what else "")


def _remedy(translation: Translation, plan: Plan) -> str:
    spec, layout = translation.spec, plan.layout
    words = []
    if spec.cluster.host_memory_bytes is None:
        words.append("give a spec that says host_memory (or --set host_memory=1TiB), and it is held against it")
    else:
        words.append("use a node with more memory, or more nodes, which share it out")
    if layout.offload_param:
        less = memory_of(case_of(spec, layout.backend), changed(layout, offload_param=False))
        on_gpu = f"and {less.device_bytes / GIB:.1f} GiB on each GPU of {less.capacity_bytes / GIB:.1f}"
        words.append(f"without offload_param it needs {less.host_bytes / GIB:,.0f} GiB {on_gpu}")
    return "; ".join(words)
