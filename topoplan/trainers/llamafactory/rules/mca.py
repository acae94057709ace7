"""What LLaMA-Factory's Megatron path (USE_MCA=1, mcore_adapter) ignores, refuses or does otherwise than it seems.

Sources: LLaMA-Factory 0.9.5 `train/mca/workflow.py`, `train/tuner.py`; mcore_adapter 0.10 `training_args.py`,
`models/model_config.py`, `trainer/trainer.py`; megatron-core 0.16 `transformer/transformer_config.py`,
`parallel_state.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from topoplan.errors import nearest
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, value_of, words
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.key_list import judge_key, known_keys, templates
from topoplan.trainers.llamafactory.mca_facts import FREEZABLE_MODEL_TYPES, is_hub_id
from topoplan.trainers.llamafactory.mca_job import STAGES
from topoplan.trainers.llamafactory.mca_refusals import SUPPORTED_MODEL_TYPES
from topoplan.trainers.llamafactory.rules.mca_layout import layout_findings, recompute_findings
from topoplan.trainers.llamafactory.rules.mca_training import training_findings
from topoplan.trainers.models import is_directory, known_model
from topoplan.units import shown

_MEANING = {
    "deepspeed": "the adapter sets it to None: nothing of it is used, and memory is split by the layout alone",
    "disable_shuffling": "the trainer never shuffles: its sampler is sequential, and the data is read in its order",
    "fsdp": "no FSDP is set up: memory is split by the layout alone",
    "fsdp_config": "no FSDP is set up: memory is split by the layout alone",
    "gradient_checkpointing": "no activation is recomputed for it; recompute_granularity decides that",
    "disable_gradient_checkpointing": "recompute_granularity decides what is recomputed",
    "dataloader_drop_last": "the last incomplete batch is dropped in any case",
    "flash_attn": "attention is Transformer Engine's",
    "lora_rank": "no adapter is built: all weights are trained",
    "lora_alpha": "no adapter is built: all weights are trained",
    "lora_dropout": "no adapter is built: all weights are trained",
    "lora_target": "no adapter is built: all weights are trained",
    "optim": "the optimizer is Megatron's",
    "quantization_bit": "the weights are loaded as they are, and trained",
    "rope_scaling": "positions are those of the model's own config.json",
}
"""What happens where these are set; for others the general sentence does."""


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the configurations that Megatron trains."""
    for configuration in setup.of("llamafactory"):
        if not setup.uses_mca(configuration):
            continue
        model = known_model(configuration)
        yield from _ignored(configuration)
        yield from _method(setup, configuration, model)
        if model is not None and model.model_type not in SUPPORTED_MODEL_TYPES:
            model = None
        yield from layout_findings(configuration, model, planned=setup.bundle_of(configuration) is not None)
        yield from recompute_findings(configuration)
        yield from training_findings(configuration, model)
        yield from _additional(configuration)


# Keys that are not read -----------------------------------------------------------------------------------------------


def _ignored(configuration: Configuration) -> Iterator[Finding]:
    for key in configuration.source.data:
        value = value_of(configuration, key)
        verdict = judge_key(key, value)
        if verdict.trouble == "ignored":
            yield found(
                configuration,
                "mca-ignored-key",
                "warning" if key in _MEANING else "note",
                key,
                f"{key} is accepted and never read by the Megatron trainer",
                why=_MEANING.get(key, ""),
                remedy=verdict.remedy.replace("pin the layout's recompute", "set recompute_granularity"),
                edits=drop(configuration, (key,)),
            )
        elif verdict.trouble == "dropped":
            edits = change(configuration, (key,), value="tensorboard") if isinstance(value, str) else ()
            yield found(
                configuration,
                "mca-wandb-dropped",
                "warning",
                key,
                "wandb is taken out of report_to without a word: nothing is logged there",
                why="mcore_adapter training_args.py filters the list",
                remedy=verdict.remedy,
                edits=edits,
            )


# Model and method -----------------------------------------------------------------------------------------------------


def _method(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    method, stage = configuration.get("finetuning_type"), configuration.get("stage")
    if method in ("lora", "oft", "freeze"):
        yield found(
            configuration,
            "mca-trains-everything",
            "error",
            "finetuning_type",
            f"finetuning_type {method} is accepted, and all weights are trained all the same",
            why="train/mca/workflow.py builds no adapter and freezes no layers",
            remedy="write finetuning_type: full, or train without USE_MCA=1",
            edits=change(configuration, ("finetuning_type",), value="full"),
        )
    if isinstance(stage, str) and stage not in STAGES and stage in known_keys()["stage"].choices:
        yield found(
            configuration,
            "mca-stage",
            "error",
            "stage",
            f"stage {stage} has no Megatron workflow: train/tuner.py gives it to the ordinary trainer",
            remedy="train it without USE_MCA=1; Megatron has pt, sft and dpo",
        )
    yield from _hub_id(setup, configuration, model)
    if model is not None and model.model_type not in SUPPORTED_MODEL_TYPES:
        yield found(
            configuration,
            "mca-model-type",
            "error",
            "model_name_or_path",
            f"the Megatron path does not train {model.model_type} models",
            remedy=f"train it without USE_MCA=1; it takes {', '.join(sorted(SUPPORTED_MODEL_TYPES))}",
        )
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        if key not in configuration.source.data or model is None:
            continue
        if model.model_type not in FREEZABLE_MODEL_TYPES and flag(configuration, key):
            yield found(
                configuration,
                "mca-freezes-nothing",
                "error" if key == "freeze_language_model" else "note",
                key,
                f"{key} freezes nothing in {model.name}, which has no such parts",
                remedy="take it out",
                edits=drop(configuration, (key,)),
            )
        elif stage == "pt" and model.model_type in FREEZABLE_MODEL_TYPES and flag(configuration, key):
            yield found(
                configuration,
                "mca-freezes-nothing",
                "warning",
                key,
                f"{key} has no effect in stage pt, which trains everything",
                why="train/mca/workflow.py::run_pt freezes no parameters",
            )


def _hub_id(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    name = words(configuration, "model_name_or_path")
    downloads = {"USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB"} & {variable.name for variable in setup.variables}
    if name is None or not is_hub_id(name) or is_directory(name, configuration.part) or downloads:
        return
    listed = name in templates().by_model or (model is not None and model.name.lower() == name.lower())
    directory = f"models/{name}"
    yield found(
        configuration,
        "mca-hub-id",
        "error" if listed else "warning",
        "model_name_or_path",
        f"{name} is {'' if listed else 'probably '}a hub id, and the adapter reads local directories alone",
        why="mcore_adapter looks for config.json below that path, and stops with 'No valid config found'",
        remedy=f"`hf download {name} --local-dir {directory}` on every node, and name that directory",
        edits=change(configuration, ("model_name_or_path",), value=directory) if listed else (),
    )


# additional_configs ---------------------------------------------------------------------------------------------------


@cache
def megatron_settings() -> Mapping[str, str]:
    """What additional_configs may name, with the versions of megatron-core that have it: `>=0.18.2`; empty: all."""
    path = files("topoplan.catalog").joinpath("trainer_keys", "megatron_config.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    bounds = {word: document[word]["megatron_core"] for word in ("since", "until")}
    core = {
        name: ",".join(
            f"{sign}{bounds[word][name]}" for sign, word in ((">=", "since"), ("<", "until")) if name in bounds[word]
        )
        for name in document["megatron_core"]
    }
    return core | dict.fromkeys(document["mcore_adapter"], "")


def _additional(configuration: Configuration) -> Iterator[Finding]:
    additional = configuration.get("additional_configs")
    if not isinstance(additional, Mapping):
        return
    declared = {name for name, key in known_keys().items() if key.package == "mcore_adapter"}
    for name in additional:
        line = configuration.line("additional_configs", name)
        if name in megatron_settings():
            if versions := megatron_settings()[name]:
                yield Finding(
                    rule="mca-additional-version",
                    severity="note",
                    part=configuration.part,
                    line=line,
                    what=f"{name} in additional_configs is a setting of megatron-core{versions} alone",
                    why="another version skips it with a warning",
                )
            if name in declared and configuration.get(name) is not None:
                yield Finding(
                    rule="mca-additional-twice",
                    severity="warning",
                    part=configuration.part,
                    line=line,
                    what=f"{name} stands at the top too, and that value wins over the one in additional_configs",
                    why="models/model_config.py::update_with_args takes the keys of its own afterwards",
                    remedy="keep one of them",
                    edits=drop(configuration, ("additional_configs", name)) if len(additional) > 1 else (),
                )
            continue
        yield Finding(
            rule="mca-additional-ignored",
            severity="warning",
            part=configuration.part,
            line=line,
            what=f"{shown(name)} in additional_configs is no setting of Megatron-core's: it is skipped with a warning",
            remedy=nearest(name, megatron_settings()) or "take it out",
        )
