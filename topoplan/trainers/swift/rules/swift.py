"""Arguments of ms-swift: `swift sft` and `megatron sft`.

Sources, at ms-swift 4.5.2: `swift/arguments/`, `swift/megatron/arguments/`, `swift/trainers/arguments.py`, and
`swift/pipelines/base.py`, which stops at arguments that are left over. Its parser is argparse's (HfArgumentParser): a
beginning that fits one option alone stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.errors import nearest
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, number, value_of, whole, words
from topoplan.specs.facts import facts_of
from topoplan.trainers.models import known_model
from topoplan.trainers.swift.rules.swift_arguments import argument_findings, command_of

_PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_PARALLEL = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the arguments of ms-swift."""
    for configuration in setup.of("swift", "swift-megatron"):
        yield from argument_findings(configuration, command_of(setup, configuration))
        if configuration.trainer == "swift":
            yield from _evaluation(configuration)
            yield from _sft(configuration)
        else:
            yield from _megatron(configuration)


# swift sft -----------------------------------------------------------------------------------------------------------


def _sft(configuration: Configuration) -> Iterator[Finding]:
    deepspeed = words(configuration, "deepspeed")
    if deepspeed and deepspeed.startswith("zero") and deepspeed not in _PRESETS and "." not in deepspeed:
        close = nearest(deepspeed, _PRESETS)
        yield found(
            configuration,
            "swift-unknown-preset",
            "error",
            "deepspeed",
            f"--deepspeed {deepspeed} is no preset, and is taken for JSON text",
            remedy="; ".join(part for part in (f"expected one of {', '.join(_PRESETS)}, or a file", close) if part),
        )
    if configuration.get("deepspeed") and configuration.get("fsdp"):
        yield found(
            configuration,
            "swift-deepspeed-and-fsdp",
            "error",
            "fsdp",
            "--fsdp and --deepspeed exclude each other",
            remedy="keep one",
        )
    if configuration.get("deepspeed") and configuration.get("device_map"):
        yield found(
            configuration,
            "swift-deepspeed-and-device-map",
            "warning",
            "device_map",
            "--device_map with --deepspeed: DeepSpeed places the weights itself",
            remedy="take --device_map out",
        )
    ratio, steps = number(configuration, "warmup_ratio"), number(configuration, "warmup_steps")
    if ratio and steps:
        yield found(
            configuration,
            "swift-two-warmups",
            "error",
            "warmup_ratio",
            "--warmup_ratio and --warmup_steps cannot be set at the same time",
            why="swift/trainers/arguments.py refuses both together",
            remedy="keep one of them",
            edits=drop(configuration, ("warmup_ratio",)),
        )
    if ratio is not None and ratio >= 1:
        yield found(
            configuration,
            "swift-warmup-ratio",
            "error",
            "warmup_ratio",
            f"--warmup_ratio {ratio:g} must be less than 1",
            remedy="use --warmup_steps for a number of steps",
            edits=change(configuration, ("warmup_ratio",), name="warmup_steps"),
        )
    packs = [key for key in ("packing", "padding_free") if flag(configuration, key)]
    attention = configuration.get("attn_impl")
    flash = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
    if packs and attention not in flash:
        yield found(
            configuration,
            "swift-packing-without-flash-attention",
            "error",
            packs[0],
            f"--{packs[0]} needs flash attention, and --attn_impl is {'not set' if attention is None else attention}",
            why="swift/arguments/sft_args.py: 'feature requires a flash attention implementation'",
            remedy="add --attn_impl flash_attn",
        )
    if flag(configuration, "packing") and flag(configuration, "lazy_tokenize"):
        yield found(
            configuration,
            "swift-packing-and-lazy",
            "error",
            "lazy_tokenize",
            "--packing and --lazy_tokenize exclude each other",
            remedy="take --lazy_tokenize out",
            edits=drop(configuration, ("lazy_tokenize",)),
        )
    if flag(configuration, "fp16") and flag(configuration, "bf16"):
        yield found(
            configuration,
            "swift-two-precisions",
            "error",
            "fp16",
            "--fp16 and --bf16 exclude each other",
            remedy="keep bf16",
        )
    tuner = configuration.get("tuner_type", configuration.get("train_type"))
    rate = number(configuration, "learning_rate")
    if tuner == "full" and rate is not None and rate > 1e-4:
        yield found(
            configuration,
            "swift-learning-rate",
            "note",
            "learning_rate",
            f"--learning_rate {rate:g} is high for training all weights",
            why="ms-swift's own defaults are 1e-5 for full and 1e-4 for LoRA",
        )
    if tuner == "full":
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "target_modules"):
            if configuration.get(key) is not None:
                yield found(
                    configuration,
                    "swift-ignored-argument",
                    "warning",
                    key,
                    f"--{key} is ignored with --tuner_type full",
                    remedy="take it out",
                    edits=drop(configuration, (key,)),
                )


def _evaluation(configuration: Configuration) -> Iterator[Finding]:
    """`SftArguments._init_eval_strategy`: without data to evaluate on, eval_strategy is set to no."""
    share = number(configuration, "split_dataset_ratio") or 0.0
    has_data = share > 0 or any(configuration.get(key) for key in ("val_dataset", "cached_val_dataset", "eval_dataset"))
    strategy, every = configuration.get("eval_strategy"), number(configuration, "eval_steps")
    if not has_data and "load_args" not in configuration.source.data:
        asked = strategy in ("steps", "epoch")
        for key, given in (("eval_strategy", asked), ("eval_steps", every is not None)):
            if given:
                yield found(
                    configuration,
                    "swift-evaluates-nothing",
                    "warning" if asked else "note",
                    key,
                    f"--{key} has no effect: there is no data to evaluate on, and eval_strategy is set to no",
                    why="split_dataset_ratio is 0 since version 3.6, and no val_dataset is given",
                    remedy="add --split_dataset_ratio 0.01 or --val_dataset, or take it out",
                )
                break
    save = number(configuration, "save_steps")
    if flag(configuration, "load_best_model_at_end") and has_data and every and save and save % every:
        yield found(
            configuration,
            "swift-best-model-steps",
            "error",
            "save_steps",
            f"--save_steps {save:g} is no multiple of --eval_steps {every:g}, which --load_best_model_at_end needs",
            remedy="make it a multiple",
        )


# megatron sft --------------------------------------------------------------------------------------------------------


def _megatron(configuration: Configuration) -> Iterator[Finding]:
    degrees = {short: whole(configuration, key, 1) for short, key in _PARALLEL.items()}
    tp, pp = degrees["tp"], degrees["pp"]
    if tp and tp > 1 and not flag(configuration, "sequence_parallel"):
        yield found(
            configuration,
            "swift-sequence-parallel-off",
            "warning",
            "sequence_parallel" if "sequence_parallel" in configuration.source.data else _PARALLEL["tp"],
            f"--sequence_parallel is off with --tensor_model_parallel_size {tp}: every GPU of a group keeps all"
            " activations of norms, dropout and residuals",
            why="it costs hardly any traffic (arXiv 2205.05198, section 4.2.2)",
            remedy="add --sequence_parallel true",
            edits=change(configuration, ("sequence_parallel",), value=True)
            if "sequence_parallel" in configuration.source.data
            else (),
        )
    interleaved = whole(configuration, "virtual_pipeline_model_parallel_size")
    if interleaved and interleaved > 1 and pp == 1:
        yield found(
            configuration,
            "swift-interleaving-alone",
            "error",
            "virtual_pipeline_model_parallel_size",
            "--virtual_pipeline_model_parallel_size without pipeline stages is refused",
            why="megatron-core parallel_state.py: 'should be greater than 1 with interleaved schedule'",
            remedy="take it out",
            edits=drop(configuration, ("virtual_pipeline_model_parallel_size",)),
        )
    full = value_of(configuration, "recompute_granularity") == "full"
    method, layers = configuration.get("recompute_method"), configuration.get("recompute_num_layers")
    if full and (method is None or layers is None):
        missing = "recompute_method" if method is None else "recompute_num_layers"
        yield found(
            configuration,
            "swift-recompute-incomplete",
            "error",
            "recompute_granularity",
            f"--recompute_granularity full without --{missing} is refused",
            why="megatron-core transformer_config.py wants the method and the number of layers",
            remedy="add --recompute_method uniform --recompute_num_layers 1",
        )
    if value_of(configuration, "recompute_granularity") in (None, "selective") and method is not None:
        yield found(
            configuration,
            "swift-recompute-contradiction",
            "error",
            "recompute_method",
            "--recompute_method with selective recomputation, the default, is refused",
            why="megatron_args.py: 'recompute method is not yet supported for selective recomputing granularity'",
            remedy="take it out, or set --recompute_granularity full",
            edits=drop(configuration, ("recompute_method",)),
        )
    micro, total = whole(configuration, "micro_batch_size", 1), whole(configuration, "global_batch_size", 16)
    if micro and total and micro > 0 and total > 0 and total % micro:
        key = "global_batch_size" if "global_batch_size" in configuration.source.data else "micro_batch_size"
        yield found(
            configuration,
            "swift-batch",
            "error",
            key,
            f"global_batch_size {total} % micro_batch_size {micro} = {total % micro}",
            why="megatron_args.py wants it divisible by the micro batch times the data parallel size",
            remedy="make it a multiple",
        )
    model = known_model(configuration)
    experts = whole(configuration, "expert_model_parallel_size", 1)
    if model is not None and experts and experts > 1:
        facts = facts_of(model)
        odd = next((count for count in facts.experts if count % experts), None)
        if not facts.is_moe:
            what = f"--expert_model_parallel_size {experts}: {model.name} has no experts"
        elif odd is not None:
            what = f"experts {odd} % expert_model_parallel_size {experts} = {odd % experts} ({model.name})"
        else:
            return
        yield found(
            configuration,
            "swift-experts",
            "error",
            "expert_model_parallel_size",
            what,
            remedy="choose a divisor of the experts",
        )
