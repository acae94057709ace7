"""A fine-tuning job: what is trained, on what, in which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from topoplan.specs.lengths import PREPROCESSING_BATCH, Lengths, Packing, packed


def usual_learning_rate(finetuning: str, stage: str) -> float:
    """Peak learning rate where nobody names one.

    LLaMA-Factory's examples (train_lora/qwen3_lora_sft.yaml, qwen3_lora_dpo.yaml) and ms-swift's default of adapters
    (4.6.0 `arguments/sft_args.py`, `megatron/arguments/megatron_args.py`).
    """
    if stage == "dpo":
        return 5e-6
    return 1e-4 if finetuning in ("lora", "qlora") else 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One fine-tuning job."""

    seq_len: int
    """Tokens a sequence: LLaMA-Factory's cutoff_len."""
    global_batch_size: int
    """Sequences per optimizer step."""
    precision: str = "bf16"
    """bf16, fp16, fp8, mxfp8 or nvfp4."""
    finetuning: str = "full"
    """full, freeze, lora or qlora."""
    stage: str = "sft"
    """pt, sft or dpo."""
    dataset: str | None = None
    dataset_dir: str | None = None
    template: str | None = None
    packing: bool = False
    """Samples are packed to seq_len, so that every position is a real token. The trainer's own default: only stage pt
    packs. Without packing and without `lengths` every sequence is taken to be seq_len long, which none exceeds."""
    lengths: Lengths | None = None
    """How long the samples are; None where nothing is known."""
    samples: int | None = None
    """Sequences in the data set (packed ones with packing)."""
    epochs: float = 3.0
    learning_rate: float = 2e-5
    lora_rank: int | None = None
    """Rank of the adapters with lora and qlora; None is the trainers' usual 8."""
    lora_target: tuple[str, ...] = ("all",)
    """Linear layers that get an adapter, by their names in Hugging Face's model, or in Megatron-core's with backend
    megatron; `all` is every one but the output layer."""
    quantization_bit: int | None = None
    """Bits of the frozen weights with qlora: 4 (NF4) or 8; None is 4."""
    freeze_trainable_layers: int = 2
    """With freeze: the last layers, which alone are trained; negative for the first ones. LLaMA-Factory's default."""
    pure_bf16: bool = False
    """Weights and optimizer in bf16, without fp32 copies."""
    optimizer: str = "adamw"
    """adamw, or adamw_8bit, whose two moments are in 8 bits (bitsandbytes)."""
    freeze_vision_tower: bool = True
    """LLaMA-Factory's own default."""
    freeze_multi_modal_projector: bool = True
    freeze_language_model: bool = False
    image_max_pixels: int = 589824
    """LLaMA-Factory's own default; 768 x 768 pixels."""
    images_per_sequence: float = 1.0
    """Images in one (packed) sequence, on average; counts for vision-language models alone."""
    token_imbalance: float = 1.0
    """Tokens that the busiest rank's experts get, over the average; 1 is perfectly balanced routing."""
    mtp_num_layers: int = 0
    """Multi-token-prediction layers that are trained with the model, each a depth with a loss of its own."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the trainer's YAML, passed through."""
    pin: Mapping[str, Any] = field(default_factory=dict)
    """Layout keys that must hold, such as {"tp": 4}."""

    @property
    def trains_language_weights(self) -> bool:
        """The language model's own weights are trained, its embedding and output layer among them."""
        return self.finetuning == "full" and not self.freeze_language_model

    @property
    def packs(self) -> bool:
        """Samples share sequences: DPO takes its pairs one by one, whatever `packing` says."""
        return self.packing and self.stage != "dpo"

    @property
    def keeps_samples_apart(self) -> bool:
        """Attention stays within the samples of a packed sequence.

        LLaMA-Factory's neat_packing, which turns on mcore_adapter's sequence_packing and the reverse
        (`train/mca/workflow.py::run_sft`); else attention runs over the whole sequence. Stage pt knows neither.
        """
        apart = self.trainer.get("neat_packing") or self.trainer.get("sequence_packing")
        return bool(apart) and self.packs and self.stage == "sft"

    @property
    def packed(self) -> Packing | None:
        """How the samples fill packed sequences; None without packing, or where lengths are not known."""
        if self.lengths is None or not self.packs:
            return None
        batch = self.trainer.get("preprocessing_batch_size")
        size = batch if isinstance(batch, int) and batch > 0 else PREPROCESSING_BATCH
        return packed(self.lengths, self.seq_len, size, joined=self.stage == "pt")

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one sample of the batch brings: in DPO, a chosen and a rejected answer."""
        return 2 if self.stage == "dpo" else 1
