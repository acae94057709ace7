"""What LLaMA-Factory refuses, and what it takes and a user would not want.

Sources, at LLaMA-Factory 0.9.5: `data/parser.py`, `data/template.py`, `model/model_utils/checkpointing.py`,
`train/sft/workflow.py`; and what `llamafactory_keys` and `llamafactory_refusals` name.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.errors import nearest
from topoplan.reading.edits import add, change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, is_complete, is_for_training, number, whole, words
from topoplan.trainers.llamafactory.key_list import newer_than, templates
from topoplan.trainers.llamafactory.rules.llamafactory_keys import key_findings
from topoplan.trainers.llamafactory.rules.llamafactory_refusals import refusals, strategy
from topoplan.trainers.llamafactory.rules.megatron_bridge import bridge_findings
from topoplan.trainers.models import known_model
from topoplan.units import shown

_ENDINGS_OF_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
_PLAIN_TEMPLATES = frozenset({"default", "empty", "fewshot", "alpaca", "vicuna", "chatml"})
"""For base models, which have no template of their own."""
_LORA_KEYS = ("additional_target", "create_new_adapter", "lora_alpha", "lora_dropout", "lora_rank", "lora_target")
_FREEZE_KEYS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
_HIGHEST_FULL_LEARNING_RATE = 1e-4
_FEWEST_SAVE_STEPS = 10


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the LLaMA-Factory configurations, whichever way they are trained."""
    for configuration in setup.of("llamafactory"):
        yield from key_findings(setup, configuration)
        for key, what, remedy in refusals(setup, configuration):
            why = "LLaMA-Factory stops there"
            yield found(configuration, "llamafactory-refused-together", "error", key, what, why=why, remedy=remedy)
        yield from bridge_findings(setup, configuration)
        yield from _data(setup, configuration)
        yield from _unwise(setup, configuration)
        if is_complete(configuration) and is_for_training(configuration):
            yield from _missing(setup, configuration)


# Data ----------------------------------------------------------------------------------------------------------------


def _data(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Data sets, the chat template, lengths."""
    for key in ("dataset", "eval_dataset"):
        names = [name.strip() for name in (words(configuration, key) or "").split(",")]
        files = [name for name in names if name.lower().endswith(_ENDINGS_OF_FILES) or name.startswith(("/", "./"))]
        if files and configuration.get("dataset_dir") != "ONLINE":
            yield found(
                configuration,
                "llamafactory-dataset-file",
                "error",
                key,
                f"{key} {shown(files[0])} is a file, and only names in dataset_info.json are taken",
                remedy="enter it there as {name: {file_name: ...}}, and write the name here; dataset_dir holds both",
            )
    model = known_model(configuration)
    yield from _template(configuration)
    length = whole(configuration, "cutoff_len")
    longest = model.max_position_embeddings if model else 0
    stretches = setup.path_of(configuration) == "plain"
    stretched = configuration.get("rope_scaling") is not None and stretches
    if model and length and longest and length > longest and not stretched:
        yield found(
            configuration,
            "llamafactory-too-long",
            "warning",
            "cutoff_len",
            f"cutoff_len {length} is above the {longest} positions of {model.name}",
            why="positions that the model was never trained on",
            remedy=f"lower cutoff_len to {longest}, or set rope_scaling: yarn"
            if stretches
            else f"lower cutoff_len to {longest}",
        )


def _template(configuration: Configuration) -> Iterator[Finding]:
    template, known = words(configuration, "template"), templates()
    if template is None:
        return
    if template in known.since:
        what = f"the template {template} needs {newer_than(known.since[template])}"
        yield found(configuration, "llamafactory-new-template", "note", "template", what)
    if template not in known.names:
        yield found(
            configuration,
            "llamafactory-unknown-template",
            "error",
            "template",
            f"LLaMA-Factory {known.version} has no template {shown(template)}, and refuses it",
            remedy=nearest(template, known.names),
        )
        return
    listed = _listed_template(words(configuration, "model_name_or_path") or "")
    if listed is None or listed == template or template in _PLAIN_TEMPLATES:
        return
    if listed.removesuffix("_nothink") != template.removesuffix("_nothink"):
        what = f"template {template} is not the one that LLaMA-Factory lists for this model, {listed}"
        why = "the model then learns turns in another format than it was made with"
    elif listed.endswith("_nothink"):
        what = f"template {template} is for models that think, and this one does not: LLaMA-Factory lists {listed}"
        why = "answers without a thought get an empty one put in front, which the model never writes"
    else:
        return  # a model that can do both, trained without thoughts
    yield found(
        configuration,
        "llamafactory-template-of-another-model",
        "warning",
        "template",
        what,
        why=why,
        remedy=f"write template: {listed}",
        edits=change(configuration, ("template",), value=listed),
    )


def _listed_template(model: str) -> str | None:
    """The template in LLaMA-Factory's own list of models; nothing is derived from the architecture."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    by_name = {name.rpartition("/")[2].lower(): template for name, template in templates().by_model.items()}
    return by_name.get(last)


# Unwise --------------------------------------------------------------------------------------------------------------


def _unwise(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """What is taken, and does not do what it seems to, or costs more than it brings."""
    megatron = setup.path_of(configuration) != "plain"
    every, limit = number(configuration, "save_steps"), number(configuration, "max_steps")
    saves = strategy(configuration, "save_strategy", "steps") == "steps"
    if saves and every is not None and 1 <= every < _FEWEST_SAVE_STEPS and not (limit and 0 < limit <= 10 * every):
        yield found(
            configuration,
            "llamafactory-frequent-saves",
            "warning",
            "save_steps",
            f"save_steps {every:g}: a checkpoint every {every:g} steps, with weights and optimizer state each time",
            remedy="save a few times an epoch, and set save_total_limit",
        )
    if strategy(configuration, "eval_strategy", "no") == "no" and is_complete(configuration):
        held_out = [key for key in ("eval_dataset", "val_size") if configuration.get(key)]
        if held_out and not flag(configuration, "do_eval") and not flag(configuration, "do_predict"):
            yield found(
                configuration,
                "llamafactory-evaluation-unused",
                "warning",
                held_out[0],
                f"{held_out[0]} sets data aside, and nothing evaluates on it",
                remedy="set eval_strategy: steps with eval_steps, or take it out",
            )
    method = configuration.get("finetuning_type")
    rate = number(configuration, "learning_rate")
    if method == "full" and rate is not None and rate > _HIGHEST_FULL_LEARNING_RATE:
        yield found(
            configuration,
            "llamafactory-learning-rate",
            "note",
            "learning_rate",
            f"learning_rate {rate:g} is high for training all weights; it is of the order used for LoRA",
            why="LLaMA-Factory's own examples take 1e-4 for LoRA and 1e-5 for full",
        )
    if megatron:
        return
    if method in ("full", "freeze", "oft"):
        yield from _ignored(configuration, _LORA_KEYS, f"finetuning_type is {method}, and only lora reads it")
    if method in ("full", "lora", "oft"):
        yield from _ignored(configuration, _FREEZE_KEYS, f"finetuning_type is {method}, and only freeze reads it")
    switches = ("gradient_checkpointing", "disable_gradient_checkpointing")
    if configuration.get(switches[0]) is not None and not any(flag(configuration, key) for key in switches):
        yield found(
            configuration,
            "llamafactory-gradient-checkpointing",
            "warning",
            "gradient_checkpointing",
            "gradient_checkpointing: false does not switch it off: LLaMA-Factory switches it on by itself",
            why="model/model_utils/checkpointing.py looks at disable_gradient_checkpointing alone",
            remedy="write disable_gradient_checkpointing: true",
            edits=change(configuration, ("gradient_checkpointing",), name="disable_gradient_checkpointing", value=True),
        )
    precisions = ("bf16", "fp16", "pure_bf16", "fp8", "deepspeed")
    trains = flag(configuration, "do_train")
    if is_complete(configuration) and trains and not any(configuration.get(key) for key in precisions):
        yield found(
            configuration,
            "llamafactory-no-mixed-precision",
            "warning",
            None,
            "neither bf16 nor fp16 is set: the optimizer trains in float32, at twice the memory and a fraction of the"
            " speed",
            remedy="set bf16: true, or fp16: true on cards before Ampere",
        )


def _ignored(configuration: Configuration, keys: tuple[str, ...], why: str) -> Iterator[Finding]:
    for key in keys:
        if configuration.get(key) is not None:
            yield found(
                configuration,
                "llamafactory-ignored-key",
                "warning",
                key,
                f"{key} is ignored",
                why=why,
                remedy="take it out",
                edits=drop(configuration, (key,)),
            )


# Missing -------------------------------------------------------------------------------------------------------------


def _missing(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """What a job of its own has to say."""
    have, first = configuration.source.data, next(iter(configuration.source.data))
    trains = flag(configuration, "do_train")
    if have.get("model_name_or_path") is None:
        yield found(
            configuration,
            "llamafactory-missing-key",
            "error",
            None,
            "model_name_or_path is missing, and the parser stops without it",
            remedy="name the model's directory or its id",
        )
    if trains and have.get("dataset") is None:
        yield found(
            configuration,
            "llamafactory-missing-key",
            "error",
            "do_train",
            "do_train without a dataset, and the parser stops",
            remedy="set dataset: to a name in dataset_info.json",
        )
    works = trains or flag(configuration, "do_eval") or flag(configuration, "do_predict")
    evaluates = strategy(configuration, "eval_strategy", "no") != "no"
    trains_anyway = {"mca": configuration.get("stage") != "pt", "bridge": True}
    if not works and not evaluates and not trains_anyway.get(setup.path_of(configuration) or ""):
        yield found(
            configuration,
            "llamafactory-nothing-to-do",
            "error",
            "do_train" if "do_train" in have else None,
            "do_train is not set: the model is loaded and the program ends",
            remedy="set do_train: true",
            edits=change(configuration, ("do_train",), value=True)
            if "do_train" in have
            else add(configuration, (first,), "do_train", True),
        )
    if trains and have.get("output_dir") is None:
        yield found(
            configuration,
            "llamafactory-missing-key",
            "note",
            None,
            "output_dir is missing: transformers writes to trainer_output, and the next run resumes from there",
            remedy="give every run an output_dir of its own",
        )
    if have.get("template") is None and configuration.get("stage", "sft") != "pt" and trains:
        listed = _listed_template(words(configuration, "model_name_or_path") or "")
        yield found(
            configuration,
            "llamafactory-missing-key",
            "note",
            None,
            "template is missing: it is guessed from the tokenizer's chat template, or left empty where there is none",
            remedy=f"write template: {listed}, which LLaMA-Factory lists for this model" if listed else "name it",
        )
