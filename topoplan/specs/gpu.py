"""A GPU model: the memory, compute and bandwidth of one card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from topoplan.specs.kinds import ARCHITECTURE, GPU_NAME, SIZE, Count, Number

Amount = Annotated[float, Number()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model of the catalog or of a `gpu:` block, in bytes, FLOP/s (dense) and bytes per second, one way."""

    name: Annotated[str, GPU_NAME]
    """Catalog name, such as `h100-sxm-80gb`."""
    architecture: Annotated[str, ARCHITECTURE]
    """One of `catalog.architectures()`: selects rules, kernels and the profile, not the peak rates."""
    memory_bytes: Annotated[int, SIZE]
    """Total memory as reported by the driver (nvidia-smi's memory.total)."""
    memory_bytes_per_s: Amount
    """Peak bandwidth of the device memory, as quoted by the vendor."""
    bf16_flops: Amount
    """Dense bf16 peak. On a card without bf16 tensor cores (V100), the rate of its fp32 units."""
    fp16_flops: Amount
    """Dense fp16 tensor-core peak."""
    fp8_flops: Amount | None = None
    """Dense fp8 peak; None if the card has no fp8."""
    fp4_flops: Amount | None = None
    """Dense fp4 peak; None if the card has no fp4."""
    sm_count: Annotated[int, Count(1, 10_000)]
    """Number of streaming multiprocessors, which is the number of GEMM tiles in one wave."""
    nvlink_bytes_per_s: Annotated[float, Number(0)]
    """NVLink rate in the usual machine, per GPU, one way; 0 for a PCIe card."""
    nvlink_domain_gpus: Annotated[int, SIZE]
    """GPUs connected by NVLink in the usual machine (8 in an HGX box, 72 in an NVL72 rack, 1 without NVLink)."""
    pcie_bytes_per_s: Amount
    """Rate of the link to the host, one way."""
    gpus_per_node: Annotated[int, SIZE]
    """GPUs in the usual machine."""
    nics_per_node: Annotated[int, SIZE]
    """Compute NICs in the usual machine."""
    nic_bytes_per_s: Amount
    """Rate of one compute NIC, one way."""
    source: str = ""
    """Where the figures come from."""
