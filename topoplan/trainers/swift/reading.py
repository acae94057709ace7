"""Recognition of ms-swift's files and commands, and what `swift sft` and `megatron sft` read in the same way."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from topoplan.errors import listed
from topoplan.reading.recognizer import Recognizer
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_whole, value_of
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.trainers.codec import Reading, common
from topoplan.trainers.swift.arguments import COMMANDS, DECIDED, OF_THE_JOB, Command, accepted, arguments_of
from topoplan.trainers.swift.counterparts import WARMUP_KEYS
from topoplan.trainers.traits import PACKED_APART

_MARKS = frozenset(["train_type", "tuner_type", "torch_dtype", "max_length", "split_dataset_ratio", "model", "ENV"])
_MARKS_OF_MEGATRON = frozenset(
    [
        *("micro_batch_size", "global_batch_size", "train_iters", "mcore_model", "lr_warmup_fraction", "no_save_optim"),
        *("no_save_rng", "load_safetensors", "attention_backend", "cross_entropy_loss_fusion", "finetune"),
    ]
)
_METHODS = "sft|pt|rlhf"
_SUBCOMMANDS = (
    *("pt", "sft", "infer", "merge-lora", "web-ui", "deploy", "rollout", "rlhf", "sample", "export", "eval"),
    *("app", "merge_lora", "web_ui"),
)
_CLI = re.compile(r"(?:.*[/\s(`])?(swift|megatron)[\s)`'\"]*", re.DOTALL)
_FILE = re.compile(rf"(?:.*/)?swift[./]cli[./](_megatron[./])?({_METHODS})(?:\.py)?")


def _claim(data: Mapping[str, Any], known: int) -> float:
    is_likely = known < len(data) and data.keys() <= arguments_of("swift sft").types.keys()
    return 2.0 * len(data.keys() & _MARKS) or (0.5 if is_likely else 0.0)


def _claim_megatron(data: Mapping[str, Any], _known: int) -> float:
    return 2.0 * len(data.keys() & _MARKS_OF_MEGATRON) + ("model" in data)


def _usual(text: str, _module: bool) -> str:
    if match := _FILE.fullmatch(text):
        return f"swift.cli.{match.group(1) or ''}{match.group(2)}".replace("/", ".")
    return match.group(1) if (match := _CLI.fullmatch(text)) else ""


SWIFT = Recognizer(
    trainer="swift",
    package="ms-swift",
    claim=_claim,
    accepts=lambda: arguments_of("swift rlhf").types.keys() | arguments_of("swift sft").types.keys(),
    abbreviates=True,
    model_keys=("model",),
    names=("swift",),
    rule_name_of=_usual,
    command="swift",
    methods=_METHODS,
    subcommands=_SUBCOMMANDS,
    starts_torchrun=True,
    spreads_models=True,
    programs=r"swift|swift\.cli\.(?!_megatron\.).*",
    program_substring="swift",
    takes_deepspeed=True,
    text_keys=("system", "new_special_tokens"),
)
MEGATRON = Recognizer(
    trainer="swift-megatron",
    claim=_claim_megatron,
    accepts=lambda: arguments_of("megatron sft").types.keys(),
    abbreviates=True,
    model_keys=("model",),
    names=("megatron",),
    rule_name_of=_usual,
    command="megatron",
    methods=_METHODS,
    subcommands=("pt", "sft", "rlhf", "export"),
    starts_torchrun=True,
    spreads_models=True,
    programs=r"megatron|swift\.cli\._megatron\..*",
    program_substring="megatron",
    text_keys=("system", "new_special_tokens"),
)


_OF_THE_RUN = frozenset(
    [
        *("model", "model_type", "check_model", "use_hf", "dataset", "output_dir"),
        *("resume_from_checkpoint", "mcore_model", "adapters", "mcore_adapter", "load", "save", "merge_lora"),
        *("learning_rate", "lr", "num_train_epochs"),
        *("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "attn_impl"),
        *("rlhf_type", "task_type", "num_labels"),
    ]
)
"""Arguments of a single run, which every plan sets itself, or which are read elsewhere."""

_OF_MEGATRON = {"lr": "learning_rate", "max_epochs": "epochs"}
"""Arguments of `megatron sft`, the latter until ms-swift 3, and the keys of a job that they are."""
_ALPHA = 32
"""Default of `lora_alpha`, whatever the rank."""


def carried(keys: Keys, job: Job, backend: str | None, *, rows: Collection[str]) -> Mapping[str, Any]:
    """Return the keys of the job that no prediction reads.

    Under `trainer` are arguments that the command of a backend takes, or, for None, every command that may train the
    job; and what the file leaves to defaults that bundles do not share. `rows` are the arguments that express a layout.
    """
    commands = _commands(job, backend)
    of_plan = {name for command in COMMANDS for name in DECIDED.get(command, ())}
    not_these = {*_OF_THE_RUN, *OF_THE_JOB, *TRAINER_KEYS_OF_JOB, *TRAINER_KEYS_OF_LAYOUT, *rows, *of_plan}
    trainer = dict(job.trainer)
    for key in keys.configuration.source.data:
        name = next((known.renamed[key] for known in map(arguments_of, COMMANDS) if key in known.renamed), key)
        value = value_of(keys.configuration, key)
        if name not in not_these and all(accepted(name, value, command) for command in commands):
            trainer[name] = value
    trainer |= _unstated(job, trainer)
    of_megatron = {own: keys.number(name) for name, own in _OF_MEGATRON.items() if keys.given(name) is not None}
    return {**common(keys, job), **of_megatron, **({"trainer": trainer} if trainer else {})}


def _commands(job: Job, backend: str | None) -> tuple[Command, ...]:
    """Return the commands that may train a job, or the one that does under a backend."""
    if backend is not None:
        return ("swift sft" if backend in PACKED_APART else "megatron sft",)
    return ("swift sft",) if job.finetuning in ("qlora", "freeze") else ("swift sft", "megatron sft")


def _unstated(job: Job, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of ms-swift for what bundles write, with another value, if the spec does not state it.

    Sources: `trainers/arguments.py` and `megatron/arguments/megatron_args.py` (no warm-up), `arguments/tuner_args.py`.
    """
    if not stated.keys() & WARMUP_KEYS:
        yield "warmup_ratio", 0.0
    if job.finetuning in ADAPTERS and "lora_alpha" not in stated:
        yield "lora_alpha", _ALPHA


_ANSWER = 512
"""Default of `max_completion_length` (rlhf_trainers/arguments.py)."""
LENGTH = "max_length"
_WITHOUT_REFERENCE = ("cpo", "simpo", "orpo", "rm")
"""Methods on answer pairs whose loss needs no reference model (rlhf_trainers/, megatron/trainers/rlhf_mixin.py)."""


def with_answers(configuration: Configuration, _: Setup) -> Configuration:
    """Change max_length from the prompt alone, as GRPO counts it, to prompt and answer together."""
    data = configuration.source.data
    prompt = as_whole(data.get(LENGTH))
    if data.get("rlhf_type") != "grpo" or prompt is None:
        return configuration
    whole = prompt + (as_whole(data.get("max_completion_length")) or _ANSWER)
    return replace(configuration, source=replace(configuration.source, data={**data, LENGTH: whole}))


def stage_of(reading: Reading) -> Mapping[str, Any]:
    """Return the keys of the job that the command determines: pt, sft, or what `rlhf` is predicted as."""
    launch = reading.launch
    words = [launch.program.rpartition(".")[2], *launch.arguments[:1]] if launch else []
    stage = next((word for word in words if word in ("pt", "sft", "rlhf")), "sft")
    return _rlhf_job(reading.keys) if stage == "rlhf" else {"stage": stage}


def _rlhf_job(keys: Keys) -> Mapping[str, Any]:
    """Return the keys of the job that an `rlhf` configuration is predicted as.

    GRPO's policy update equals supervised fine-tuning on samples of prompt and answer (ms-swift 4.6
    `rlhf_trainers/grpo_trainer.py`, `megatron/trainers/grpo_trainer.py`), unless something else stays on the GPUs.
    Raises NotPredictedError for other methods, and for anything that stays on the GPUs while the policy is trained.
    """
    kind = keys.given("rlhf_type")
    if kind in _WITHOUT_REFERENCE:
        return {"stage": "dpo", "reference_forwards": 0}
    if keys.given("ref_model") not in (None, keys.given("model")):
        keys.not_predicted(("ref_model",), remedy="predicted is a copy of the model, which it is if left out")
    if kind in ("dpo", None):
        return {"stage": "dpo"}
    if kind == "kto":
        # kto_trainer.py of both: policy and reference see the sample, and again with a mismatched answer.
        return {"stage": "sft", "reference_forwards": 1 if keys.given("loss_type") == "apo_zero_unpaired" else 3}
    if kind != "grpo":
        keys.not_predicted(
            ("rlhf_type",), remedy=f"predicted are {listed(('dpo', 'kto', 'grpo', *_WITHOUT_REFERENCE))}"
        )
    if keys.flag("use_vllm") and keys.given("vllm_mode") != "server" and not as_whole(keys.given("sleep_level")):
        keys.not_predicted(
            ("use_vllm",),
            "GRPO with vLLM awake on the GPUs that train (sleep_level 0)",
            remedy="set sleep_level: 1, or vllm_mode: server",
        )
    beta = keys.number("beta")
    if keys.given("teacher_model") is not None:
        keys.not_predicted(("teacher_model",), remedy="leave teacher_model out to plan it without")
    return {"stage": "sft", "reference_forwards": 0 if beta == 0.0 else 1}


def rlhf_assumptions(reading: Reading) -> Iterator[str]:
    """State what is predicted of a step that generates, scores and trains."""
    if reading.keys.given("rlhf_type") == "grpo":
        yield "predicted is the update of the policy, on prompts and answers of full length: samples are made beside it"
