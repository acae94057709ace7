"""A GPU model: what one card can hold, compute and move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from topoplan.specs.kinds import ARCHITECTURE, GPU_NAME, SIZE, Count, Number

Amount = Annotated[float, Number()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model, in bytes, FLOP/s (dense) and bytes per second each way.

    Instances come from `topoplan.catalog` or from a `gpu:` block of a spec file.
    """

    name: Annotated[str, GPU_NAME]
    """Catalog name, such as `h100-sxm-80gb`."""
    architecture: Annotated[str, ARCHITECTURE]
    """One of `catalog.architectures()`: decides rules, kernels and the profile, not the peaks."""
    memory_bytes: Annotated[int, SIZE]
    """What the driver reports as the card's total memory (nvidia-smi's memory.total)."""
    memory_bytes_per_s: Amount
    """Device memory bandwidth, vendor's peak."""
    bf16_flops: Amount
    """Dense bf16 peak. On a card without bf16 tensor cores (V100), the rate of its fp32 units."""
    fp16_flops: Amount
    """Dense fp16 tensor-core peak."""
    fp8_flops: Amount | None = None
    """Dense fp8 peak; None where the card has none."""
    fp4_flops: Amount | None = None
    """Dense fp4 peak; None where the card has none."""
    sm_count: Annotated[int, Count(1, 10_000)]
    """Streaming multiprocessors: the size of one wave of GEMM tiles."""
    nvlink_bytes_per_s: Annotated[float, Number(0)]
    """NVLink rate of the usual machine, each way and per GPU; 0 for a PCIe card."""
    nvlink_domain_gpus: Annotated[int, SIZE]
    """GPUs that reach each other over NVLink in the usual machine (8 in an HGX box, 72 in an NVL72 rack, 1 without)."""
    pcie_bytes_per_s: Amount
    """Host link, each way."""
    gpus_per_node: Annotated[int, SIZE]
    """GPUs in the usual machine."""
    nics_per_node: Annotated[int, SIZE]
    """Compute NICs in the usual machine."""
    nic_bytes_per_s: Amount
    """Rate of one of those NICs, each way."""
    source: str = ""
    """Where the figures come from."""
