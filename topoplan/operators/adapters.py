"""LoRA beside linear layers whose own weights are frozen: its rank, and which layers have it.

Under Megatron, PEFT creates adapters in fp32 and `Float16Module` casts them back to bf16 (`core/transformer/module.py`;
ms-swift `swift/megatron/utils/megatron_lm_utils.py::wrap_model`), so they are weights like any others: two bytes each,
with a gradient and optimizer states. With expert tensor parallelism, experts have no adapters (mcore_bridge 1.6.5
`tuners/lora.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.specs.job import Job

LORA_RANK = 8
"""LoRA rank if the job does not say: 8 in LLaMA-Factory `hparams/finetuning_args.py`, ms-swift
`arguments/tuner_args.py` and peft `tuners/lora/config.py`."""
ALPHA_PER_RANK = 2
"""LoRA's scale by its rank if the job does not say: LLaMA-Factory `hparams/finetuning_args.py`. ms-swift's is 32."""
DROPOUT = 0.05
"""LoRA dropout of a run document that does not say: ms-swift `swift/megatron/arguments/megatron_args.py`
(MegatronTunerMixin, lora_dropout)."""


def target_of(name: str) -> str:
    """Return the name by which PEFT matches a layer: the last component, linear_fc1 of `experts.linear_fc1`."""
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA beside the linear layers of a model whose own weights are frozen."""

    rank: int
    targets: tuple[str, ...]
    """Names of the layers that have an adapter; `all` for every linear layer."""
    dropout: float = DROPOUT
    """Share of the input that is dropped out in front of each adapter."""

    def on(self, name: str) -> bool:
        """Return whether a linear layer has an adapter."""
        return "all" in self.targets or target_of(name) in self.targets


def adapters_of(job: Job) -> Adapters | None:
    """Return the adapters of a job, or None if it trains the weights themselves."""
    if job.finetuning != "lora":
        return None
    dropout = DROPOUT if job.lora_dropout is None else job.lora_dropout
    return Adapters(job.lora_rank or LORA_RANK, job.lora_target, dropout)
