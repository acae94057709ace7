"""The vision tower of a vision-language model: the patches it encodes, what it keeps, and how long it takes."""

from __future__ import annotations

from functools import lru_cache

from topoplan.layout.layout import Layout
from topoplan.operators.machine import elementwise_s, gemm_s
from topoplan.operators.op import BF16
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.job import Job
from topoplan.specs.model import VisionTower


def patches_per_image(tower: VisionTower, image_max_pixels: int) -> int:
    """Return the patches of one image at the trainer's pixel limit, rounded down to whole merged tokens."""
    merged_side = tower.patch_size * tower.spatial_merge_size
    tokens = max(1, image_max_pixels // merged_side**2)
    return tokens * tower.spatial_merge_size**2


def patches_per_microbatch(tower: VisionTower, job: Job, layout: Layout) -> int:
    """Return the patches that one rank of the first stage encodes for a micro-batch.

    The adapter distributes images over the tp * cp ranks only if there are at least as many images; with fewer, every
    rank encodes all of them (mcore_adapter `models/qwen3_vl/modeling_qwen3_vl.py`).
    """
    images = layout.micro_batch_size * job.sequences_per_sample * job.images_per_sequence
    ranks = layout.tp * layout.cp
    share = -(-images // ranks) if images >= ranks else images
    # A batch without images still runs the tower, on four dummy patches.
    return max(4, int(share * patches_per_image(tower, job.image_max_pixels)))


def vision_activation_bytes(tower: VisionTower, patches: int, *, recompute: bool) -> float:
    """Return the bytes that the Hugging Face vision tower keeps for `patches` patches.

    It is unsplit, with SDPA and unfused elementwise kernels. Per block: two norms (input and output), q, k, v before
    and after rotation, attention output, fc1 output and its activation. With gradient checkpointing each block keeps
    its input, and one block at a time is recomputed.
    """
    hidden, width = tower.hidden_size, tower.intermediate_size
    block = BF16 * (12 * hidden + (3 if tower.gated else 2) * width)
    if recompute:
        return patches * (tower.layers * BF16 * hidden + block)
    return patches * tower.layers * block


def unquantised(precision: str) -> str:
    """Return the precision of what is not quantized to fp8: the output layer and the vision tower."""
    return "fp16" if precision == "fp16" else "bf16"


def vision_s(case: Case, layout: Layout, tower: VisionTower) -> tuple[float, float]:
    """Return (forward, backward) seconds of the vision tower on one rank; tensor parallelism does not split it."""
    cluster, job, profile = case.cluster, case.job, case.profile
    patches = patches_per_microbatch(tower, job, layout)
    # Every image attends only to itself.
    per_image = min(patches, patches_per_image(tower, job.image_max_pixels))
    forward = _tower_s(tower, patches, per_image, unquantised(job.precision), cluster, profile)
    # Nothing before a frozen tower is trained, so it has no backward, whether or not its projector is trained.
    again = layout.recompute.granularity == "full"
    return forward, 0.0 if job.freeze_vision_tower else forward * (2.0 + again)


@lru_cache(maxsize=1 << 10)
def _tower_s(
    tower: VisionTower, patches: int, per_image: int, precision: str, cluster: Cluster, profile: Profile
) -> float:
    """Return the forward seconds of the vision tower."""
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


def vision_kept_bytes(case: Case, layout: Layout) -> float:
    """Return the bytes that the vision tower keeps of a micro-batch.

    A frozen tower keeps nothing, even if its projector is trained.
    """
    model, job = case.model, case.job
    if model.vision is None or job.freeze_vision_tower:
        return 0.0
    patches = patches_per_microbatch(model.vision, job, layout)
    return vision_activation_bytes(model.vision, patches, recompute=layout.recompute.granularity == "full")
