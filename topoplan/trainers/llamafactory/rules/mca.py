"""What LLaMA-Factory's Megatron path (USE_MCA=1, mcore_adapter) ignores, refuses, or does contrary to expectation.

Sources: LLaMA-Factory 0.9.5 `train/mca/workflow.py`, `train/tuner.py`; mcore_adapter 0.10 `training_args.py`,
`models/model_config.py`, `trainer/trainer.py`; megatron-core 0.16 `transformer/transformer_config.py`,
`parallel_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath

from topoplan.errors import nearest
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, is_complete, value_of, whole, words
from topoplan.specs.facts import facts_of
from topoplan.specs.layout_parts import RECOMPUTE_MODULES
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.key_list import judge_key, known_keys, megatron_settings, templates
from topoplan.trainers.llamafactory.mca_refusals import FREEZABLE_MODEL_TYPES, STAGES
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.llamafactory.rules.keys import degree
from topoplan.trainers.llamafactory.rules.mca_layouts import layouts_findings
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.megatron_keys import CP, DISPATCHER, EP, ETP, PP, SP, TP, VPP
from topoplan.trainers.models import is_directory, is_hub_id, model_at_hand
from topoplan.trainers.traits import MCA
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


_DEGREES = frozenset([TP, PP, CP, EP])


def layout_findings(configuration: Configuration, model: Model | None, *, planned: bool) -> Iterator[Finding]:
    """Report degrees and switches that conflict with each other or with the model.

    `planned`: topoplan wrote the file and has weighed options that only cost memory.
    """
    tp, pp = degree(configuration, "tensor_model_parallel"), degree(configuration, "pipeline_model_parallel")
    complete, have = is_complete(configuration), configuration.source.data
    if value_of(configuration, VPP) is not None and pp == 1 and (complete or PP in have):
        yield RULES["mca-interleaving-alone"].at(configuration, VPP)
    sequence_parallel = flag(configuration, SP)
    if tp is not None and tp > 1 and not sequence_parallel and (complete or SP in have) and not planned:
        yield from _sequence_parallel_off(configuration, model, tp)
    if sequence_parallel and tp == 1 and (complete or TP in have):
        yield RULES["mca-sequence-parallel-alone"].at(configuration, SP)
    key = "use_distributed_optimizer"
    if (
        complete
        and have.keys() & _DEGREES
        and not flag(configuration, key)
        and not flag(configuration, "overlap_param_gather")
    ):
        yield RULES["mca-optimizer-not-split"].at(configuration, key if key in have else None)


def _sequence_parallel_off(configuration: Configuration, model: Model | None, tp: int) -> Iterator[Finding]:
    ep, given = degree(configuration, "expert_model_parallel") or 1, SP in configuration.source.data
    if ep > 1:
        if given:
            yield RULES["mca-sequence-parallel-forced"].at(configuration, SP, tp=tp, ep=ep)
    elif model is None or not facts_of(model).is_moe:  # with experts, the layout rules refuse it
        yield RULES["mca-sequence-parallel-off"].at(configuration, SP if given else TP, tp=tp)


# Recompute ------------------------------------------------------------------------------------------------------------


def recompute_findings(configuration: Configuration) -> Iterator[Finding]:
    """Report recomputation keys that contradict each other."""
    granularity = configuration.get("recompute_granularity")
    if granularity == "full":
        yield from _full(configuration)
    elif granularity == "selective":
        yield from _selective(configuration)
    have = configuration.source.data
    unused: list[str] = []
    if granularity is None and (is_complete(configuration) or "recompute_granularity" in have):
        unused = [key for key in ("recompute_method", "recompute_num_layers", "recompute_modules") if have.get(key)]
    elif granularity == "full" and words(configuration, "recompute_modules") is not None:
        unused = ["recompute_modules"]
    for key in unused:
        yield RULES["mca-recompute-unused"].at(configuration, key, granularity=granularity or "not set")


def _full(configuration: Configuration) -> Iterator[Finding]:
    defaults = {"recompute_method": "uniform", "recompute_num_layers": 1}
    missing = [key for key in defaults if value_of(configuration, key) is None]
    if len(missing) == 1:
        (given,), value = defaults.keys() - missing, defaults[missing[0]]
        yield RULES["mca-recompute-incomplete"].at(configuration, given, missing=missing[0], value=value)
    if flag(configuration, "moe_layer_recompute"):
        yield RULES["mca-recompute-contradiction.full"].at(configuration, "moe_layer_recompute")


def _selective(configuration: Configuration) -> Iterator[Finding]:
    if value_of(configuration, "recompute_num_layers") is not None:
        yield RULES["mca-recompute-contradiction.selective"].at(configuration, "recompute_num_layers")
    modules = words(configuration, "recompute_modules") or ""
    tidy = ",".join(module.strip() for module in modules.split(","))
    if tidy != modules and all(module in RECOMPUTE_MODULES for module in tidy.split(",")):
        edits = change(configuration, ("recompute_modules",), value=tidy)
        rule = RULES["mca-recompute-spaces"]
        yield rule.at(configuration, "recompute_modules", modules=shown(modules), tidy=tidy, edits=edits)


_GROUPED = "moe_grouped_gemm"


def training_findings(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """Report faults in how a legal layout is trained."""
    yield from _dispatcher(configuration, model)
    yield from _experts(configuration, model)
    yield from _packing(configuration)
    yield from _length(configuration)
    yield from _fusions(configuration, model)


# Experts --------------------------------------------------------------------------------------------------------------


def _has_experts(configuration: Configuration, model: Model | None) -> bool:
    return facts_of(model).is_moe if model else (degree(configuration, "expert_model_parallel") or 1) > 1


def _dispatcher(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    ep, dispatcher = degree(configuration, "expert_model_parallel") or 1, value_of(configuration, DISPATCHER)
    if dispatcher not in (None, "allgather"):
        return
    if flag(configuration, "variable_seq_lengths"):
        yield RULES["mca-variable-lengths"].at(configuration, "variable_seq_lengths")
    elif ep > 1 and _has_experts(configuration, model):
        place = DISPATCHER if DISPATCHER in configuration.source.data else EP
        yield RULES["mca-allgather-dispatcher"].at(
            configuration, place, default="" if dispatcher else "default ", ep=ep
        )


def _experts(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    if not _has_experts(configuration, model):
        return
    tp, ep = degree(configuration, "tensor_model_parallel") or 1, degree(configuration, "expert_model_parallel") or 1
    if tp > 1 and ep > 1 and value_of(configuration, ETP) is None:
        yield RULES["mca-expert-tensor-unset"].at(configuration, EP, tp=tp, ep=ep)
    if model is not None and value_of(configuration, _GROUPED) is None and is_complete(configuration):
        yield RULES["mca-experts-one-by-one"].at(configuration, "model_name_or_path")


# Packing and lengths --------------------------------------------------------------------------------------------------


def _packing(configuration: Configuration) -> Iterator[Finding]:
    cp, stage = degree(configuration, "context_parallel") or 1, configuration.get("stage", "sft")
    for key in ("neat_packing", "sequence_packing"):
        if not flag(configuration, key):
            continue
        if cp > 1:
            yield RULES["mca-packing-with-context-parallel"].at(configuration, key, cp=cp, multiple=2 * cp)
        elif stage == "dpo" and key == "sequence_packing":
            yield RULES["mca-packing-in-dpo.sequence"].at(configuration, key)
        elif configuration.get("transformer_impl") == "local":
            yield RULES["mca-packing-without-te"].at(configuration, key)
    if stage == "dpo" and flag(configuration, "packing"):
        yield RULES["mca-packing-in-dpo"].at(configuration, "packing")


def _length(configuration: Configuration) -> Iterator[Finding]:
    length, multiple = whole(configuration, "cutoff_len"), MCA.padding.multiple
    if length and length > 0 and configuration.get("stage", "sft") in ("sft", "dpo") and length % multiple:
        padded = -(-length // multiple) * multiple
        rule = RULES["mca-length-padded"]
        yield rule.at(configuration, "cutoff_len", length=length, multiple=multiple, padded=padded)


# Speed ----------------------------------------------------------------------------------------------------------------


def _fusions(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    micro_batch, tp = degree(configuration, "per_device_train_batch"), degree(configuration, "tensor_model_parallel")
    fuses_rope = flag(configuration, "apply_rope_fusion")
    if fuses_rope and model is not None and model.vision is not None and micro_batch is not None and micro_batch > 1:
        yield RULES["mca-rope-fusion"].at(configuration, "apply_rope_fusion", model=model.name)
    if flag(configuration, "cross_entropy_loss_fusion") and tp is not None and tp > 1:
        yield RULES["mca-cross-entropy-fusion"].at(configuration, "cross_entropy_loss_fusion", tp=tp)
