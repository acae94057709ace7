"""Arguments of ms-swift that conflict with each other, for `swift sft` and `megatron sft`.

First its tables of relations, and what these cannot express. Sources, at ms-swift 4.6.0:
`swift/arguments/sft_args.py` (_init_deepspeed, _init_fsdp), `swift/utils/env.py` (is_mp).
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import flag, number, value_of, whole, words
from topoplan.specs.facts import facts_of
from topoplan.trainers.around import context_of
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.relations import read_relations
from topoplan.trainers.swift.rules.swift_arguments import argument_findings, command_of
from topoplan.trainers.swift.rules.table import RULES
from topoplan.units import shown

_PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_FLASH_ATTENTION = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_LORA_ARGUMENTS = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults in the arguments of ms-swift."""
    for configuration in setup.of("swift", "swift-megatron"):
        yield from _refused(setup, configuration)
        yield from argument_findings(configuration, command_of(setup, configuration))
        if configuration.trainer == "swift":
            yield from _evaluation(configuration)
            yield from _sharding(configuration)
            yield from _training(configuration)
            yield from _method(configuration)
        else:
            yield from _layout(configuration, planned=setup.bundle_of(configuration) is not None)
            yield from _recompute(configuration)
            yield from _batch(configuration)
            yield from _experts(configuration)


# Both commands --------------------------------------------------------------------------------------------------------

_SHARDED = read_relations(__package__, "relations.toml")
_MEGATRON = read_relations(__package__, "megatron_relations.toml")
_TUNERS = (
    *("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone"),
    *("ia3", "lora_llm", "dummy"),
)
"""Tuners of `base_args.py`, get_supported_tuners; plug-ins may add others."""


def _refused(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Report combinations that ms-swift refuses."""
    is_sharded = configuration.trainer == "swift"
    table = _SHARDED if is_sharded else _MEGATRON
    refused, unwise = RULES["swift-refused-together"], RULES["swift-refused-together.unwise"]
    yield from table.findings(refused, configuration, context_of(setup, configuration), unwise=unwise)
    yield from _unknown_tuner(configuration)
    launch = launch_of(setup, configuration)
    if is_sharded and launch is not None:
        yield from _spread(configuration, launch)


def _unknown_tuner(configuration: Configuration) -> Iterator[Finding]:
    tuner = configuration.get("tuner_type")
    plugs_in = configuration.get("external_plugins") or configuration.get("custom_register_path")
    if isinstance(tuner, str) and tuner not in _TUNERS and "$" not in tuner and not plugs_in:
        remedy = "write lora, with --quant_method bnb --quant_bits 4" if tuner == "qlora" else "write lora or full"
        refusal = f"tuner_type {shown(tuner)} is none of ms-swift's: {', '.join(_TUNERS)}"
        yield RULES["swift-refused-together"].at(configuration, "tuner_type", refusal=refusal, remedy=remedy)


def _spread(configuration: Configuration, launch: Launch) -> Iterator[Finding]:
    """Report several GPUs per process: ms-swift then uses device_map, which DeepSpeed and FSDP do not support."""
    method = next((key for key in ("deepspeed", "fsdp") if configuration.get(key)), None)
    gpus, per_node = visible_gpus(launch), launch.variable("NPROC_PER_NODE")
    is_cli = launch.program == "swift" and not launch.starter
    if method is None or gpus is None or not is_cli or (per_node is not None and not per_node.value.isdecimal()):
        return
    processes = 1 if per_node is None else int(per_node.value)
    if processes and gpus // processes >= 2:
        state = "is not set, or not exported," if per_node is None else f"is {processes},"
        yield RULES["swift-spread-weights"].on(launch, per_node, state=state, gpus=gpus, method=method)


# swift sft -----------------------------------------------------------------------------------------------------------


def _evaluation(configuration: Configuration) -> Iterator[Finding]:
    """Report evaluation settings without data: `SftArguments._init_eval_strategy` then sets eval_strategy to no."""
    share = number(configuration, "split_dataset_ratio") or 0.0
    has_data = share > 0 or any(configuration.get(key) for key in ("val_dataset", "cached_val_dataset", "eval_dataset"))
    asked, every = configuration.get("eval_strategy") in ("steps", "epoch"), number(configuration, "eval_steps")
    if not has_data and "load_args" not in configuration.source.data:
        if asked:
            yield RULES["swift-evaluates-nothing"].at(configuration, "eval_strategy")
        elif every is not None:
            yield RULES["swift-evaluates-nothing"].at(configuration, "eval_steps", level="note")
    save = number(configuration, "save_steps")
    if flag(configuration, "load_best_model_at_end") and has_data and every and save and save % every:
        yield RULES["swift-best-model-steps"].at(configuration, "save_steps", save=save, every=every)


def _sharding(configuration: Configuration) -> Iterator[Finding]:
    deepspeed = words(configuration, "deepspeed")
    if deepspeed and deepspeed.startswith("zero") and deepspeed not in _PRESETS and "." not in deepspeed:
        close, presets = nearest(deepspeed, _PRESETS), ", ".join(_PRESETS)
        yield RULES["swift-unknown-preset"].at(
            configuration, "deepspeed", deepspeed=deepspeed, presets=presets, close=f"; {close}" if close else ""
        )
    if configuration.get("deepspeed") and configuration.get("fsdp"):
        yield RULES["swift-deepspeed-and-fsdp"].at(configuration, "fsdp")
    if configuration.get("deepspeed") and configuration.get("device_map"):
        yield RULES["swift-deepspeed-and-device-map"].at(configuration, "device_map")


def _training(configuration: Configuration) -> Iterator[Finding]:
    ratio, steps = number(configuration, "warmup_ratio"), number(configuration, "warmup_steps")
    if ratio and steps:
        yield RULES["swift-two-warmups"].at(configuration, "warmup_ratio")
    if ratio is not None and ratio >= 1:
        yield RULES["swift-warmup-ratio"].at(configuration, "warmup_ratio", ratio=ratio)
    packs = [key for key in ("packing", "padding_free") if flag(configuration, key)]
    attention = configuration.get("attn_impl")
    if packs and attention not in _FLASH_ATTENTION:
        yield RULES["swift-packing-without-flash-attention"].at(
            configuration, packs[0], attention="not set" if attention is None else attention
        )
    if flag(configuration, "packing") and flag(configuration, "lazy_tokenize"):
        yield RULES["swift-packing-and-lazy"].at(configuration, "lazy_tokenize")
    if flag(configuration, "fp16") and flag(configuration, "bf16"):
        yield RULES["swift-two-precisions"].at(configuration, "fp16")


def _method(configuration: Configuration) -> Iterator[Finding]:
    if configuration.get("tuner_type", configuration.get("train_type")) != "full":
        return
    rate = number(configuration, "learning_rate")
    if rate is not None and rate > 1e-4:
        yield RULES["swift-learning-rate"].at(configuration, "learning_rate", rate=rate)
    for key in _LORA_ARGUMENTS:
        if configuration.get(key) is not None:
            yield RULES["swift-ignored-argument"].at(configuration, key)


# megatron sft --------------------------------------------------------------------------------------------------------


def _layout(configuration: Configuration, *, planned: bool) -> Iterator[Finding]:
    """Report conflicting degrees and switches.

    `planned`: topoplan wrote the file and has weighed options that only cost memory.
    """
    tp, pp = (whole(configuration, f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    if tp and tp > 1 and not flag(configuration, "sequence_parallel") and not planned:
        key = "sequence_parallel"
        if key in configuration.source.data:
            yield RULES["swift-sequence-parallel-off"].at(configuration, key, tp=tp)
        else:
            yield RULES["swift-sequence-parallel-off"].at(configuration, "tensor_model_parallel_size", tp=tp)
    interleaved = whole(configuration, "virtual_pipeline_model_parallel_size")
    if interleaved and interleaved > 1 and pp == 1:
        yield RULES["swift-interleaving-alone"].at(configuration, "virtual_pipeline_model_parallel_size")


def _recompute(configuration: Configuration) -> Iterator[Finding]:
    granularity, method = value_of(configuration, "recompute_granularity"), configuration.get("recompute_method")
    layers = configuration.get("recompute_num_layers")
    if granularity == "full" and (method is None or layers is None):
        missing = "recompute_method" if method is None else "recompute_num_layers"
        yield RULES["swift-recompute-incomplete"].at(configuration, "recompute_granularity", missing=missing)
    if granularity in (None, "selective") and method is not None:
        yield RULES["swift-recompute-contradiction"].at(configuration, "recompute_method")


def _batch(configuration: Configuration) -> Iterator[Finding]:
    micro, total = whole(configuration, "micro_batch_size", 1), whole(configuration, "global_batch_size", 16)
    if micro and total and micro > 0 and total > 0 and total % micro:
        key = "global_batch_size" if "global_batch_size" in configuration.source.data else "micro_batch_size"
        yield RULES["swift-batch"].at(configuration, key, total=total, micro=micro, rest=total % micro)


def _experts(configuration: Configuration) -> Iterator[Finding]:
    model, key = model_at_hand(configuration.get("model"), configuration.part), "expert_model_parallel_size"
    experts = whole(configuration, key, 1)
    if model is None or not experts or experts < 2:
        return
    facts = facts_of(model)
    odd = next((count for count in facts.experts if count % experts), None)
    if not facts.is_moe:
        yield RULES["swift-experts.none"].at(configuration, key, experts=experts, model=model.name)
    elif odd is not None:
        yield RULES["swift-experts"].at(
            configuration, key, count=odd, experts=experts, rest=odd % experts, model=model.name
        )
