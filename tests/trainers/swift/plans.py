"""ms-swift files for plans built by hand."""

from dataclasses import replace
from typing import Any

from tests.bundle.samples import CLUSTER, QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Model

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)
SAMPLES = "samples.jsonl"


def files_for(
    *, cluster: Cluster = WITH_MEMORY, model: Model = QWEN3_8B, job: dict[str, Any] | None = None, **layout: Any
) -> dict[str, str]:
    """Return the files of a bundle, for ddp unless another backend is given."""
    backend = layout.pop("backend", "ddp")
    spec, plan = make_spec_and_plan(
        cluster=cluster, model=model, job={"dataset": SAMPLES, **(job or {})}, backend=backend, **layout
    )
    return generate(spec, plan, trainer="swift")
