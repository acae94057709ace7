"""How much the vision tower of a vision-language model has to look at, and what it keeps of it."""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.operators.op import BF16
from topoplan.specs.job import Job
from topoplan.specs.model import VisionTower


def patches_per_image(tower: VisionTower, image_max_pixels: int) -> int:
    """Patches of one image at the trainer's pixel limit, rounded down to whole merged tokens."""
    merged_side = tower.patch_size * tower.spatial_merge_size
    tokens = max(1, image_max_pixels // merged_side**2)
    return tokens * tower.spatial_merge_size**2


def patches_per_microbatch(tower: VisionTower, job: Job, layout: Layout) -> int:
    """Patches that one rank of the first stage encodes for a micro batch.

    The adapter deals images out over the tp * cp ranks only when there are at least as many; with fewer every rank
    encodes them all (mcore_adapter `models/qwen3_vl/modeling_qwen3_vl.py`).
    """
    images = layout.micro_batch_size * job.sequences_per_sample * job.images_per_sequence
    ranks = layout.tp * layout.cp
    share = -(-images // ranks) if images >= ranks else images
    # A batch without images still runs the tower, on four dummy patches.
    return max(4, int(share * patches_per_image(tower, job.image_max_pixels)))


def vision_activation_bytes(tower: VisionTower, patches: int, *, recompute: bool) -> float:
    """What the Hugging Face vision tower keeps for `patches` patches: unsplit, SDPA, elementwise kernels unfused.

    Per block: two norms (input and output), q, k, v before and after rotation, attention output, fc1 output and its
    activation. With gradient checkpointing each block keeps its input.
    """
    hidden, width = tower.hidden_size, tower.intermediate_size
    block = BF16 * (12 * hidden + (3 if tower.gated else 2) * width)
    if recompute:
        return patches * (tower.layers * BF16 * hidden + block)
    return patches * tower.layers * block
