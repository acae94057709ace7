"""The file of a calibration profile: what each constant of a GPU means, and what it may be.

Here the meaning of a constant stands once: `topoplan show profile` prints it, and `specs/gpu_profile.py` has the same
names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from topoplan.errors import SpecError
from topoplan.specs.forms import Form
from topoplan.specs.kinds import (
    BYTES,
    GPU_NAME,
    RATE,
    SECONDS,
    Checked,
    Count,
    Kind,
    Number,
    Quantity,
    Share,
    Switch,
    Text,
)
from topoplan.specs.profile import Calibrated
from topoplan.specs.scalars import as_number
from topoplan.units import shown


def _constant(meaning: str) -> Any:
    return Field(default=None, description=meaning)


def _falling_rates(value: Any) -> tuple[float, ...]:
    expected = "expected up to 64 falling rates above 0, in GB/s, such as [40, 30, 20]"
    rates = tuple(map(as_number, value)) if isinstance(value, list | tuple) else ()
    if not rates or any(isinstance(item, bool) or not isinstance(item, int | float) for item in rates):
        raise SpecError(f"{shown(value)} is not a list of rates", expected=expected)
    # Written so that a NaN, which compares as false, is refused too.
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
"""Of a kernel, a collective or a step; a bare number is in seconds."""
HELD = Quantity(BYTES, 0, 2**36, "0GiB to 64GiB", bare_unit=1)
"""Device memory; a bare number is in bytes."""
MOVED = Quantity(RATE, 1e6, 1e14, "1MB/s to 100TB/s", bare_unit=1.0)
"""What software moves in a second; a bare number is in bytes per second."""
Part = Annotated[float | None, Share()]
PartOrNone = Annotated[float | None, Share(is_zero_allowed=True)]
Delay = Annotated[float | None, DELAY]
Flag = Annotated[bool | None, Switch()]
SmallNumber = Annotated[int | None, Count(0, 4096)]


class _Kernels(Form):
    gemm_efficiency: Part = _constant("Rate of a deep GEMM that lasts, of the dense peak.")
    grouped_gemm_efficiency: Part = _constant("The same of the experts' grouped GEMMs.")
    fp8_gemm_efficiency: Part = _constant("The same in fp8, of the fp8 peak, without casts.")
    mxfp8_gemm_efficiency: Part = _constant("The same with a scale for every 32 values.")
    fp4_gemm_efficiency: Part = _constant("The same in fp4, of the fp4 peak.")
    gemm_tile: Annotated[tuple[int, int] | None, TILE] = _constant(
        "Least output tile of a GEMM that has a multiprocessor's full rate."
    )
    gemm_prologue: Annotated[int | None, Count(0, 65536)] = _constant("Elements of K that a tile's start and end cost.")
    accumulation_share: PartOrNone = _constant(
        "Part of the time of adding a weight's gradient to its buffer that its product does not hide."
    )
    memory_efficiency: Part = _constant("Rate of elementwise kernels, of the memory's bandwidth.")
    card_spread: PartOrNone = _constant(
        "Standard deviation of the rate of products over cards of a kind: a step waits for the slowest."
    )
    kernel_launch_s: Delay = _constant("Least time of one kernel: launch and drain.")
    router_gemm_share: Part = _constant("Rate of a router's GEMM, of that of a large one, on Megatron-core.")
    router_bytes: SmallNumber = _constant("What a router's other kernels move for one token and one expert.")
    router_kernels: SmallNumber = _constant("Number of these kernels on Megatron-core.")


class _Attention(Form):
    flash_attention: Flag = _constant("Whether a flash attention kernel exists for the card.")
    attention_forward_efficiency: Part = _constant(
        "Rate of causal attention's forward on long sequences and heads of 128, of the bf16 peak."
    )
    attention_backward_efficiency: Part = _constant("The same of its backward.")
    attention_prologue: SmallNumber = _constant("Keys beside those attended to that a query costs in each kernel.")
    attention_tail: SmallNumber = _constant("Queries whose keys a multiprocessor is still at when the others are done.")
    attention_softmax_width: SmallNumber = _constant(
        "Width of a head whose products take as long as the softmax of its scores."
    )
    delta_rule_share: Part = _constant(
        "Rate of the gated delta rule (linear attention), of that of attention's forward."
    )


class _Links(Form):
    nvlink_efficiency: Part = _constant(
        "Bus bandwidth of large collectives of 8 GPUs over NVLink, of its one-way rate."
    )
    nvlink_pair_share: Part = _constant(
        "Bus bandwidth of an all-gather of 2 GPUs over NVLink, of that of 8; above 0.58."
    )
    pcie_efficiency: Part = _constant(
        "The same over PCIe inside a node, where no link between CPU sockets is in the way."
    )
    network_efficiency: Part = _constant("The same between nodes, of the NICs' one-way rate.")
    tcp_socket_bytes_per_s: Annotated[float | None, MOVED] = _constant(
        "Rate of one TCP socket. Without RDMA, NCCL has two for a group and NIC."
    )
    collective_latency_s: Delay = _constant("Fixed time of a collective inside a node.")
    hop_latency_s: Delay = _constant("Further time for each member of its ring but the first.")
    network_hop_latency_s: Delay = _constant("The same for each domain of its ring but the first.")
    tree_efficiency: Part = _constant("Rate of trees, of that of rings on the same links.")
    nvls_efficiency: PartOrNone = _constant(
        "Bytes that NVLink SHARP all-reduces in a second, of a ring's bus bandwidth; 0 where there is none."
    )
    nvls_latency_s: Delay = _constant("What setting up NVLink SHARP costs over a ring.")
    ll_efficiency: Part = _constant("Rate of NCCL's protocol LL (low latency), of that of Simple.")
    ll_hop_share: Part = _constant("Time of its step inside a domain, of that of Simple.")
    ll_network_hop_share: Part = _constant("The same of the software between nodes.")
    tp_overlap: PartOrNone = _constant("Part of backward's tensor-parallel collectives that runs beside GEMMs.")
    overlap_interference: PartOrNone = _constant(
        "Part of hidden communication by which the work beside it gets longer, under ddp, deepspeed and fsdp2."
    )


class _Channels(Form):
    nvlink_gb_per_s: Annotated[float | None, Number(1, 10_000)] = _constant(
        "One-way rate of one NVLink: how many of them a GPU has follows from its rate."
    )
    nccl_nvlink_gb_per_s: Annotated[float | None, Number(1, 10_000)] = _constant("What NCCL counts one NVLink as.")
    nccl_inside_gb_per_s: Annotated[tuple[float, ...] | None, RATES] = _constant(
        "Rates of one ring that NCCL's search tries inside an NVLink domain."
    )
    nccl_between_gb_per_s: Annotated[tuple[float, ...] | None, RATES] = _constant("The same between domains.")
    nccl_doubles_narrow_rings: Flag = _constant("Whether NCCL doubles more than four rings of less than 50 GB/s each.")
    nvls_inside_channels: Annotated[int | None, Count(0, 64)] = _constant(
        "Channels of NVLink SHARP for a group inside one domain; 0 where there is none."
    )
    nvls_between_channels: Annotated[int | None, Count(0, 64)] = _constant("The same for a group of several domains.")


class _Eager(Form):
    eager_gemm_share: Part = _constant("Rate of a GEMM among eager PyTorch's kernels, of what it reaches alone.")
    eager_memory_share: Part = _constant(
        "The same of memory-bound kernels: short ones, strided ones and casts, with what is not counted around"
        " attention."
    )
    eager_launch_s: Delay = _constant("Host time of one operation, from Python to the launched kernel.")
    eager_router_kernels: SmallNumber = _constant("Number of a router's kernels beside its GEMM.")
    flash2_flops_per_sm: Annotated[float | None, Number(1e9, 1e15)] = _constant(
        "Most that FlashAttention 2 reaches on one streaming multiprocessor."
    )
    nf4_unpack_share: Part = _constant("Rate at which bitsandbytes unpacks NF4, of that of other memory-bound kernels.")
    zero3_hook_s: Delay = _constant(
        "Host time of ZeRO stage 3 around a linear layer: fetch, wait, release in a pass, or its gradients."
    )


class _Host(Form):
    step_overhead_s: Delay = _constant("Host work of a step that no kernel hides: data, gradient norm, logging.")
    host_adam_bytes_per_s: Annotated[float | None, MOVED] = _constant(
        "Traffic of a node's memory that an Adam on its CPUs sustains."
    )


class _DeviceMemory(Form):
    cublas_workspace_bytes: Annotated[int | None, HELD] = _constant(
        "One cuBLAS workspace of PyTorch, which holds one for forward and one for the thread that runs backward."
    )
    te_workspace_bytes: Annotated[int | None, HELD] = _constant(
        "One cuBLAS workspace of Transformer Engine, which holds one, and four more for grouped GEMMs."
    )
    context_bytes: Annotated[int | None, HELD] = _constant(
        "CUDA context and loaded kernels: device memory that torch does not see."
    )
    driver_bytes: Annotated[int | None, HELD] = _constant(
        "What nvidia-smi's total has over what CUDA lets a process use (`topoplan show recipes`)."
    )
    fragmentation: PartOrNone = _constant(
        "Reserved over allocated memory, less one, where every micro batch allocates the same sizes in the same order."
    )
    irregular_fragmentation: PartOrNone = _constant(
        "The same where several micro batches are in flight, or experts get other numbers of tokens each time."
    )
    sharded_fragmentation: PartOrNone = _constant(
        "The same under ddp, deepspeed and fsdp2: gathered weights, logits and gradients of other sizes come and go."
    )
    expandable_fragmentation: PartOrNone = _constant(
        "The same with expandable segments, whose pages are mapped where they are needed."
    )


class _ErrorBands(Form):
    memory_band: Part = _constant("Error band of the memory of a dense model.")
    moe_memory_band: Part = _constant("The same of a mixture of experts.")
    adapter_memory_band: Part = _constant("The same of adapters on Megatron-core.")
    time_band: Part = _constant("Error band of the step time of a dense model in bf16.")
    moe_time_band: Part = _constant("The same of a mixture of experts, in any precision.")
    eight_bit_time_band: Part = _constant("The same of a dense model in fp8 and below.")
    sharded_memory_band: Part = _constant("Error band of memory under ddp, deepspeed and fsdp2.")
    sharded_time_band: Part = _constant("Error band of the step time under ddp, deepspeed and fsdp2.")


class ProfileForm(_ErrorBands, _DeviceMemory, _Host, _Eager, _Channels, _Links, _Attention, _Kernels):
    """Constants of a GPU that are measured, not derived. Those left out are the GPU's own. Peaks are the vendor's."""

    list_of_keys: ClassVar[str] = "`topoplan show profile` lists the constants of a GPU"
    GROUPS: ClassVar[Mapping[str, type[Form]]] = {
        "kernels": _Kernels,
        "attention": _Attention,
        "links and collectives": _Links,
        "NCCL's channels": _Channels,
        "eager PyTorch": _Eager,
        "host": _Host,
        "device memory": _DeviceMemory,
        "error bands": _ErrorBands,
    }
    """The constants by what they are about."""

    gpu: Annotated[str, GPU_NAME] = Field(
        description="The card or the architecture that the constants are of.", examples=["h100-sxm-80gb"]
    )
    source: Annotated[str | None, Text()] = _constant("Where the constants come from.")
    calibrated: Calibrated | None = _constant("What `topoplan calibrate` measured, and with which trainer.")
