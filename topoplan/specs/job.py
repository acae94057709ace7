"""A fine-tuning job: what is trained, on which data, in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from topoplan.specs.blocks import key
from topoplan.specs.kinds import Choice, Count, Number, Switch, Text, Tokens, Words
from topoplan.specs.lengths import PREPROCESSING_BATCH, Lengths, Packing, packed
from topoplan.specs.passed_on import TRAINER_KEYS

_TARGETS = Words(pattern=r"[A-Za-z0-9_][A-Za-z0-9_.]*", meaning="names of linear layers, or all", is_tuple=True)

FINETUNINGS = ("full", "freeze", "lora", "qlora")
ADAPTERS = ("lora", "qlora")
"""Kinds of fine-tuning that train adapters beside frozen weights."""
STAGES = ("pt", "sft", "dpo")


def usual_learning_rate(finetuning: str, stage: str) -> float:
    """Return the default peak learning rate.

    From LLaMA-Factory's examples (train_lora/qwen3_lora_sft.yaml, qwen3_lora_dpo.yaml) and ms-swift's default for
    adapters (4.6.0 `arguments/sft_args.py`, `megatron/arguments/megatron_args.py`).
    """
    if stage == "dpo":
        return 5e-6
    return 1e-4 if finetuning in ADAPTERS else 2e-5


USUAL_LORA_DROPOUT = 0.0
"""Default lora_dropout of a spec, the same for every plan: that of LLaMA-Factory (`hparams/finetuning_args.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, on which data, in which precision."""

    seq_len: Annotated[int, Tokens(1, 10_000_000)] = key(
        "Tokens in a sequence: LLaMA-Factory's cutoff_len; `32k` is 32 x 1024.", 4096, default=MISSING
    )
    global_batch_size: Annotated[int, Count(1, 1_000_000)] = key(
        "Sequences in an optimizer step, over all GPUs; with stage dpo pairs of them.", 64, default=MISSING
    )
    precision: Annotated[str, Choice(("bf16", "fp16", "fp8", "mxfp8", "nvfp4"))] = key(
        "Number format of the matrix multiplications.", default="bf16"
    )
    finetuning: Annotated[str, Choice(FINETUNINGS)] = key("Which parameters are trained.", default="full")
    stage: Annotated[str, Choice(STAGES)] = key(
        "Pre-training, supervised fine-tuning or direct preference optimization.", default="sft"
    )
    dataset: Annotated[str | None, Text(meaning="names with commas between them")] = key(
        "Data sets by their names in dataset_info.json, with commas, or a .json or .jsonl file. The lengths of samples "
        "are read from files on this machine."
    )
    dataset_dir: Annotated[str | None, Text(meaning="a path")] = key("Directory of dataset_info.json, on every node.")
    template: Annotated[str | None, Text(pattern=r"[A-Za-z0-9._-]+", meaning="a template's name")] = key(
        "LLaMA-Factory's chat template.", "qwen3_vl"
    )
    packing: Annotated[bool, Switch()] = key(
        "Samples are packed to seq_len, so that every position is a real token. In stage pt on by default.",
        default=False,
    )
    """Without packing and without `lengths`, every sequence is assumed to be seq_len long, the upper bound."""
    lengths: Lengths | None = None
    """The lengths of the samples; None if nothing is known."""
    samples: Annotated[int | None, Count(1, 10**12)] = key(
        "Sequences in the data set (packed ones with packing); gives hours and GPU-hours. Left out: as the lengths of "
        "the samples tell."
    )
    epochs: Annotated[float, Number(1e-6, 10_000)] = key("Passes over the data.", default=3.0)
    learning_rate: Annotated[float, Number(1e-12, 1)] = key(
        "Peak learning rate; else 2e-5, 1e-4 of adapters, 5e-6 of DPO.", default=2e-5
    )
    lora_rank: Annotated[int | None, Count(1, 8192)] = key(
        "Rank with lora and qlora; left out: 8. lora_alpha, a key for `trainer`, is else twice the rank, "
        "LLaMA-Factory's default, in the files of every trainer."
    )
    """None means 8, the trainers' common default."""
    lora_dropout: Annotated[float | None, Number(0, 1)] = key(
        "Dropout of the adapters' input; left out: 0, LLaMA-Factory's default, or in a document for `predict` "
        "ms-swift's 0.05 with Megatron. Any needs memory for a copy and a mask of the input.",
        0.05,
    )
    lora_target: Annotated[tuple[str, ...], _TARGETS] = key(
        "Linear layers that get an adapter, by their names in the model, or in Megatron-core's with backend megatron; "
        "by default all.",
        ["q_proj", "v_proj"],
        default=("all",),
    )
    """`all` means every linear layer except the output layer."""
    quantization_bit: Annotated[int | None, Count(4, 8)] = key(
        "Bits of the frozen weights with qlora, 4 or 8; by default 4."
    )
    freeze_trainable_layers: Annotated[int, Count(-1000, 1000)] = key(
        "With freeze: how many of the last layers are trained; negative for the first ones.", default=2
    )
    """The default is LLaMA-Factory's."""
    pure_bf16: Annotated[bool, Switch()] = key(
        "Weights and optimizer in bf16, without fp32 copies; not with Megatron.", default=False
    )
    optimizer: Annotated[str, Choice(("adamw", "adamw_8bit"))] = key(
        "adamw, or adamw_8bit with its moments in 8 bits; the latter not with Megatron.", default="adamw"
    )
    freeze_vision_tower: Annotated[bool, Switch()] = key("The vision encoder is not trained.", default=True)
    """The default is LLaMA-Factory's."""
    freeze_multi_modal_projector: Annotated[bool, Switch()] = key(
        "The projector between vision and language is not trained.", default=True
    )
    freeze_language_model: Annotated[bool, Switch()] = key("The language model is not trained.", default=False)
    image_max_pixels: Annotated[int, Count(28 * 28, 10**9)] = key(
        "Pixels above which an image is scaled down.", default=589824
    )
    """The default is LLaMA-Factory's: 768 x 768 pixels."""
    images_per_sequence: Annotated[float, Number(0, 10_000)] = key(
        "Images in a (packed) sequence, on average; for vision-language models.", default=1.0
    )
    token_imbalance: Annotated[float | None, Number(1, 64)] = key(
        "Tokens of the busiest rank's experts over the average; for a mixture of experts with ep > 1. Left out: as"
        " routers were measured to do, or 1 for Megatron's benchmarks."
    )
    mtp_num_layers: Annotated[int, Count(0, 16)] = key(
        "Multi-token-prediction layers that are trained with the model; left out: none.", default=0
    )
    """Each layer predicts one more token ahead, with a loss of its own."""
    trainer: Annotated[Mapping[str, Any], TRAINER_KEYS] = key(
        "Any other keys of the trainer's YAML, passed through.", default=dict
    )
    pin: Mapping[str, Any] = key("Fixed layout keys.", default=dict)
    reference_forwards: Annotated[int | None, Count(0, 16)] = key(
        "Forward passes without gradients that each sequence makes beside the one that trains, through the model as it"
        " was at first (GRPO, KTO). By default 1 in stage dpo, whose losses without a reference have 0 (SimPO, ORPO),"
        " and else none."
    )

    num_labels: Annotated[int, Count(0, 1_000_000)] = key(
        "Outputs of the layer that a classifier or a reward model has in place of the vocabulary's; left out: none.",
        default=0,
    )

    @property
    def trains_language_weights(self) -> bool:
        """Whether the language model's own weights are trained, including its embedding and output layer."""
        return self.finetuning == "full" and not self.freeze_language_model

    @property
    def forwards_beside(self) -> int:
        """Forward passes per sequence besides the training pass; DPO's reference model needs one."""
        return int(self.stage == "dpo") if self.reference_forwards is None else self.reference_forwards

    @property
    def keeps_reference(self) -> bool:
        """Whether a second, forward-only model stays in memory; with adapters, switching them off replaces it."""
        return self.forwards_beside > 0 and self.finetuning not in ADAPTERS

    @property
    def packs(self) -> bool:
        """Whether samples share sequences. DPO ignores `packing` and keeps its pairs apart, except in ms-swift."""
        return self.packing and (self.stage != "dpo" or self.packs_pairs)

    @property
    def packs_pairs(self) -> bool:
        """Whether a packed sequence has both answers of a pair: ms-swift's padding_free (`trainers/dpo_trainer.py`)."""
        return self.stage == "dpo" and self.packing and bool(self.trainer.get("padding_free"))

    @property
    def keeps_samples_apart(self) -> bool:
        """Whether attention is limited to each sample of a packed sequence.

        LLaMA-Factory's neat_packing, which implies mcore_adapter's sequence_packing and vice versa
        (`train/mca/workflow.py::run_sft`); otherwise attention covers the whole sequence. Stage pt supports neither.
        """
        apart = self.trainer.get("neat_packing") or self.trainer.get("sequence_packing")
        return bool(apart) and self.packs and self.stage == "sft"

    @property
    def packed(self) -> Packing | None:
        """How the samples fill packed sequences; None without packing, or if the lengths are unknown."""
        if self.lengths is None or not self.packs:
            return None
        batch = self.trainer.get("preprocessing_batch_size")
        size = batch if isinstance(batch, int) and batch > 0 else PREPROCESSING_BATCH
        return packed(self.lengths, self.seq_len, size, joined=self.stage == "pt")

    @property
    def sequences_per_sample(self) -> int:
        """Sequences per sample of the batch: two in DPO, a chosen and a rejected answer."""
        return 2 if self.stage == "dpo" and not self.packs_pairs else 1
