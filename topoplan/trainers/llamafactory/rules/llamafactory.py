"""What LLaMA-Factory refuses, and what it accepts although a user would not want it.

Sources, at LLaMA-Factory 0.9.5: `data/parser.py`, `data/template.py`, `model/model_utils/checkpointing.py`,
`train/sft/workflow.py`; also those named in `llamafactory_keys` and `relations.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from topoplan.catalog.packages import releases
from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import (
    MARKS_OF_TRAINING,
    flag,
    is_complete,
    is_for_training,
    number,
    value_of,
    whole,
    words,
)
from topoplan.reading.words import is_open
from topoplan.trainers.around import context_of
from topoplan.trainers.llamafactory.key_list import listed_template, newer_than, templates
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.llamafactory.rules.data_sets import data_set_findings
from topoplan.trainers.llamafactory.rules.keys import RENAMED
from topoplan.trainers.llamafactory.rules.llamafactory_keys import key_findings
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.relations import read_relations
from topoplan.units import shown

_PLAIN_TEMPLATES = frozenset({"default", "empty", "fewshot", "alpaca", "vicuna", "chatml"})
"""Templates suitable for base models, which have none of their own."""
_LORA_KEYS = ("additional_target", "create_new_adapter", "lora_alpha", "lora_dropout", "lora_rank", "lora_target")
_FREEZE_KEYS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
_KEYS_OF_A_METHOD = (
    (_LORA_KEYS, "lora", ("full", "freeze", "oft")),
    (_FREEZE_KEYS, "freeze", ("full", "lora", "oft")),
)
"""Keys, the method that reads them, and the methods that do not."""
_RELATIONS = read_relations(__package__, "relations.toml")
_HIGHEST_FULL_LEARNING_RATE = 1e-4
_FEWEST_SAVE_STEPS = 10


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of LLaMA-Factory configurations on any training path."""
    for configuration in setup.of("llamafactory"):
        yield from key_findings(setup, configuration)
        known, unwise = context_of(setup, configuration), RULES["llamafactory-unwise-together"]
        yield from _RELATIONS.findings(RULES["llamafactory-refused-together"], configuration, known, unwise=unwise)
        yield from bridge_findings(setup, configuration)
        yield from data_set_findings(configuration)
        yield from _template(configuration)
        yield from _length(setup, configuration)
        yield from _saving(configuration)
        yield from _learning_rate(configuration)
        if setup.training_path(configuration) == "plain":
            yield from _ignored(configuration)
            yield from _plain(configuration)
        if is_complete(configuration) and is_for_training(configuration):
            yield from _missing(setup, configuration)


# Data ----------------------------------------------------------------------------------------------------------------


def _template(configuration: Configuration) -> Iterator[Finding]:
    template, known = words(configuration, "template"), templates()
    if template is None or is_open(template):
        return
    if template in known.since:
        newer = newer_than(known.since[template])
        since = known.since[template]
        yield RULES["llamafactory-new-template"].at(
            configuration, "template", template=template, newer=newer, since=since
        )
    if template not in known.names:
        version, remedy = known.version, nearest(template, known.names)
        if not _has_template(configuration, template):
            yield RULES["llamafactory-unknown-template"].at(
                configuration, "template", version=version, template=shown(template), remedy=remedy
            )
        return
    listed = listed_template(words(configuration, MODEL_KEY) or "")
    if listed is None or listed == template or template in _PLAIN_TEMPLATES:
        return
    rule = RULES["llamafactory-template-of-another-model"]
    if listed.removesuffix("_nothink") == template.removesuffix("_nothink"):
        if not listed.endswith("_nothink"):
            return  # a model with and without thinking, trained without it
        rule = RULES["llamafactory-template-of-another-model.thinking"]
    yield rule.at(configuration, "template", template=template, listed=listed)


def _has_template(configuration: Configuration, name: str) -> bool:
    """Whether the LLaMA-Factory checkout that contains the file registers a template of that name."""
    for directory in Path(configuration.part.name).absolute().parents:
        source = directory / "src" / "llamafactory" / "data" / "template.py"
        with suppress(OSError, ValueError):
            return f'name="{name}"' in source.read_text(encoding="utf-8")
    return False


def _length(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    model, length = model_at_hand(configuration.get(MODEL_KEY), configuration.part), whole(configuration, "cutoff_len")
    longest = model.max_position_embeddings if model else 0
    stretches = setup.training_path(configuration) == "plain"
    stretched = configuration.get("rope_scaling") is not None and stretches
    if model and length and longest and length > longest and not stretched:
        yield RULES["llamafactory-too-long"].at(
            configuration,
            "cutoff_len",
            length=length,
            longest=longest,
            model=model.name,
            stretch=", or set rope_scaling: yarn" if stretches else "",
        )


# Unwise: what is taken, and does not do what it seems to, or costs more than it brings --------------------------------


def _saving(configuration: Configuration) -> Iterator[Finding]:
    every, limit = number(configuration, "save_steps"), number(configuration, "max_steps")
    saves = _strategy(configuration, "save_strategy", "steps") == "steps"
    if saves and every is not None and 1 <= every < _FEWEST_SAVE_STEPS and not (limit and 0 < limit <= 10 * every):
        yield RULES["llamafactory-frequent-saves"].at(configuration, "save_steps", every=every)
    if _strategy(configuration, "eval_strategy", "no") == "no" and is_complete(configuration):
        held_out = [key for key in ("eval_dataset", "val_size") if configuration.get(key)]
        if held_out and not flag(configuration, "do_eval") and not flag(configuration, "do_predict"):
            yield RULES["llamafactory-evaluation-unused"].at(configuration, held_out[0])


def _learning_rate(configuration: Configuration) -> Iterator[Finding]:
    rate = number(configuration, "learning_rate")
    if configuration.get("finetuning_type") == "full" and rate is not None and rate > _HIGHEST_FULL_LEARNING_RATE:
        yield RULES["llamafactory-learning-rate"].at(configuration, "learning_rate", rate=rate)


def _ignored(configuration: Configuration) -> Iterator[Finding]:
    method = configuration.get("finetuning_type")
    for keys, reader, others in _KEYS_OF_A_METHOD:
        for key in keys if method in others else ():
            if configuration.get(key) is not None:
                yield RULES["llamafactory-ignored-key"].at(configuration, key, method=method, reader=reader)


def _plain(configuration: Configuration) -> Iterator[Finding]:
    switches = ("gradient_checkpointing", "disable_gradient_checkpointing")
    if configuration.get(switches[0]) is not None and not any(flag(configuration, key) for key in switches):
        yield RULES["llamafactory-gradient-checkpointing"].at(configuration, "gradient_checkpointing")
    precisions = ("bf16", "fp16", "pure_bf16", "fp8", "deepspeed")
    trains = flag(configuration, "do_train")
    if is_complete(configuration) and trains and not any(configuration.get(key) for key in precisions):
        yield RULES["llamafactory-no-mixed-precision"].at(configuration, None)


# Missing -------------------------------------------------------------------------------------------------------------


def _with_overrides(setup: Setup, configuration: Configuration) -> Mapping[str, Any]:
    """Return the keys of a file, including those that all commands which read the file set as overrides."""
    over = [launch.configuration for launch in setup.launches if launch.file_configuration is configuration]
    keys = [set(one.source.data) if one else set() for one in over]
    said = set.intersection(*keys) if keys else set()
    return {**configuration.source.data, **{key: over[0].get(key) for key in said if over[0]}}


def _missing(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    have, trains = _with_overrides(setup, configuration), flag(configuration, "do_train")
    if have.get("model_name_or_path") is None:
        yield RULES["llamafactory-missing-key.model"].at(configuration, None)
    if trains and have.get("dataset") is None:
        yield RULES["llamafactory-missing-key.dataset"].at(configuration, "do_train")
    works = trains or flag(configuration, "do_eval") or flag(configuration, "do_predict")
    evaluates = _strategy(configuration, "eval_strategy", "no") != "no"
    trains_anyway = {"mca": configuration.get("stage") != "pt", "bridge": True}
    is_job = bool(have.keys() & MARKS_OF_TRAINING) or any(
        one.file_configuration is configuration for one in setup.launches
    )
    if is_job and not works and not evaluates and not trains_anyway.get(setup.training_path(configuration) or ""):
        yield RULES["llamafactory-nothing-to-do"].at(configuration, "do_train" if "do_train" in have else None)
    if trains and have.get("output_dir") is None:
        yield RULES["llamafactory-missing-key.output"].at(configuration, None)
    if have.get("template") is None and configuration.get("stage", "sft") != "pt" and trains:
        listed = listed_template(words(configuration, MODEL_KEY) or "")
        remedy = f"write template: {listed}, which LLaMA-Factory lists for this model" if listed else ""
        yield RULES["llamafactory-missing-key.template"].at(configuration, None, remedy=remedy)


def _strategy(configuration: Configuration, key: str, default: str) -> str | None:
    """Return a strategy if it is valid; None if another rule refuses it."""
    names = (key, *(old for old, new in RENAMED.items() if new == key))
    value = next((value_of(configuration, name) for name in names if name in configuration.source.data), default)
    if value is False:
        return "no"  # the meaning of the bare word
    return value if value in ("no", "steps", "epoch", "best") else None


def bridge_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Report on a configuration that Megatron Bridge trains (USE_MEGATRON_BRIDGE=1), or that asks for it.

    Sources, at LLaMA-Factory main of August 2026 (0.9.6.dev0, ff6d4d12e): `hparams/parser.py`
    (`_validate_megatron_bridge_parallel_args`, get_train_args), `hparams/megatron_bridge_args.py`,
    `train/megatron_bridge/workflow.py` and `config_builder.py`.
    """
    switch = "use_megatron_bridge"
    if setup.training_path(configuration) != "bridge":
        if flag(configuration, switch) and setup.training_path(configuration) == "plain":
            yield RULES["bridge-not-asked-for"].at(configuration, switch)
        return
    yield RULES["bridge-not-judged"].at(
        configuration, switch if switch in configuration.source.data else None, release=releases()[-1].name
    )
    model = model_at_hand(configuration.get(MODEL_KEY), configuration.part)
    if model is not None and model.model_type not in templates().bridge_model_types:
        yield RULES["bridge-model-type"].at(
            configuration,
            "model_name_or_path",
            model_type=model.model_type,
            model_types=", ".join(templates().bridge_model_types),
        )
    target = configuration.get("lora_target")
    if target not in (None, "all") and configuration.get("finetuning_type", "lora") == "lora":
        yield RULES["bridge-lora-target"].at(configuration, "lora_target", target=shown(target))
