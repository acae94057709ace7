"""How trainers that split data only store a model: bytes per parameter, by whether it is trained, frozen or packed.

DeepSpeed: `runtime/zero/stage_1_and_2.py` and `stage3.py` (fp32 partitions, averaged gradients in the model's own 16
bits: `engine.py::get_data_types`). FSDP2: accelerate `utils/fsdp_utils.py::fsdp2_prepare_model` converts all parameters
to fp32, including frozen ones, and computes in 16 bits (up to 1.12, and LLaMA-Factory accepts none beyond 1.11; from
1.14 on frozen parameters stay as loaded). DDP under the Hugging Face trainer: parameters as loaded, trained weights in
fp32 (LLaMA-Factory `model/adapter.py`, cast_trainable_params_to_fp32), never gathered, cast by autocast. Adapters are
fp32 whatever the dtype of the model (peft `tuners/tuners_utils.py`, cast_adapter_dtype), except under DeepSpeed, which
casts the whole model (`engine.py::_configure_distributed_model`).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.engines.data_parallel.sharding import sharding_of
from topoplan.layout.layout import Layout
from topoplan.operators.op import BF16, FP32
from topoplan.specs.job import ADAPTERS, Job

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in NF4 with double quantization: blocks of 64, one 8-bit scale per block, and one fp32 scale per 256
block scales (Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3)."""
INT8_BYTES = 1.0
"""Bytes per weight in LLM.int8(); the scale of each row is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes per element, before sharding."""

    trained: float
    """The weight itself, of a trained parameter."""
    frozen: float
    quantised: float
    gradient: float
    optimizer: float
    """Adam's moments, and the fp32 copy of the weight if there is one."""


def _trains_in_bf16(job: Job) -> bool:
    return job.pure_bf16 and job.finetuning not in ADAPTERS


def moment_bytes(job: Job) -> float:
    """Return the bytes per parameter of Adam's two moments."""
    if job.optimizer == "adamw_8bit":
        return 2.0
    return 2.0 * (BF16 if _trains_in_bf16(job) else FP32)


def autocasts(job: Job, layout: Layout) -> bool:
    """Return whether trained weights stay in fp32 in use and autocast casts them for each operation.

    DeepSpeed has 16-bit weights, and FSDP2 gathers weights in 16 bits.
    """
    return sharding_of(layout).autocasts and not job.pure_bf16


def adapter_input_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes per element of an adapter's own copy of its input.

    The result is 0 if all dtypes are equal and there is no copy.
    """
    if job.pure_bf16:
        return 0 if sharding_of(layout).has_16_bit_model else FP32
    return BF16 if sharding_of(layout).autocasts else 0


def parameter_bytes(job: Job, layout: Layout) -> ParameterBytes:
    """Return the bytes that a backend keeps per parameter."""
    packed = INT8_BYTES if job.quantization_bit == 8 else NF4_BYTES
    how = sharding_of(layout)
    if how.has_16_bit_model:
        return ParameterBytes(
            trained=BF16, frozen=BF16, quantised=packed, gradient=BF16, optimizer=FP32 + moment_bytes(job)
        )
    own = BF16 if _trains_in_bf16(job) else FP32
    frozen = FP32 if how.fp32_frozen and not job.pure_bf16 else BF16
    return ParameterBytes(trained=own, frozen=frozen, quantised=packed, gradient=own, optimizer=moment_bytes(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The number of ranks over which each kind of state is divided."""

    weights: int
    gradients: int
    optimizer: int


def shards_of(layout: Layout, gpus_per_node: int) -> Shares:
    """Return the ranks over which states are divided: all ranks, or with hybrid sharding the ranks of a node.

    Ranks that share a sequence count too.
    """
    how, ranks = sharding_of(layout), layout.world_size
    if layout.sharding == "hybrid":
        ranks = min(ranks, gpus_per_node)
    return Shares(
        weights=ranks if how.divides_weights else 1,
        gradients=ranks if how.divides_gradients else 1,
        optimizer=ranks if how.divides_optimizer else 1,
    )
