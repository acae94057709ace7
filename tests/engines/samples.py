"""Specs, layouts and costs of catalog models on the usual machines, for tests of the formulas."""

from typing import Any

from topoplan.engines.megatron.memory import predict_memory
from topoplan.engines.megatron.microbatch import MicroBatch, StageTime, micro_batch, pipeline_times
from topoplan.engines.megatron.step import predict_time
from topoplan.engines.prediction import Memory, StageMemory, Time
from topoplan.layout.forms import layout_from_dict
from topoplan.layout.layout import Layout
from topoplan.planner.measured import MeasuredRun, shipped_runs
from topoplan.planner.validate import spec_of_run as spec_of_run
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

MIXED = "Qwen/Qwen3-30B-A3B"
DENSE = "Qwen/Qwen3-8B"
TIED = "Qwen/Qwen3-4B"
LATENT = "deepseek-ai/DeepSeek-V3"
VISION = "Qwen/Qwen3-VL-8B-Instruct"

CASES: list[tuple[str, dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}),
    (DENSE, {"tp": 2, "cp": 2, "recompute": "full"}),
    (MIXED, {"tp": 2, "pp": 4, "ep": 8, "recompute": {"granularity": "selective", "modules": ["moe"]}}),
    (LATENT, {"pp": 4, "ep": 8, "pipeline_layout": "Et*15|t*15|t*15|t*16L"}),
    (VISION, {"tp": 2, "pp": 2}),
]
"""Layouts in their JSON form that together have all kinds of stages."""


def full_recompute(method: str, num_layers: int) -> dict[str, Any]:
    """Return the JSON form of full recomputation by method uniform or block."""
    return {"granularity": "full", "method": method, "num_layers": num_layers}


def spec_of(
    model: str = DENSE,
    *,
    gpu: str = "h100-sxm-80gb",
    nodes: int = 4,
    gpus_per_node: int = 8,
    cluster: dict[str, Any] | None = None,
    **job: Any,
) -> Spec:
    """Return a spec of a catalog model on the usual machines of a GPU."""
    document = {
        "cluster": {"gpu": gpu, "nodes": nodes, "gpus_per_node": gpus_per_node, **(cluster or {})},
        "model": {"name": model},
        "job": {"seq_len": 4096, "global_batch_size": 64} | job,
    }
    return spec_from_document(document, where="test")


def layout_of(spec: Spec, **form: Any) -> Layout:
    """Return a layout of the megatron backend, completed as for `topoplan predict`."""
    return layout_from_dict({"backend": "megatron"} | form, spec.cluster, spec.model, spec.job)


def stage_of(spec: Spec, layout: Layout, rank: int = 0) -> StageMemory:
    """Return the memory of one pipeline stage."""
    return memory_of(spec, layout).by_stage[rank]


def memory_of(spec: Spec, layout: Layout) -> Memory:
    """Return the memory of all stages."""
    case = case_of(spec, layout.backend)
    return predict_memory(case, layout, all_stages=True)


def time_of(spec: Spec, layout: Layout) -> Time:
    """Return the time of a step."""
    case = case_of(spec, layout.backend)
    return predict_time(case, layout)


def pipeline_times_of(spec: Spec, layout: Layout) -> tuple[StageTime, ...]:
    """Return the times of a micro-batch on every pipeline rank."""
    case = case_of(spec, layout.backend)
    return pipeline_times(case, layout, micro_batch_of(spec, layout))


def micro_batch_of(spec: Spec, layout: Layout) -> MicroBatch:
    """Return the times of the pieces of a layout."""
    case = case_of(spec, layout.backend)
    return micro_batch(case, layout)


def measured_runs(family: str) -> list[MeasuredRun]:
    """Return the graded rows of a source among the shipped measured runs."""
    return [run for run in shipped_runs() if run.family == family and not run.left_out]


def layout_of_run(run: MeasuredRun) -> Layout:
    """Return the layout of a measured run."""
    spec = spec_of_run(run)
    return layout_from_dict(run.document["layout"], spec.cluster, spec.model, spec.job)
