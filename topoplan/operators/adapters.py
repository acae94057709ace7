"""LoRA beside linear layers whose own weights are frozen: its rank, and which layers have it.

Under Megatron PEFT makes adapters fp32, and `Float16Module` bf16 again (`core/transformer/module.py`; ms-swift
`swift/megatron/utils/megatron_lm_utils.py::wrap_model`), so that they are weights as any others: two bytes, with a
gradient and an optimizer state. With expert tensor parallel experts have none (mcore_bridge 1.6.5 `tuners/lora.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.specs.job import Job

LORA_RANK = 8
"""Rank where the job does not say: LLaMA-Factory `hparams/finetuning_args.py`, ms-swift `arguments/tuner_args.py` and
peft `tuners/lora/config.py` all have 8."""
DROPOUT = 0.05
"""ms-swift `swift/megatron/arguments/megatron_args.py::MegatronTunerMixin`, lora_dropout."""


def target_of(name: str) -> str:
    """The name by which a layer is found for an adapter: `experts.linear_fc1` by linear_fc1, as PEFT does."""
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA beside the linear layers of a model whose own weights are frozen."""

    rank: int
    targets: tuple[str, ...]
    """Names of the layers that have one; `all` for every one."""

    def on(self, name: str) -> bool:
        """Whether a linear layer has one."""
        return "all" in self.targets or target_of(name) in self.targets


def adapters_of(job: Job) -> Adapters | None:
    """The adapters of a job; None where it trains the weights themselves."""
    return Adapters(job.lora_rank or LORA_RANK, job.lora_target) if job.finetuning == "lora" else None
