"""What LLaMA-Factory's Megatron path (USE_MCA=1, mcore_adapter) ignores, refuses, or does contrary to expectation.

Sources: LLaMA-Factory 0.9.5 `train/mca/workflow.py`, `train/tuner.py`; mcore_adapter 0.10 `training_args.py`,
`models/model_config.py`, `trainer/trainer.py`; megatron-core 0.16 `transformer/transformer_config.py`,
`parallel_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from topoplan.errors import nearest
from topoplan.reading.edits import drop
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, value_of, words
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.key_list import judge_key, known_keys, megatron_settings, templates
from topoplan.trainers.llamafactory.mca_refusals import FREEZABLE_MODEL_TYPES, STAGES
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.llamafactory.rules.mca_layout import layout_findings, recompute_findings
from topoplan.trainers.llamafactory.rules.mca_layouts import layouts_findings
from topoplan.trainers.llamafactory.rules.mca_training import training_findings
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.models import is_directory, is_hub_id, model_at_hand
from topoplan.units import shown

_MEANING = {
    "deepspeed": "the adapter sets it to None: nothing of it is used, and memory is split only by the layout",
    "disable_shuffling": "the trainer never shuffles: its sampler is sequential, and the data is read in its order",
    "fsdp": "no FSDP is set up: memory is split only by the layout",
    "fsdp_config": "no FSDP is set up: memory is split only by the layout",
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
"""What happens if these keys are set; other keys get a general sentence."""
_FETCHES = "run_train.py"
"""The adapter's own script, which downloads models (mcore_adapter examples/train/run_train.py, download_model)."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of configurations that mcore_adapter trains."""
    for configuration in setup.of("llamafactory"):
        if not setup.uses_mca(configuration):
            continue
        model = model_at_hand(configuration.get(MODEL_KEY), configuration.part)
        yield from _ignored(configuration)
        yield from _method(configuration)
        yield from _hub_id(setup, configuration, model)
        supported = templates().supported_model_types
        built = model if model and model.model_type in supported else None
        if model is not None:
            yield from _freezes(configuration, model)
        if model is not None and built is None:
            yield RULES["mca-model-type"].at(
                configuration, MODEL_KEY, model_type=model.model_type, model_types=", ".join(supported)
            )
        yield from layout_findings(configuration, built, planned=setup.bundle_of(configuration) is not None)
        yield from recompute_findings(configuration)
        yield from training_findings(configuration, built)
        yield from _additional(configuration)
        yield from layouts_findings(setup, configuration, model)


def _ignored(configuration: Configuration) -> Iterator[Finding]:
    """Report keys that are ignored."""
    for key in configuration.source.data:
        value = value_of(configuration, key)
        verdict = judge_key(key, value)
        remedy = verdict.remedy.replace("pin the layout's recompute", "set recompute_granularity")
        if verdict.trouble == "ignored" and key in _MEANING:
            rule = RULES["mca-ignored-key.meant"]
            yield rule.at(configuration, key, meaning=_MEANING[key], remedy=remedy)
        elif verdict.trouble == "ignored":
            yield RULES["mca-ignored-key"].at(configuration, key, remedy=remedy)
        elif verdict.trouble == "dropped":
            yield RULES["mca-wandb-dropped"].at(configuration, key)


# Model and method -----------------------------------------------------------------------------------------------------


def _method(configuration: Configuration) -> Iterator[Finding]:
    method, stage = configuration.get("finetuning_type"), configuration.get("stage")
    if method in ("lora", "oft", "freeze"):
        yield RULES["mca-trains-everything"].at(configuration, "finetuning_type", method=method)
    if isinstance(stage, str) and stage not in STAGES and stage in known_keys()["stage"].choices:
        yield RULES["mca-stage"].at(configuration, "stage", stage=stage)


def _freezes(configuration: Configuration, model: Model) -> Iterator[Finding]:
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        if not flag(configuration, key):
            continue
        if model.model_type not in FREEZABLE_MODEL_TYPES:
            level: Severity = "error" if key == "freeze_language_model" else "note"
            edits = () if level == "error" else None  # removing the key would still train the language model
            yield RULES["mca-freezes-nothing"].at(configuration, key, level=level, model=model.name, edits=edits)
        elif configuration.get("stage") == "pt":
            yield RULES["mca-freezes-nothing.pt"].at(configuration, key)


def _hub_id(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    key, name = "model_name_or_path", words(configuration, "model_name_or_path")
    downloads = {"USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB"} & {variable.name for variable in setup.variables}
    launch = launch_of(setup, configuration)
    fetches = launch is not None and PurePath(launch.program).name == _FETCHES
    if name is None or not is_hub_id(name) or is_directory(name, configuration.part) or downloads or fetches:
        return
    directory, rule = f"models/{name}", RULES["mca-hub-id"]
    if name in templates().by_model or (model is not None and model.name.lower() == name.lower()):
        yield rule.at(configuration, key, name=name, probably="", directory=directory)
    else:
        yield rule.at(configuration, key, level="warning", name=name, probably="probably ", directory=directory)


# additional_configs ---------------------------------------------------------------------------------------------------


def _additional(configuration: Configuration) -> Iterator[Finding]:
    additional = configuration.get("additional_configs")
    if not isinstance(additional, Mapping):
        return
    declared = {name for name, key in known_keys().items() if key.package == "mcore_adapter"}
    for name in additional:
        place = ("additional_configs", name)
        if name not in megatron_settings():
            remedy = nearest(name, megatron_settings())
            yield RULES["mca-additional-ignored"].at(configuration, place, setting=shown(name), remedy=remedy)
            continue
        if versions := megatron_settings()[name]:
            yield RULES["mca-additional-version"].at(configuration, place, versions=versions)
        if name in declared and configuration.get(name) is not None:
            edits = drop(configuration, place) if len(additional) > 1 else ()
            yield RULES["mca-additional-twice"].at(configuration, place, edits=edits)
