"""Arguments of ms-swift: `swift sft` and `megatron sft`.

Sources, at ms-swift 4.5.2: `swift/arguments/`, `swift/megatron/arguments/`, `swift/trainers/arguments.py`, and
`swift/pipelines/base.py`, which stops at arguments that are left over. Its parser is argparse's (HfArgumentParser): a
beginning that fits one option alone stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.check.edits import change, drop
from topoplan.check.finding import Finding
from topoplan.check.found import found
from topoplan.check.models import known_model
from topoplan.check.setup import Configuration, Setup
from topoplan.check.values import as_number, flag, number, value_of, whole, words
from topoplan.emit.trainer_keys import plain_keys, removed_keys
from topoplan.errors import nearest
from topoplan.layout.rules import facts_of
from topoplan.units import quote, shown

_PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_TOKENS = ("hub_token", "swanlab_token", "swanlab_secret")
_FROM_TRANSFORMERS = ("predict_with_generate", "generation_config", "generation_max_length", "generation_num_beams")
_PARALLEL = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """What one of the two commands takes."""

    types: Mapping[str, Mapping[str, Any] | None]
    """None where only the name is known: transformers' own."""
    renamed: Mapping[str, str]
    gone: frozenset[str]


@cache
def _document() -> Mapping[str, Any]:
    path = files("topoplan.catalog").joinpath("trainer_keys", "ms_swift.json")
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@cache
def _arguments(command: str) -> _Arguments:
    """Of `sft` or of `megatron`."""
    document = _document()
    types: dict[str, Mapping[str, Any] | None] = {}
    if command == "sft":
        # Which transformers is installed is not known: what 4 or 5 has is taken.
        types |= {name: None for name, key in plain_keys().items() if key.package == "transformers"}
        types |= dict.fromkeys((*removed_keys(), *_FROM_TRANSFORMERS))
    types |= {**document["shared"], **document[command]}
    types |= {f"no_{name}": None for name, entry in types.items() if entry and entry["types"] == ["bool"]}
    return _Arguments(
        types=types,
        renamed=document["renamed_since_3"][command],
        gone=frozenset(document["gone_since_3"][command]),
    )


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the arguments of ms-swift."""
    for configuration in setup.of("swift", "swift-megatron"):
        command = "megatron" if configuration.trainer == "swift-megatron" else "sft"
        yield from _keys(configuration, _arguments(command), command)
        if command == "sft":
            yield from _evaluation(configuration)
            yield from _sft(configuration)
        else:
            yield from _megatron(configuration)


# Arguments -----------------------------------------------------------------------------------------------------------


def _keys(configuration: Configuration, known: _Arguments, command: str) -> Iterator[Finding]:
    version = _document()["versions"]["ms_swift"]
    for key, value in configuration.source.data.items():
        if key in known.types or (key == "ENV" and not configuration.from_command):
            if key in _TOKENS and value:
                what = f"{key} is a token or password in a command that gets copied and shared"
                yield found(
                    configuration, "swift-secret", "warning", key, what, remedy="set it in the environment of the nodes"
                )
            elif finding := _wrong_value(configuration, key, known.types.get(key)):
                yield finding
            continue
        began = [name for name in known.types if name.startswith(key)]
        if len(began) == 1 and configuration.from_command:
            continue
        if key in known.renamed:
            new = known.renamed[key]
            yield found(
                configuration,
                "swift-renamed-argument",
                "error",
                key,
                f"--{key} is refused by ms-swift 4, which calls it --{new}",
                why="version 3 had the old name; arguments that are left over stop version 4: 'remaining_argv'",
                remedy=f"write --{new}",
                edits=drop(configuration, (key,))
                if new in configuration.source.data
                else change(configuration, (key,), name=new),
            )
            continue
        other = _arguments("sft" if command == "megatron" else "megatron").types
        program = "megatron sft" if command == "megatron" else "swift sft"
        if key in known.gone:
            what, remedy = f"--{quote(key)} is refused by ms-swift 4; version 3 had it", "take it out"
        elif key in other:
            there = "swift sft" if command == "megatron" else "megatron sft"
            what, remedy = f"--{quote(key)} belongs to `{there}`, and `{program}` refuses it", nearest(key, known.types)
        else:
            what = f"--{quote(key)} is no argument of `{program}` (ms-swift {version}), which refuses it"
            remedy = nearest(key, known.types)
        yield found(
            configuration,
            "swift-unknown-argument",
            "error",
            key,
            what,
            why="arguments that are left over stop it: 'remaining_argv'",
            remedy=remedy or "take it out",
        )


def _wrong_value(configuration: Configuration, key: str, entry: Mapping[str, Any] | None) -> Finding | None:
    """Values that argparse refuses: another choice, or no number where one is wanted."""
    value = configuration.get(key)
    if entry is None or value is None or "list" in entry["types"] or not isinstance(value, str):
        return None
    choices, types = entry.get("choices", ()), entry["types"]
    if "$" in value or (value in ("None", "null", "") and entry.get("nullable")):
        return None  # a variable of the shell, or nothing
    if choices and value not in choices:
        close = nearest(value, choices)
        what, remedy = f"--{key} {shown(value)}", f"expected one of {', '.join(choices)}"
        remedy = f"{remedy}; {close}" if close else remedy
    elif set(types) <= {"int", "float"} and as_number(_number(value)) is None:
        what, remedy = f"--{key} {shown(value)} is no number", "expected a number"
    elif types == ["bool"] and value.lower() not in ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"):
        what, remedy = f"--{key} {shown(value)} is neither true nor false", "expected true or false"
    else:
        return None
    return found(configuration, "swift-wrong-value", "error", key, what, why="argparse refuses it", remedy=remedy)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
        for key, given in (("eval_strategy", strategy in ("steps", "epoch")), ("eval_steps", every is not None)):
            if given:
                yield found(
                    configuration,
                    "swift-evaluates-nothing",
                    "warning",
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
    model = known_model(configuration.get("model"), configuration.part)
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
