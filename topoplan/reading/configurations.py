"""YAML and JSON parts -> configurations: whose keys they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.errors import SpecError
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration, Trainer
from topoplan.specs.source import Source, parse_source
from topoplan.trainers.llamafactory.key_list import deepspeed_keys, known_keys
from topoplan.trainers.swift.arguments import arguments_of

READ = (
    "read are the YAML of LLaMA-Factory, ms-swift, Trinity-RFT and accelerate, the JSON of DeepSpeed, "
    "launch scripts and documents with these"
)
_TRINITY = frozenset(["algorithm", "buffer", "cluster", "explorer", "model", "monitor", "synchronizer", "trainer"])
_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"])
_LLAMAFACTORY = frozenset(
    ["model_name_or_path", "stage", "finetuning_type", "cutoff_len", "dataset_dir", "template", "do_train"]
)
_SWIFT = frozenset(["train_type", "tuner_type", "torch_dtype", "max_length", "split_dataset_ratio", "model", "ENV"])
_SWIFT_MEGATRON = frozenset(
    [
        *("micro_batch_size", "global_batch_size", "train_iters", "mcore_model", "lr_warmup_fraction", "no_save_optim"),
        *("no_save_rng", "load_safetensors", "attention_backend", "cross_entropy_loss_fusion", "finetune"),
    ]
)
_LLAMAFACTORY_V1 = frozenset(
    ["train_dataset", "dist_config", "peft_config", "init_config", "kernel_config", "model_class"]
)
_SWIFT_SAMPLE = frozenset(
    ["sampler_type", "sampler_engine", "orm_model", "prm_model", "num_return_sequences", "num_sampling_batch_size"]
)
_SWIFT_RAY = frozenset(["train", "rollout", "teacher", "colocate_groups"])
_OF_TOPOPLAN = frozenset(["gpus_per_node", "nodes", "gpu", "hosts", "job", "fabric"])


class UnknownKindError(SpecError):
    """A YAML or JSON document that is no trainer's."""


def configuration_of(part: Part, *, trainer: Trainer | None = None) -> Configuration:
    """The configuration in a YAML or JSON part; `trainer` says whose it is, where a command does.

    Raises SpecError when it cannot be parsed, or is nobody's.
    """
    source = _source(part)
    guessed = _guess(source.data)
    if guessed in ("deepspeed", "accelerate", "trinity") or trainer is None:
        trainer = guessed
    if trainer is None:
        raise UnknownKindError("is a configuration of an unknown kind", where=part.place(None), **_hint(source.data))
    return Configuration(trainer=trainer, part=part, source=source)


def _source(part: Part) -> Source:
    try:
        if part.kind == "json":
            return _json_source(part)
        return parse_source(part.text, name=part.name)
    except SpecError as error:
        raise SpecError(
            error.what, where=_in_file(part, error.where), expected=error.expected, remedy=error.remedy
        ) from None


def _in_file(part: Part, where: str) -> str:
    """`name:line:column` in the text of a part, as the line of the file."""
    match = re.fullmatch(r":(\d+)(?::\d+)?", where.removeprefix(part.name))
    if not part.lines or match is None:
        return where
    return part.place(int(match.group(1)))


def _json_source(part: Part) -> Source:
    """JSON, with the line of each value: YAML's events give these, and the JSON parser the strictness."""
    data: Any = None
    try:
        data = json.loads(part.text)
    except RecursionError:
        pass  # as the reader of YAML says below, with the line
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise SpecError(
            f"is not valid JSON: {message}",
            where=f"{part.name}:{line}",
            remedy="JSON has no comments, no commas behind the last item and double quotes only",
        ) from None
    return replace(parse_source(part.text.replace("\t", " "), name=part.name), data=data)


def _guess(data: Mapping[str, Any]) -> Trainer | None:
    """Whose keys these are."""
    keys = set(data)
    if not keys & _LLAMAFACTORY and (
        keys & _DEEPSPEED or ("train_batch_size" in keys and 2 * len(keys & deepspeed_keys()) >= len(keys))
    ):
        return "deepspeed"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    if keys & _LLAMAFACTORY_V1:
        return None
    if keys & _SWIFT_SAMPLE or _is_swift_ray(data):
        return None
    blocks = {key for key in keys if isinstance(data[key], dict)}
    model = data.get("model")
    if len(blocks & _TRINITY) >= 2 or (isinstance(model, dict) and "model_path" in model):
        return "trinity"
    if "model" in blocks:
        return None
    scores: dict[Trainer, int] = {
        "llamafactory": 2 * len(keys & _LLAMAFACTORY),
        "swift": 2 * len(keys & _SWIFT),
        "swift-megatron": 2 * len(keys & _SWIFT_MEGATRON) + len(keys & {"model"}),
    }
    known = sum(key in known_keys() for key in keys)
    best = max(scores, key=lambda name: scores[name])
    if scores[best]:
        return best if known or scores[best] > 2 else None
    if known < len(keys) and keys <= arguments_of("swift sft").types.keys():
        return "swift"
    return "llamafactory" if known and known * 2 >= len(keys) and blocks <= known_keys().keys() else None


def _is_swift_ray(data: Mapping[str, Any]) -> bool:
    """Groups of `megatron rlhf --use_ray true`, each with GPUs and arguments of its own."""
    return any(isinstance(data[key], dict) and "gpus" in data[key] for key in _SWIFT_RAY & data.keys())


def _hint(data: Mapping[str, Any]) -> dict[str, str]:
    schema = data.get("schema")
    if isinstance(schema, str) and schema.startswith("topoplan."):
        return {"expected": READ, "remedy": "for a bundle give its directory"}
    if set(data) & _LLAMAFACTORY_V1:
        return {
            "expected": READ,
            "remedy": "it looks like one of LLaMA-Factory's new engine (USE_V1), which is not read",
        }
    if set(data) & _SWIFT_SAMPLE:
        return {"expected": READ, "remedy": "it looks like one of ms-swift's `swift sample`, which trains nothing"}
    if _is_swift_ray(data):
        return {
            "expected": READ,
            "remedy": "it looks like one of ms-swift's trainer under Ray (--use_ray), which is not read",
        }
    if {"apiVersion", "kind"} <= set(data):
        remedy = (
            "it looks like a manifest of Kubernetes: give the command in it as a script, and the trainer's file itself"
        )
        return {"expected": READ, "remedy": remedy}
    if len(set(data) & _OF_TOPOPLAN) >= 2:
        return {"expected": READ, "remedy": "it looks like a cluster spec of topoplan: see `topoplan rank`"}
    return {"expected": READ}
