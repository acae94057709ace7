"""The few numbers that are fitted or measured, not derived: how much of a peak real kernels reach.

They live in `catalog/profiles.json`, one entry an architecture, each with where it comes from and the error band that
it has earned on measured runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources

from topoplan.specs.gpu import Gpu


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Efficiencies and overheads of one GPU architecture. Fractions are of the vendor's peak.

    Compared and hashed by identity; there is one object a GPU.
    """

    name: str
    gemm_efficiency: float
    """Of the dense peak, for a GEMM large enough that tiles and waves do not matter."""
    grouped_gemm_efficiency: float
    """The same for the experts' grouped GEMMs."""
    fp8_gemm_efficiency: float
    """The same in fp8, of the fp8 peak, with the casts' own time counted apart."""
    attention_forward_efficiency: float
    """Of the bf16 peak, FlashAttention forward, causal, long sequences."""
    attention_backward_efficiency: float
    flash_attention: bool
    """Whether a flash attention kernel exists: FlashAttention 2 and cuDNN's start with Ampere."""
    memory_efficiency: float
    """Of the memory bandwidth, for elementwise kernels."""
    nvlink_efficiency: float
    """Bus bandwidth of large NCCL collectives inside the NVLink domain, of the one-way NVLink rate."""
    pcie_efficiency: float
    """The same over PCIe inside a node, where no link between CPU sockets is in the way."""
    network_efficiency: float
    """The same between nodes, of the NICs' one-way rate."""
    collective_latency_s: float
    """Fixed cost of one collective inside a node."""
    hop_latency_s: float
    """Further cost for each member of its ring beyond the first."""
    tp_overlap: float
    """Share of backward's tensor-parallel collectives that really runs beside GEMMs."""
    step_overhead_s: float
    """Host work of one step that no kernel hides: data, gradient norm, logging."""
    kernel_launch_s: float
    """Floor of one kernel: launch and drain."""
    gemm_tile: tuple[int, int]
    """Output tile of one streaming multiprocessor's GEMM step, rows by columns."""
    gemm_prologue: int
    """K extent that a tile's prologue and epilogue cost, in elements of K."""
    cublas_workspace_bytes: int
    """One cuBLAS workspace; PyTorch and Transformer Engine hold one each, grouped GEMMs four more."""
    context_bytes: int
    """CUDA context and loaded kernels: device memory that torch does not see."""
    nccl_bytes_per_communicator: int
    """Device memory of one NCCL communicator's buffers."""
    memory_band: float
    """Half width of the interval that measured memory fell in, as a fraction; what `fits` leaves free by default."""
    moe_memory_band: float
    """The same for a mixture of experts, whose busiest rank gets more tokens than the average."""
    time_band: float
    """The same for the step time of a dense model in bf16."""
    moe_time_band: float
    """The same for a mixture of experts."""
    eight_bit_time_band: float
    """The same in fp8 and below."""
    source: str


@lru_cache(maxsize=1)
def _profiles() -> dict[str, dict[str, object]]:
    text = resources.files("topoplan.catalog").joinpath("profiles.json").read_text(encoding="utf-8")
    profiles: dict[str, dict[str, object]] = json.loads(text)
    return profiles


@lru_cache(maxsize=64)
def profile_of(gpu: Gpu) -> Profile:
    """The profile of the card itself if there is one, else of its architecture.

    Raises KeyError for an architecture outside the catalog (spec forms refuse those earlier).
    """
    profiles = _profiles()
    values = profiles[gpu.architecture] | profiles.get(gpu.name, {})
    known = {field.name for field in fields(Profile)}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in known}
    return Profile(name=gpu.name if gpu.name in profiles else gpu.architecture, **values)  # type: ignore[arg-type]
