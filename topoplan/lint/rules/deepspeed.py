"""Rules on DeepSpeed configurations: a JSON file, or the `deepspeed:` block of a trainer's YAML.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/config_utils.py` (blocks forbid unknown keys and drop "auto"),
`runtime/zero/config.py`, `runtime/zero/offload_config.py`; transformers 5.6.0 `integrations/deepspeed.py` (fill_match).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog.packages import allows
from topoplan.errors import listed
from topoplan.lint.rules.deepspeed_document import RULES, ZERO, Document, documents
from topoplan.lint.rules.deepspeed_keys import key_findings
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.processes import launch_of, processes_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at, flag, value_of
from topoplan.reading.words import is_open
from topoplan.specs.source import KeyPath
from topoplan.trainers.around import context_of
from topoplan.trainers.relations import read_relations
from topoplan.units import shown

_RELATIONS = read_relations("topoplan.trainers", "deepspeed.toml")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_GATHERS = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)

_SAME: tuple[tuple[KeyPath, str], ...] = (
    (("train_micro_batch_size_per_gpu",), "per_device_train_batch_size"),
    (("gradient_accumulation_steps",), "gradient_accumulation_steps"),
    (("gradient_clipping",), "max_grad_norm"),
    (("optimizer", "params", "lr"), "learning_rate"),
    (("optimizer", "params", "eps"), "adam_epsilon"),
    (("optimizer", "params", "weight_decay"), "weight_decay"),
    (("scheduler", "params", "warmup_max_lr"), "learning_rate"),
    (("scheduler", "params", "warmup_num_steps"), "warmup_steps"),
    (("scheduler", "params", "total_num_steps"), "max_steps"),
    (("fp16", "enabled"), "fp16"),
    (("bf16", "enabled"), "bf16"),
)
"""DeepSpeed keys that HfTrainerDeepSpeedConfig.trainer_config_process compares with the trainer's arguments."""

_GPU_OPTIMIZERS = ("adafactor", "sgd", "rmsprop")
"""Values of transformers' `optim` that accelerate maps to none of DeepSpeed's CPU optimizers."""
_STEPS = ("warmup_steps", "max_steps")
_PLAIN = re.compile(r"(adamw?|adagrad|lion|lamb|sgd|muon)(?:_hf|_torch(?:_\w*fused|_xla)?|_apex_fused|_32bit)?")
"""Values of transformers' `optim` that a DeepSpeed optimizer of the same name stands for."""
_OPTIMIZERS = (
    *("loraplus_lr_ratio", "use_galore", "use_apollo", "use_adam_mini", "use_muon"),
    *("optimizer", "lorap_lr_ratio", "vit_lr", "aligner_lr"),
)
"""Keys by which LLaMA-Factory and ms-swift create an optimizer of their own."""
_SCHEDULERS = {
    "WarmupDecayLR": ("linear",),
    "WarmupLR": ("constant_with_warmup", "constant"),
    "WarmupCosineLR": ("cosine",),
}
"""DeepSpeed's schedulers, as transformers names the same course."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults in the DeepSpeed configurations."""
    for document in documents(setup):
        yield from key_findings(document)
        yield from _precision(document)
        yield from _batch(document)
        yield from _groups(document)
        yield from _trainer(document)
        yield from _replaced(setup, document)
        yield from _offload(document)
        yield from _stages(document)
        around = {**context_of(setup, document.holder), "is_piece": False}
        rule = RULES["deepspeed-refused-together"]
        yield from _RELATIONS.findings(rule, document.holder, around, base=document.path)
    yield from _beside_fsdp(setup)


# Precision and batch --------------------------------------------------------------------------------------------------


def _precision(document: Document) -> Iterator[Finding]:
    half, brain = document.get("fp16", "enabled") is True, document.get("bf16", "enabled") is True
    if half:
        yield document.finding("two-precisions" if brain else "fp16", ("fp16", "enabled"))


def _batch(document: Document) -> Iterator[Finding]:
    total, micro, steps = (as_whole(document.get(key)) for key in _BATCH)
    for key, value in zip(_BATCH, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            yield document.finding("batch", (key,), value=shown(value))
            return
    if total is not None and document.trainer is not None:  # transformers fills in the batch from its own keys
        micro, steps = (
            given if given is not None else as_whole(_argument(document, document.trainer, key))
            for given, key in ((micro, "per_device_train_batch_size"), (steps, "gradient_accumulation_steps"))
        )
    if total is None or micro is None or steps is None:
        return
    place: KeyPath = ("train_batch_size",)
    equation = (
        f"train_batch_size {total} = train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps}"
    )
    product, started = micro * steps, _world_size(document)
    gpus, rest = divmod(total, product)
    if rest:
        yield document.finding("batch.none", place, equation=equation, total=total, product=product, rest=rest)
    elif started is None:
        yield document.finding("batch.one", place, equation=equation, gpus="1 GPU" if gpus == 1 else f"{gpus} GPUs")
    elif started != gpus:
        right = product * started
        yield document.finding("batch.other", place, equation=equation, gpus=gpus, started=started, right=right)


def _world_size(document: Document) -> int | None:
    """Return the number of GPUs that the setup's launches start, if it is known and the same for all."""
    worlds = set()
    for launch in document.launches:
        started = processes_of(launch)
        worlds.add(started.nodes * started.gpus_per_node if started.nodes and started.gpus_per_node else None)
    return worlds.pop() if len(worlds) == 1 else None


# The trainer's own values ---------------------------------------------------------------------------------------------


def _trainer(document: Document) -> Iterator[Finding]:
    trainer = document.trainer
    if trainer is None:
        fixed = [path for path, _ in _SAME[:4] if document.get(*path) is not None]
        if fixed:
            yield document.finding("fixed-values", fixed[0], fixed=listed([".".join(map(str, path)) for path in fixed]))
        return
    for path, key in _SAME:
        value = document.get(*path)
        wanted = _argument(document, trainer, key)
        if value is None or wanted is None or value == wanted:
            continue
        yield document.finding(
            "trainer-mismatch.default" if value_of(trainer, key) is None else "trainer-mismatch",
            path,
            name=".".join(map(str, path)),
            value=shown(value),
            key=key,
            file=trainer.part.name,
            wanted=shown(wanted if (count := as_whole(wanted)) is None else count),
        )


def _replaced(setup: Setup, document: Document) -> Iterator[Finding]:
    """Report an optimizer or a scheduler of the trainer that one in DeepSpeed's configuration replaces."""
    trainer = document.trainer
    kind, scheduler = (document.get(block, "type") for block in ("optimizer", "scheduler"))
    if trainer is None:
        return
    if isinstance(kind, str):
        for key in ("optim", *_OPTIMIZERS):
            value = value_of(trainer, key)
            if value in (None, False) or is_open(str(value)) or (key == "optim" and _stands_for(kind, str(value))):
                continue
            rule = "deepspeed-replaced.adafactor" if value == "adafactor" else "deepspeed-replaced"
            is_refused = value == "adafactor" and allows("<5", setup.versions.get("transformers", "5"))
            level: Severity = "error" if is_refused else "warning"
            yield RULES[rule].at(trainer, key, value=shown(value), type=kind, level=level)
    name = trainer.get("lr_scheduler_type")
    alike = _SCHEDULERS.get(scheduler, ()) if isinstance(scheduler, str) else ()
    if alike and isinstance(name, str) and not is_open(name) and name not in alike:
        said = {"value": name, "type": scheduler, "is_like": alike[0]}
        yield RULES["deepspeed-replaced.scheduler"].at(trainer, "lr_scheduler_type", **said)


def _stands_for(kind: str, name: str) -> bool:
    """Whether a DeepSpeed optimizer is the one that `optim` names."""
    match = _PLAIN.fullmatch(name)
    return match is not None and match[1][:4] in kind.lower()


def _argument(document: Document, trainer: Configuration, key: str) -> Any:
    """Return the value that the trainer uses for a key, given or its default; None if unknown."""
    given = value_of(trainer, key)
    if key in _STEPS:
        steps = as_number(given)
        return steps if steps is not None and steps >= 1 else None  # else they follow from the data or a ratio
    default = document.default_of(key)
    if key in ("fp16", "bf16"):
        return None if given is None and default is None else flag(trainer, key)
    return default if given is None else as_number(given)


def _groups(document: Document) -> Iterator[Finding]:
    """Report group sizes that do not divide the world size: `utils/groups.py`, `runtime/zero/mics.py`."""
    world = _world_size(document)
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        size = as_whole(document.get(ZERO, key))
        if world and size and size > 1 and world % size:
            yield document.finding("group", (ZERO, key), size=size, world=world)


# Offload and stages ---------------------------------------------------------------------------------------------------


def _offload(document: Document) -> Iterator[Finding]:
    stage = document.stage
    for key, works_with in (("offload_optimizer", "1, 2 or 3"), ("offload_param", "3")):
        block, path = document.get(ZERO, key), (ZERO, key)
        device = at(block, ("device",))
        if device not in ("cpu", "nvme"):
            continue
        if stage == 0 or (key == "offload_param" and stage != 3):
            yield document.finding("offload-without-stage", path, stage=stage, stages=works_with)
        elif device == "nvme" and stage == 3 and not at(block, ("nvme_path",)):
            yield document.finding("nvme-path", path)
    if at(document.get(ZERO, "offload_optimizer"), ("device",)) in ("cpu", "nvme"):
        yield from _optimizer(document)
    ratio = as_number(at(document.get(ZERO, "offload_optimizer"), ("ratio",)))
    if ratio is not None and 0 <= ratio < 1 and stage != 3:
        yield document.finding("partial-offload", (ZERO, "offload_optimizer", "ratio"), ratio=ratio, stage=stage)
    elif ratio is not None and 0 <= ratio < 1 and at(document.get(ZERO, "offload_optimizer"), ("device",)) == "nvme":
        yield document.finding("partial-offload.nvme", (ZERO, "offload_optimizer", "ratio"), ratio=ratio)


def _optimizer(document: Document) -> Iterator[Finding]:
    """Report an optimizer of the trainer that DeepSpeed does not run on the CPU."""
    name = document.trainer.get("optim") if document.trainer else None
    is_allowed = document.get("zero_force_ds_cpu_optimizer") is False
    if document.trainer is None or document.get("optimizer") is not None or is_allowed or name not in _GPU_OPTIMIZERS:
        return
    yield RULES["deepspeed-offloaded-optimizer"].at(document.trainer, "optim", name=name)


def _stages(document: Document) -> Iterator[Finding]:
    activations = document.get("activation_checkpointing")
    if isinstance(activations, Mapping):
        level: Severity = "warning" if any(activations.values()) else "note"
        yield document.finding("activation-checkpointing", ("activation_checkpointing",), level=level)
    if document.stage == 3:
        yield from _weights(document)
    elif document.get(ZERO) is not None:
        for key in ("zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_nontrainable_weights"):
            value = document.get(ZERO, key)
            if (value and value != 1) or value is True:
                yield document.finding("stage3-key", (ZERO, key), stage=document.stage)


def _weights(document: Document) -> Iterator[Finding]:
    """Report ZeRO-3 checkpoints that lack the gathered weights, except for adapters, which do not need them."""
    trainer = document.trainer
    lora = trainer is not None and "lora" in (trainer.get("finetuning_type"), trainer.get("tuner_type"))
    if lora or any(document.get(ZERO, key) for key in _GATHERS):
        return
    key = _GATHERS[0]
    is_given = document.get(ZERO, key) is not None
    yield document.finding("weights-not-gathered", (ZERO, key if is_given else "stage"), key=key)


def _beside_fsdp(setup: Setup) -> Iterator[Finding]:
    """Report FSDP in accelerate's file when the trainer's file names DeepSpeed, which accelerate checks first."""
    told = [one for one in setup.of("accelerate") if one.get("distributed_type") == "FSDP"]
    for trainer in setup.with_deepspeed:
        launch = launch_of(setup, trainer)
        if told and value_of(trainer, "deepspeed") and launch is not None and launch.starter == "accelerate":
            yield RULES["deepspeed-beside-fsdp"].at(trainer, "deepspeed", file=told[0].part.name)
