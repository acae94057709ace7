"""How the trainers that split data alone keep a model: bytes of a parameter by what becomes of it, as data.

DeepSpeed: `runtime/zero/stage_1_and_2.py` and `stage3.py` (fp32 partitions, averaged gradients in the model's own
16 bits: `engine.py::get_data_types`). FSDP2: accelerate `utils/fsdp_utils.py::fsdp2_prepare_model` makes all parameters
fp32, the frozen ones too, and computes in 16 bits (up to 1.12, and LLaMA-Factory takes none beyond 1.11; from 1.14 on
frozen ones stay as loaded). DDP under the Hugging Face trainer: what was loaded, trained weights in fp32 (LLaMA-Factory
`model/adapter.py`, cast_trainable_params_to_fp32), gathered nowhere, cast by autocast. Adapters are fp32 whatever the
model is (peft `tuners/tuners_utils.py`, cast_adapter_dtype), but with DeepSpeed, which casts the whole model
(`engine.py::_configure_distributed_model`).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.engines.data_parallel.sharding import sharding_of
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job

HALF, SINGLE = 2, 4
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A weight in NF4 with double quantisation: blocks of 64, their scales in 8 bits, and one fp32 scale for 256 of these
(Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3)."""
INT8_BYTES = 1.0
"""A weight of LLM.int8(); its scale a row is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes of one element, before sharding."""

    trained: float
    """The weight itself, of a trained parameter."""
    frozen: float
    quantised: float
    gradient: float
    optimizer: float
    """Adam's moments, and an fp32 copy of the weight where there is one."""


def _trains_in_half(job: Job) -> bool:
    return job.pure_bf16 and job.finetuning not in ("lora", "qlora")


def moment_bytes(job: Job) -> float:
    """Adam's two moments of one parameter."""
    if job.optimizer == "adamw_8bit":
        return 2.0
    return 2.0 * (HALF if _trains_in_half(job) else SINGLE)


def autocasts(job: Job, layout: Layout) -> bool:
    """Whether trained weights stay in fp32 where they are used, and autocast casts what they meet.

    DeepSpeed has 16-bit weights, and FSDP2 gathers them in 16 bits.
    """
    return sharding_of(layout).autocasts and not job.pure_bf16


def adapter_input_bytes(job: Job, layout: Layout) -> int:
    """Of an element of what an adapter keeps of its input beside what others keep; 0 where all is of one type."""
    if job.pure_bf16:
        return 0 if sharding_of(layout).half_model else SINGLE
    return HALF if sharding_of(layout).autocasts else 0


def parameter_bytes(job: Job, layout: Layout) -> ParameterBytes:
    """What a backend keeps of a parameter."""
    packed = INT8_BYTES if job.quantization_bit == 8 else NF4_BYTES
    how = sharding_of(layout)
    if how.half_model:
        return ParameterBytes(
            trained=HALF, frozen=HALF, quantised=packed, gradient=HALF, optimizer=SINGLE + moment_bytes(job)
        )
    own = HALF if _trains_in_half(job) else SINGLE
    frozen = SINGLE if how.fp32_frozen and not job.pure_bf16 else HALF
    return ParameterBytes(trained=own, frozen=frozen, quantised=packed, gradient=own, optimizer=moment_bytes(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Over how many ranks each kind of state is divided."""

    weights: int
    gradients: int
    optimizer: int


def shards_of(layout: Layout, gpus_per_node: int) -> Shares:
    """All ranks share what is divided, those of a sequence too; with hybrid sharding those of a node."""
    how, ranks = sharding_of(layout), layout.world_size
    if layout.sharding == "hybrid":
        ranks = min(ranks, gpus_per_node)
    return Shares(
        weights=ranks if how.divides_weights else 1,
        gradients=ranks if how.divides_gradients else 1,
        optimizer=ranks if how.divides_optimizer else 1,
    )
