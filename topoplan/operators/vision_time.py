"""How long the vision tower of a vision-language model takes."""

from __future__ import annotations

from functools import lru_cache

from topoplan.layout.layout import Layout
from topoplan.operators.machine import elementwise_s, gemm_s
from topoplan.operators.op import BF16
from topoplan.operators.vision import patches_per_image, patches_per_microbatch
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.model import VisionTower


def unquantised(precision: str) -> str:
    """Precision of what stays out of fp8: the output layer and the vision tower."""
    return "fp16" if precision == "fp16" else "bf16"


def vision_s(case: Case, layout: Layout, tower: VisionTower) -> tuple[float, float]:
    """(forward, backward) seconds of the vision tower on one rank; it is not split by TP."""
    cluster, job, profile = case.cluster, case.job, case.profile
    patches = patches_per_microbatch(tower, job, layout)
    # Every image attends to itself alone.
    per_image = min(patches, patches_per_image(tower, job.image_max_pixels))
    forward = _tower_s(tower, patches, per_image, unquantised(job.precision), cluster, profile)
    # Nothing in front of a frozen tower is trained, so it has no backward, whatever becomes of its projector.
    again = layout.recompute.granularity == "full"
    return forward, 0.0 if job.freeze_vision_tower else forward * (2.0 + again)


@lru_cache(maxsize=1 << 10)
def _tower_s(
    tower: VisionTower, patches: int, per_image: int, precision: str, cluster: Cluster, profile: Profile
) -> float:
    """Forward seconds of the vision tower."""
    gpu, hidden = cluster.gpu, tower.hidden_size
    first = tower.intermediate_size * (2 if tower.gated else 1)
    block = (
        gemm_s(patches, 3 * hidden, hidden, gpu, profile, precision)
        + gemm_s(patches, hidden, hidden, gpu, profile, precision)
        + gemm_s(patches, first, hidden, gpu, profile, precision)
        + gemm_s(patches, hidden, tower.intermediate_size, gpu, profile, precision)
    )
    scores = 4.0 * patches * per_image * hidden / (gpu.fp16_flops * profile.attention_forward_efficiency)
    moved = BF16 * patches * (16 * hidden + 4 * first)
    return tower.layers * (block + scores + elementwise_s(moved, gpu, profile, kernels=14))
