"""The constants of a GPU: the meaning and valid range of each.

Each constant is declared here only. `gpu_profile.Profile` holds their values, `profile_form` derives the schema of a
profile file from them, and `topoplan show profile` prints their meanings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.kinds import BYTES, RATE, SECONDS, Checked, Count, Fraction, Kind, Number, Quantity, Switch
from topoplan.specs.scalars import as_number
from topoplan.units import shown


def _falling_rates(value: Any) -> tuple[float, ...]:
    expected = "expected up to 64 falling rates above 0, in GB/s, such as [40, 30, 20]"
    rates = tuple(map(as_number, value)) if isinstance(value, list | tuple) else ()
    if not rates or any(isinstance(item, bool) or not isinstance(item, int | float) for item in rates):
        raise SpecError(f"{shown(value)} is not a list of rates", expected=expected)
    # Written so that a NaN, which fails every comparison, is refused too.
    falling = all(ahead > behind for ahead, behind in itertools.pairwise(rates))
    if not (len(rates) <= 64 and falling and rates[-1] > 0 and rates[0] <= 10_000):
        raise SpecError(f"{shown(value)} is out of range", expected=expected)
    return tuple(map(float, rates))


_SIDE = {"type": "int", "strict": True, "ge": 16, "le": 1024, "multiple_of": 2}
TILE = Kind(
    {"type": "tuple", "items_schema": [_SIDE, _SIDE]},
    "a tile",
    "two even whole numbers from 16 to 1024, such as [128, 256]",
)
RATES = Checked(_falling_rates, {})
DELAY = Quantity(SECONDS, 0, 1, "0s to 1s", bare_unit=1.0)
"""A delay of a kernel, a collective or a step; a bare number is in seconds."""
HELD = Quantity(BYTES, 0, 2**36, "0GiB to 64GiB", bare_unit=1)
"""An amount of device memory; a bare number is in bytes."""
MOVED = Quantity(RATE, 1e6, 1e14, "1MB/s to 100TB/s", bare_unit=1.0)
"""A rate at which software moves data; a bare number is in bytes per second."""
PART, PART_OR_NONE = Fraction(), Fraction(is_zero_allowed=True)
FLAG, SMALL_NUMBER = Switch(), Count(0, 4096)


def _constant(kind: Kind, meaning: str, *, begins: str = "") -> Any:
    """Return the field of a profile's number; `begins` is the title of a group that starts with it."""
    return field(metadata={"kind": kind, "description": meaning, "begins": begins})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, init=False, repr=False)  # only profiles are made
class Constants:
    """The numbers of a profile.

    Fractions are of the vendor's peak unless the description says otherwise; units are in the names. An error band is
    the half width around a prediction, as a fraction; the memory band is also what `fits` leaves free by default.
    """

    gemm_efficiency: float = _constant(PART, "Rate of a deep GEMM that lasts, of the dense peak.", begins="kernels")
    grouped_gemm_efficiency: float = _constant(PART, "The same of the experts' grouped GEMMs.")
    fp8_gemm_efficiency: float = _constant(PART, "The same in fp8, of the fp8 peak, without casts.")
    mxfp8_gemm_efficiency: float = _constant(PART, "The same with a scale for every 32 values.")
    fp8_gradients_share: float = _constant(
        PART, "Rate of backward's fp8 GEMMs with one scale a tensor, which add up in fp32, of forward's."
    )
    fp8_transposes: bool = _constant(FLAG, "Whether fp8 GEMMs need copies transposed, with one scale a tensor.")
    fp4_gemm_efficiency: float = _constant(PART, "The same in fp4, of the fp4 peak.")
    gemm_tile: tuple[int, int] = _constant(TILE, "Least output tile of a GEMM that has a multiprocessor's full rate.")
    gemm_prologue: int = _constant(Count(0, 65536), "Elements of K that a tile's start and end cost.")
    fp8_gemm_prologue: int = _constant(Count(0, 65536), "The same in 8 bits or fewer.")
    accumulation_share: float = _constant(
        PART_OR_NONE, "Part of the time of adding a weight's gradient to its buffer that its product does not hide."
    )
    memory_efficiency: float = _constant(PART, "Rate of elementwise kernels, of the memory's bandwidth.")
    cast_efficiency: float = _constant(PART, "The same of those that cast to 8 bits or fewer.")
    card_spread: float = _constant(
        PART_OR_NONE, "Standard deviation of the rate of products over cards of a kind: a step waits for the slowest."
    )
    kernel_launch_s: float = _constant(DELAY, "Least time of one kernel: launch and drain.")
    router_gemm_share: float = _constant(PART, "Rate of a router's GEMM, of that of a large one, on Megatron-core.")
    router_bytes: int = _constant(SMALL_NUMBER, "What a router's other kernels move for one token and one expert.")
    router_kernels: int = _constant(SMALL_NUMBER, "Number of these kernels on Megatron-core.")
    flash_attention: bool = _constant(FLAG, "Whether a flash attention kernel exists for the card.", begins="attention")
    attention_forward_efficiency: float = _constant(
        PART, "Rate of causal attention's forward on long sequences and heads of 128, of the bf16 peak."
    )
    attention_backward_efficiency: float = _constant(PART, "The same of its backward.")
    attention_prologue: int = _constant(
        SMALL_NUMBER, "Keys beside those attended to that a query costs in each kernel."
    )
    attention_tail: int = _constant(
        SMALL_NUMBER, "Queries whose keys a multiprocessor is still at when the others are done."
    )
    attention_softmax_width: int = _constant(
        SMALL_NUMBER, "Width of a head whose products take as long as the softmax of its scores."
    )
    delta_rule_share: float = _constant(
        PART, "Rate of the gated delta rule (linear attention), of that of attention's forward."
    )
    nvlink_efficiency: float = _constant(
        PART,
        "Bus bandwidth of large collectives of 8 GPUs over NVLink, of its one-way rate.",
        begins="links and collectives",
    )
    nvlink_pair_share: float = _constant(
        PART, "Bus bandwidth of an all-gather of 2 GPUs over NVLink, of that of 8; above 0.58."
    )
    pcie_efficiency: float = _constant(
        PART, "The same over PCIe inside a node, where no link between CPU sockets is in the way."
    )
    network_efficiency: float = _constant(PART, "The same between nodes, of the NICs' one-way rate.")
    tcp_socket_bytes_per_s: float = _constant(
        MOVED, "Rate of one TCP socket. Without RDMA, NCCL has two for a group and NIC."
    )
    collective_latency_s: float = _constant(DELAY, "Fixed time of a collective inside a node.")
    hop_latency_s: float = _constant(DELAY, "Further time for each member of its ring but the first.")
    network_hop_latency_s: float = _constant(DELAY, "The same for each domain of its ring but the first.")
    tree_efficiency: float = _constant(PART, "Rate of trees, of that of rings on the same links.")
    nvls_efficiency: float = _constant(
        PART_OR_NONE,
        "Bytes that NVLink SHARP all-reduces in a second, of a ring's bus bandwidth; 0 where there is none.",
    )
    nvls_latency_s: float = _constant(DELAY, "What setting up NVLink SHARP costs over a ring.")
    ll_efficiency: float = _constant(PART, "Rate of NCCL's protocol LL (low latency), of that of Simple.")
    ll_hop_share: float = _constant(PART, "Time of its step inside a domain, of that of Simple.")
    ll_network_hop_share: float = _constant(PART, "The same of the software between nodes.")
    tp_overlap: float = _constant(
        PART_OR_NONE, "Part of backward's tensor-parallel collectives that runs beside GEMMs."
    )
    overlap_interference: float = _constant(
        PART_OR_NONE,
        "Part of hidden communication by which the work beside it gets longer.",
    )
    expert_overlap: float = _constant(
        PART_OR_NONE, "Part of dispatch and combine that runs beside the other micro-batch's pass."
    )
    nvlink_gb_per_s: float = _constant(
        Number(1, 10_000),
        "One-way rate of one NVLink: how many of them a GPU has follows from its rate.",
        begins="NCCL's channels",
    )
    nccl_nvlink_gb_per_s: float = _constant(Number(1, 10_000), "What NCCL counts one NVLink as.")
    nccl_inside_gb_per_s: tuple[float, ...] = _constant(
        RATES, "Rates of one ring that NCCL's search tries inside an NVLink domain."
    )
    nccl_between_gb_per_s: tuple[float, ...] = _constant(RATES, "The same between domains.")
    nccl_doubles_narrow_rings: bool = _constant(
        FLAG, "Whether NCCL doubles more than four rings of less than 50 GB/s each."
    )
    nvls_inside_channels: int = _constant(
        Count(0, 64), "Channels of NVLink SHARP for a group inside one domain; 0 where there is none."
    )
    nvls_between_channels: int = _constant(Count(0, 64), "The same for a group of several domains.")
    eager_gemm_share: float = _constant(
        PART, "Rate of a GEMM among eager PyTorch's kernels, of what it reaches alone.", begins="eager PyTorch"
    )
    eager_memory_share: float = _constant(
        PART,
        "The same of memory-bound kernels: short ones, strided ones and casts, with what is not"
        " counted around attention.",
    )
    eager_launch_s: float = _constant(DELAY, "Host time of one operation, from Python to the launched kernel.")
    eager_router_kernels: int = _constant(SMALL_NUMBER, "Number of a router's kernels beside its GEMM.")
    flash2_flops_per_sm: float = _constant(
        Number(1e9, 1e15), "Most that FlashAttention 2 reaches on one streaming multiprocessor."
    )
    nf4_unpack_share: float = _constant(
        PART, "Rate at which bitsandbytes unpacks NF4, of that of other memory-bound kernels."
    )
    zero3_hook_s: float = _constant(
        DELAY, "Host time of ZeRO stage 3 around a linear layer: fetch, wait, release in a pass, or its gradients."
    )
    step_overhead_s: float = _constant(
        DELAY, "Host work of a step that no kernel hides: data, gradient norm, logging.", begins="host"
    )
    host_adam_bytes_per_s: float = _constant(MOVED, "Traffic of a node's memory that an Adam on its CPUs sustains.")
    cublas_workspace_bytes: int = _constant(
        HELD,
        "One cuBLAS workspace of PyTorch, which holds one for forward and one for the thread that runs backward.",
        begins="device memory",
    )
    te_workspace_bytes: int = _constant(
        HELD, "One cuBLAS workspace of Transformer Engine, which holds one, and four more for grouped GEMMs."
    )
    context_bytes: int = _constant(HELD, "CUDA context and loaded kernels: device memory that torch does not see.")
    driver_bytes: int = _constant(HELD, "What nvidia-smi's total has over what CUDA lets a process use.")
    fragmentation: float = _constant(
        PART_OR_NONE,
        "Reserved over allocated memory, less one, where every micro batch allocates the same sizes in the same order.",
    )
    irregular_fragmentation: float = _constant(
        PART_OR_NONE,
        "The same where several micro batches are in flight, or experts get other numbers of tokens each time.",
    )
    transient_gaps: float = _constant(
        PART_OR_NONE,
        "What torch's allocator holds beyond live tensors under Megatron-core while the card has room, as a share of "
        "the tensors that come and go in a step.",
    )
    expert_gaps: float = _constant(
        PART_OR_NONE, "The same of a mixture of experts, which get another number of tokens each time."
    )
    sharded_fragmentation: float = _constant(
        PART_OR_NONE,
        "The same under ddp, deepspeed and fsdp2: gathered weights, logits and gradients of other sizes come and go.",
    )
    expandable_fragmentation: float = _constant(
        PART_OR_NONE, "The same with expandable segments, whose pages are mapped where they are needed."
    )
    tensors_beyond: float = _constant(
        Number(0, 1000),
        "Live tensors that runs out of memory needed beyond the prediction, as a share of those that come and go in a"
        " step; a lower bound.",
    )
    memory_band: float = _constant(PART, "Error band of the memory of a dense model.", begins="error bands")
    moe_memory_band: float = _constant(PART, "The same of a mixture of experts.")
    adapter_memory_band: float = _constant(PART, "The same of adapters on Megatron-core.")
    time_band: float = _constant(PART, "Error band of the step time of a dense model in bf16.")
    moe_time_band: float = _constant(PART, "The same of a mixture of experts, in any precision.")
    eight_bit_time_band: float = _constant(PART, "The same of a dense model in fp8 and below.")
    sharded_memory_band: float = _constant(PART, "Error band of memory under ddp, deepspeed and fsdp2.")
    sharded_time_band: float = _constant(PART, "Error band of the step time under ddp, deepspeed and fsdp2.")


def _groups() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    group: list[str] = []
    for own in fields(Constants):
        if title := own.metadata["begins"]:
            group = found[title] = []
        group.append(own.name)
    return {title: tuple(names) for title, names in found.items()}


GROUPS = _groups()
"""Group title -> names of the numbers in the group."""
BANDS = GROUPS["error bands"]
CONSTANTS = tuple(own.name for own in fields(Constants) if own.name not in BANDS)
OF_MEMORY = frozenset(
    (*GROUPS["device memory"], *GROUPS["NCCL's channels"], "flash_attention", "fp8_transposes"),
)
"""The constants on which predicted memory depends: NCCL's channels have buffers, and kernels save other tensors."""
OF_TIME = frozenset(CONSTANTS) - {*GROUPS["device memory"]}
"""The constants on which predicted step times depend."""
