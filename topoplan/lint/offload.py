"""The host memory that an offloaded configuration needs on a node, compared with what the node has."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.engines.data_parallel.states import states_of
from topoplan.layout.layout import changed
from topoplan.lint.translate import Translation
from topoplan.operators.finetuning import elements_of
from topoplan.planner.plan import Plan
from topoplan.planner.predict import memory_of
from topoplan.reading.finding import Finding
from topoplan.trainers.case import case_of
from topoplan.trainers.layout_keys import KEYS_OF_RULE, key_line
from topoplan.units import GIB

_PARTS = ("optimizer", "gradients", "weights")
_KILLED = ", and Linux kills a process that asks for more (exit code -9)"


def offload_findings(translation: Translation, plan: Plan) -> Iterator[Finding]:
    """Report host memory that is unstated or too small, with a breakdown of the need and a way to need less."""
    spec, memory = translation.spec, plan.memory
    if not memory.host_bytes:
        return
    capacity, node = spec.cluster.host_memory_bytes, f"each node of {spec.cluster.gpus_per_node} GPUs"
    needed = f"{memory.host_bytes / GIB:,.0f} GiB ({memory.host_bytes / 1e9:,.0f} GB)"
    if capacity is None:
        what = f"what is offloaded takes {needed} of host memory on {node}"
    elif memory.host_bytes > capacity:
        what = (
            f"what is offloaded takes {needed} of a node's host memory, and it has"
            f" {capacity / GIB:,.0f} GiB ({capacity / 1e9:,.0f} GB)"
        )
    else:
        return
    yield Finding(
        rule="layout-host-memory",
        severity="warning" if capacity is None else "error",
        part=translation.configuration.part,
        line=key_line(translation.configuration, KEYS_OF_RULE["host-memory"]),
        what=what,
        why=_made_of_megatron(translation) if plan.layout.is_megatron else _made_of(translation, plan),
        remedy=_remedy(translation, plan),
    )


def _made_of_megatron(translation: Translation) -> str:
    """Describe what Megatron's HybridDeviceOptimizer keeps there
    (`engines/megatron/states.py::host_optimizer_parts`)."""
    share, capacity = translation.layout.optimizer_offload_fraction, translation.spec.cluster.host_memory_bytes
    made_of = (
        f"optimizer_offload_fraction {share:g} of 16 bytes of fp32 weight, Adam's two moments and gradient for each"
        " parameter of a rank's shard, and of its gradients in fp32"
    )
    return made_of if capacity is None else made_of + _KILLED


def _made_of(translation: Translation, plan: Plan) -> str:
    """Return `12 bytes of ... for each of 72.7B trained parameters (872 GB), 177 GB of gradients, 145 GB of ...`."""
    spec, layout = translation.spec, plan.layout
    away = [one for one in states_of(case_of(spec, layout.backend), layout) if one.on_host]
    processes, trained = min(spec.cluster.gpus_per_node, layout.world_size), elements_of(spec.model, spec.job).trained
    held = {part: processes * sum(one.held_bytes for one in away if one.part == part) / 1e9 for part in _PARTS}
    each = sum(one.element_bytes for one in away if one.part == "optimizer")
    kept = "fp32 weight and Adam's two moments" if layout.backend == "deepspeed" else "Adam's two moments"
    rows = [
        f"{each:g} bytes of {kept} for each of {trained / 1e9:.2f}B trained parameters ({held['optimizer']:,.0f} GB)"
    ]
    rows.append(f"{held['gradients']:,.0f} GB of gradients")
    if held["weights"]:
        rows.append(f"{held['weights']:,.0f} GB of the weights themselves")
    # PyTorch's CachingHostAllocator (aten/src/ATen/core/CachingHostAllocator.h, PowerOf2Ceil; pytorch issue 95823).
    made_of = ", ".join(rows) + "; with pin_memory each buffer is rounded up to a power of two on top"
    if spec.cluster.host_memory_bytes is not None:
        made_of += _KILLED
    return made_of + (_own_estimate(translation) if layout.backend == "deepspeed" else "")


def _own_estimate(translation: Translation) -> str:
    """Return DeepSpeed's own estimate (`runtime/zero/stage3.py::estimate_zero3_model_states_mem_needs`; stages 1 and 2
    have a counterpart).

    The estimate adds room for buffers and omits the 16-bit gradients.
    """
    spec, layout = translation.spec, translation.layout
    if spec.job.finetuning != "full":
        return ""
    each = 18 if layout.offload_param else 16
    nodes = spec.cluster.nodes if layout.zero_stage == 3 else 1
    needed = each * elements_of(spec.model, spec.job).total / nodes
    return (
        f"; DeepSpeed's own estimate is {each} bytes per parameter ({needed / GIB:,.0f} GiB), and half as much again"
        " to be safe"
    )


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
