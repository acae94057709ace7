"""Keys of LLaMA-Factory that are right alone and refused together, in the order of its parser.

Sources, at LLaMA-Factory 0.9.5: `hparams/parser.py` (get_train_args, _verify_model_args), the `__post_init__` of
`hparams/{model,data,finetuning}_args.py`; transformers 5.6.0 `training_args.py` (__post_init__, _validate_args) and
`trainer.py` (__init__).
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, flag, is_complete, number, value_of, whole
from topoplan.reading.words import is_open
from topoplan.trainers.llamafactory.rules.keys import RENAMED
from topoplan.trainers.llamafactory.rules.megatron_bridge import bridge_refusals
from topoplan.units import shown

Refusal = tuple[str, str, str]
"""Key, what is wrong, remedy."""


def refusals(setup: Setup, configuration: Configuration) -> Iterator[Refusal]:
    """What LLaMA-Factory stops at."""
    yield from _refused_data(configuration)
    yield from _refused_method(configuration)
    yield from _refused_training(setup, configuration)
    yield from bridge_refusals(setup, configuration)


def _refused_data(configuration: Configuration) -> Iterator[Refusal]:
    """`hparams/data_args.py` and `model_args.py`, __post_init__."""
    have = configuration.source.data
    val_size = number(configuration, "val_size") or 0.0
    streaming, mix = flag(configuration, "streaming"), configuration.get("mix_strategy", "concat")
    if val_size > 1e-6 and have.get("eval_dataset") is not None:
        yield "val_size", "val_size and eval_dataset exclude each other", "keep one of them"
    elif val_size > 1e-6 and have.get("dataset") is None and is_complete(configuration):
        yield "val_size", "val_size without a dataset to take it from", "name the dataset"
    if have.get("interleave_probs") is not None and mix == "concat":
        yield "interleave_probs", "interleave_probs with mix_strategy concat", "set mix_strategy: interleave_under"
    if streaming and 1e-6 < val_size < 1:
        yield "val_size", f"val_size {val_size:g} with streaming: a share of an unknown length", "write a whole number"
    if streaming and have.get("max_samples") is not None:
        yield "max_samples", "max_samples with streaming", "use max_steps"
    if flag(configuration, "mask_history") and flag(configuration, "train_on_prompt"):
        yield "mask_history", "mask_history and train_on_prompt exclude each other", "keep one of them"
    for kind, most, least in (("image", 589824, 1024), ("video", 65536, 256)):
        high = whole(configuration, f"{kind}_max_pixels", most)
        low = whole(configuration, f"{kind}_min_pixels", least)
        if high is not None and low is not None and high < low:
            key = f"{kind}_max_pixels" if f"{kind}_max_pixels" in have else f"{kind}_min_pixels"
            yield key, f"{kind}_max_pixels {high} is below {kind}_min_pixels {low}", f"raise {kind}_max_pixels"


def _refused_method(configuration: Configuration) -> Iterator[Refusal]:
    """`hparams/finetuning_args.py`, __post_init__, and `parser.py::_verify_model_args`."""
    have = configuration.source.data
    method, stage = configuration.get("finetuning_type", "lora"), configuration.get("stage", "sft")
    if configuration.from_command and is_open(f"{method}{stage}"):
        return  # what only the shell knows
    stated = "finetuning_type" in have or is_complete(configuration)
    if stated and method != "lora":
        for key in ("use_rslora", "use_dora", "pissa_init"):
            if flag(configuration, key):
                yield key, f"{key} with finetuning_type {shown(method)}", "set finetuning_type: lora, or take it out"
        for key in ("loraplus_lr_ratio", "adapter_name_or_path"):
            if have.get(key) is not None:
                yield key, f"{key} with finetuning_type {shown(method)}", "set finetuning_type: lora, or take it out"
    if stated and have.get("quantization_bit") is not None and method not in ("lora", "oft"):
        what = f"quantization_bit with finetuning_type {shown(method)}: quantized weights are not trained"
        yield "quantization_bit", what, "set finetuning_type: lora, or take it out"
    if stated and flag(configuration, "use_llama_pro") and method == "full":
        yield "use_llama_pro", "use_llama_pro with finetuning_type full", "set finetuning_type: freeze"
    low_rank = [key for key in ("use_galore", "use_apollo", "use_badam") if flag(configuration, key)]
    if stated and low_rank and method == "lora":
        yield low_rank[0], f"{low_rank[0]} with finetuning_type lora", "set finetuning_type: full"
    if len(low_rank) > 1:
        yield low_rank[1], f"{' and '.join(low_rank)} exclude each other", "keep one of them"
    if low_rank and have.get("deepspeed") is not None and low_rank[0] != "use_badam":
        yield low_rank[0], f"{low_rank[0]} with DeepSpeed", "take deepspeed out"
    if stage == "ppo" and have.get("reward_model") is None and "stage" in have:
        yield "stage", "stage ppo without reward_model", "name the reward model"
    if stage == "dpo" and configuration.get("pref_loss", "sigmoid") != "sigmoid":
        smoothing = number(configuration, "dpo_label_smoothing") or 0.0
        if smoothing > 1e-6:
            yield "dpo_label_smoothing", "dpo_label_smoothing with another pref_loss than sigmoid", "take it out"
    if stage != "sft":
        for key in ("neat_packing", "train_on_prompt", "mask_history", "predict_with_generate"):
            if flag(configuration, key):
                yield key, f"{key} with stage {shown(stage)}, which is for sft alone", "take it out"


def _refused_training(setup: Setup, configuration: Configuration) -> Iterator[Refusal]:
    """`hparams/parser.py::get_train_args` and transformers `training_args.py`."""
    have, megatron = configuration.source.data, setup.path_of(configuration) != "plain"
    if flag(configuration, "fp16") and flag(configuration, "bf16"):
        yield "fp16", "fp16 and bf16 exclude each other", "keep bf16, or fp16 on cards before Ampere"
    if have.get("fsdp") and have.get("deepspeed") is not None:
        what = "fsdp and deepspeed exclude each other: 'Using --fsdp xxx together with --deepspeed is not possible'"
        yield "fsdp", what, "keep one of them"
    steps = whole(configuration, "max_steps", -1)
    if flag(configuration, "streaming") and steps is not None and steps < 0:
        yield "streaming", "streaming without max_steps: the length of an epoch is not known", "set max_steps"
    evaluates = strategy(configuration, "eval_strategy", "no")
    if evaluates in ("steps", "epoch") and not _has_evaluation_data(configuration):
        what = f"eval_strategy {evaluates} without data to evaluate on"
        yield _key_of_evaluation(configuration), what, 'set val_size: 0.01 or eval_dataset, or eval_strategy: "no"'
    elif flag(configuration, "do_eval") and not _has_evaluation_data(configuration):
        yield "do_eval", "do_eval without data to evaluate on", "set val_size: 0.01 or eval_dataset"
    if flag(configuration, "predict_with_generate") and not megatron:
        if not _has_evaluation_data(configuration):
            yield "predict_with_generate", "predict_with_generate without data to evaluate on", "set eval_dataset"
        if flag(configuration, "compute_accuracy"):
            yield "compute_accuracy", "compute_accuracy and predict_with_generate exclude each other", "keep one"
    if flag(configuration, "do_predict") and not flag(configuration, "predict_with_generate") and not megatron:
        yield "do_predict", "do_predict without predict_with_generate", "set predict_with_generate: true"
    if flag(configuration, "load_best_model_at_end"):
        yield from _refused_best(configuration, evaluates)
    if configuration.get("lr_scheduler_type") == "reduce_lr_on_plateau" and evaluates == "no":
        yield (
            "lr_scheduler_type",
            "lr_scheduler_type reduce_lr_on_plateau without evaluation",
            "set eval_strategy: steps",
        )
    if flag(configuration, "fp8") and have.get("quantization_bit") is not None and not megatron:
        yield "fp8", "fp8 with quantization_bit", "keep one of them"
    if have.get("infer_backend") not in (None, "huggingface"):
        yield "infer_backend", "infer_backend other than huggingface is not for training", "take it out"
    workers = whole(configuration, "dataloader_num_workers", 0)
    if have.get("dataloader_prefetch_factor") is not None and workers == 0:
        yield (
            "dataloader_prefetch_factor",
            "dataloader_prefetch_factor without dataloader_num_workers",
            "set the workers",
        )


def _refused_best(configuration: Configuration, evaluates: str | None) -> Iterator[Refusal]:
    key, saves = "load_best_model_at_end", strategy(configuration, "save_strategy", "steps")
    if saves == "best" or saves is None or evaluates is None:
        return
    if evaluates != saves:
        what = f"{key} with eval_strategy {evaluates} and save_strategy {saves}: a best model needs both alike"
        yield key, what, f"set {key}: false, or both strategies to steps"
    elif saves == "steps":
        logging = number(configuration, "logging_steps") or 500.0
        every, save = number(configuration, "eval_steps") or logging, number(configuration, "save_steps") or 500.0
        if every >= 1 and save >= 1 and save % every:
            what = f"{key} with save_steps {save:g} that is no multiple of eval_steps {every:g}"
            yield key, what, "save where it was evaluated: make save_steps a multiple"


def strategy(configuration: Configuration, key: str, default: str) -> str | None:
    """A strategy where it is one; None for what another rule refuses."""
    names = (key, *(old for old, new in RENAMED.items() if new == key))
    value = next((value_of(configuration, name) for name in names if name in configuration.source.data), default)
    if value is False:
        return "no"  # what was meant by the bare word
    return value if value in ("no", "steps", "epoch", "best") else None


def _key_of_evaluation(configuration: Configuration) -> str:
    return "eval_strategy" if "eval_strategy" in configuration.source.data else "evaluation_strategy"


def _has_evaluation_data(configuration: Configuration) -> bool:
    size = value_of(configuration, "val_size")
    return configuration.get("eval_dataset") is not None or (size is not None and as_number(size) != 0)
