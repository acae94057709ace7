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
from typing import Any

from topoplan.backends.mca import SUPPORTED_MODEL_TYPES
from topoplan.check.edits import add, change, drop
from topoplan.check.finding import Edit, Finding
from topoplan.check.found import found
from topoplan.check.mca_layout import UNKNOWN_MODEL, degree, spec_and_layout
from topoplan.check.models import is_directory, known_model
from topoplan.check.setup import Configuration, Setup
from topoplan.check.values import flag, is_complete, value_of, whole, words
from topoplan.emit.trainer_facts import is_hub_id
from topoplan.emit.trainer_keys import judge_key, known_keys, templates
from topoplan.emit.trainer_yaml import FREEZABLE_MODEL_TYPES
from topoplan.errors import LayoutError, nearest
from topoplan.layout.rules import RECOMPUTE_MODULES, RULES, SFT_PAD, facts_of
from topoplan.specs.model import Model
from topoplan.units import shown

_STAGES = ("pt", "sft", "dpo")
_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_VPP, _CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_DISPATCHER, _SP = "moe_token_dispatcher_type", "sequence_parallel"

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

_KEYS_OF_RULE: Mapping[str, tuple[str, ...]] = {
    "overlap": ("overlap_param_gather",),
    "optimizer": ("optimizer_offload_fraction", "optimizer_cpu_offload"),
    "heads": (_TP,),
    "kv-heads": (_TP,),
    "widths": (_TP,),
    "vocabulary": (_TP,),
    "context-parallel": (_CP,),
    "experts": (_EP, _ETP),
    "expert-widths": (_ETP, _TP),
    "pipeline-split": ("pipeline_model_parallel_layout", _VPP, _PP),
    "mtp-stage": ("mtp_num_layers",),
    "vision-first-stage": (_PP,),
    "interleaving": ("gradient_accumulation_steps", _VPP),
    "sequence-parallel": (_SP, _TP),
    "sequence-length": ("cutoff_len", _CP, _TP),
    "recompute": ("recompute_modules", "recompute_num_layers", "recompute_granularity"),
}
"""The layout rules that need no cluster, and the keys that they are about, the likeliest first."""
_WITHOUT_MODEL = ("overlap", "optimizer", "interleaving", "sequence-length")
"""Those of them that look at no model."""
_NEED_STAGES = ("mtp-stage", "vision-first-stage")
_REMEDIES: Mapping[str, str] = {
    "overlap": "set use_distributed_optimizer and overlap_grad_reduce to true",
    "optimizer": "set use_distributed_optimizer: true",
    "sequence-parallel": "set sequence_parallel: true",
}
"""In the trainer's words, where those of the rule are a plan's."""
_FIXES: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "overlap": (("use_distributed_optimizer", True), ("overlap_grad_reduce", True)),
    "optimizer": (("use_distributed_optimizer", True),),
    "sequence-parallel": ((_SP, True),),
}


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the configurations that Megatron trains."""
    for configuration in setup.of("llamafactory"):
        if not setup.uses_mca(configuration):
            continue
        model = known_model(configuration.get("model_name_or_path"), configuration.part)
        yield from _ignored(configuration)
        yield from _method(setup, configuration, model)
        if model is not None and model.model_type not in SUPPORTED_MODEL_TYPES:
            model = None
        yield from _layout(configuration, model)
        yield from _recompute(configuration)
        yield from _experts(configuration, model)
        yield from _packing(configuration)
        yield from _speed(configuration, model)
        yield from _additional(configuration)


def _set(configuration: Configuration, key: str, value: Any, beside: str) -> tuple[Edit, ...]:
    """`key: value`, in its own line where it has one, else before the line of `beside`."""
    if key in configuration.source.data:
        return change(configuration, (key,), value=value)
    return add(configuration, (beside,), key, value)


# Keys that are not read ----------------------------------------------------------------------------------------------


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


# Model and method ----------------------------------------------------------------------------------------------------


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
    if isinstance(stage, str) and stage not in _STAGES and stage in known_keys()["stage"].choices:
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


# Layout --------------------------------------------------------------------------------------------------------------


def _layout(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    tp, pp = degree(configuration, "tensor_model_parallel"), degree(configuration, "pipeline_model_parallel")
    ep = degree(configuration, "expert_model_parallel")
    complete, have = is_complete(configuration), configuration.source.data
    interleaved = value_of(configuration, _VPP) is not None
    if interleaved and pp == 1 and (complete or _PP in have):
        yield found(
            configuration,
            "mca-interleaving-alone",
            "error",
            _VPP,
            f"{_VPP} without pipeline stages: with pipeline_model_parallel_size 1 the start is refused",
            why="parallel_state.py: 'should be greater than 1 with interleaved schedule'",
            remedy="take it out",
            edits=drop(configuration, (_VPP,)),
        )
    sequence_parallel = flag(configuration, _SP)
    if tp is not None and tp > 1 and not sequence_parallel and (complete or _SP in have):
        yield from _sequence_parallel_off(configuration, model, tp, ep or 1)
    if sequence_parallel and tp == 1 and (complete or _TP in have):
        yield found(
            configuration,
            "mca-sequence-parallel-alone",
            "warning",
            _SP,
            "sequence_parallel is switched off again: it splits over tensor parallel ranks, and there are none",
            remedy="take it out, or set tensor_model_parallel_size",
            edits=drop(configuration, (_SP,)),
        )
    yield from _broken_rules(configuration, model)
    if (
        complete
        and not flag(configuration, "use_distributed_optimizer")
        and not flag(configuration, "overlap_param_gather")
        and have.keys() & known_keys().keys() & {_TP, _PP, _CP, _EP}
    ):
        key = "use_distributed_optimizer"
        yield found(
            configuration,
            "mca-optimizer-not-split",
            "warning",
            key if key in have else None,
            f"{key} is off: every data parallel rank keeps the whole optimizer state of its weights",
            why="12 bytes a parameter in bf16: fp32 weights and two moments",
            remedy=f"set {key}: true",
            edits=_set(configuration, key, True, next(iter(have.keys() & {_TP, _PP, _CP, _EP}))),
        )


def _sequence_parallel_off(configuration: Configuration, model: Model | None, tp: int, ep: int) -> Iterator[Finding]:
    edits = _set(configuration, _SP, True, _TP)
    line_key = _SP if _SP in configuration.source.data else _TP
    if ep > 1:
        if _SP in configuration.source.data:
            yield found(
                configuration,
                "mca-sequence-parallel-forced",
                "note",
                _SP,
                f"sequence_parallel is switched on all the same, with tp {tp} and ep {ep}",
                remedy="write true, so that the file says what happens",
                edits=edits,
            )
    elif model is None or not facts_of(model).is_moe:  # with experts the layout rules refuse it
        yield found(
            configuration,
            "mca-sequence-parallel-off",
            "warning",
            line_key,
            f"sequence_parallel is off with tensor_model_parallel_size {tp}: each of the {tp} GPUs of a group keeps all"
            " activations of norms, dropout and residuals",
            why="it costs hardly any traffic: all-gather and reduce-scatter take the place of each all-reduce"
            " (arXiv 2205.05198, section 4.2.2)",
            remedy="set sequence_parallel: true",
            edits=edits,
        )


def _broken_rules(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """The layout rules that need no cluster."""
    try:
        asked = spec_and_layout(configuration, model or UNKNOWN_MODEL)
        if asked is None:
            return
        spec, layout = asked
        stages_known = model is not None
        told: set[str] = set()
        for rule in RULES:
            keys = _KEYS_OF_RULE.get(rule.name)
            if keys is None or (model is None and rule.name not in _WITHOUT_MODEL) or told & set(keys):
                continue
            if rule.name in _NEED_STAGES and not stages_known:
                continue
            if rule.name == "overlap" and not is_complete(configuration):
                continue  # a few lines of a file: the rest may switch them on
            equation = rule.failed(spec, layout)
            if equation is None:
                continue
            if rule.name == "pipeline-split":
                stages_known = False
                if layout.vpp > 1 and layout.pp == 1:
                    continue  # told already
            key = next((key for key in keys if key in configuration.source.data), None)
            told |= {key} if key else set()
            fixes = _FIXES.get(rule.name, ())
            edits = tuple(
                edit
                for name, value in fixes
                if key and value_of(configuration, name) is not value
                for edit in _set(configuration, name, value, key)
            )
            yield found(
                configuration,
                f"mca-{rule.name}",
                "error",
                key,
                f"{equation}{f' ({model.name})' if model else ''}",
                why=rule.source,
                remedy=_REMEDIES.get(rule.name, rule.fix),
                edits=edits,
            )
    except LayoutError as error:
        yield found(
            configuration,
            "mca-pipeline-split",
            "error",
            "pipeline_model_parallel_layout",
            error.what,
            remedy=error.remedy,
        )


# Recompute -----------------------------------------------------------------------------------------------------------


def _recompute(configuration: Configuration) -> Iterator[Finding]:
    have = configuration.source.data
    granularity = configuration.get("recompute_granularity")
    method, number = value_of(configuration, "recompute_method"), value_of(configuration, "recompute_num_layers")
    modules = words(configuration, "recompute_modules")
    if granularity == "full" and (method is None) != (number is None):
        missing, given = (
            ("recompute_method", "recompute_num_layers")
            if method is None
            else ("recompute_num_layers", "recompute_method")
        )
        value: Any = "uniform" if method is None else 1
        yield found(
            configuration,
            "mca-recompute-incomplete",
            "error",
            given,
            f"recompute_granularity full with {given} and without {missing} is refused",
            why="transformer_config.py wants both; the adapter fills them in only where both are missing",
            remedy=f"set {missing}: {value}, or leave both out for uniform and 1",
            edits=_set(configuration, missing, value, given),
        )
    if granularity == "selective" and number is not None:
        yield found(
            configuration,
            "mca-recompute-contradiction",
            "error",
            "recompute_num_layers",
            "recompute_num_layers with recompute_granularity selective is refused",
            remedy="take it out: recompute_modules says what is recomputed, in every layer",
            edits=drop(configuration, ("recompute_num_layers",)),
        )
    if granularity == "full" and flag(configuration, "moe_layer_recompute"):
        yield found(
            configuration,
            "mca-recompute-contradiction",
            "error",
            "moe_layer_recompute",
            "moe_layer_recompute with recompute_granularity full is refused",
            remedy="take it out: the experts are recomputed with their layers",
            edits=drop(configuration, ("moe_layer_recompute",)),
        )
    if modules is not None and granularity == "selective":
        tidy = ",".join(module.strip() for module in modules.split(","))
        if tidy != modules and all(module in RECOMPUTE_MODULES for module in tidy.split(",")):
            yield found(
                configuration,
                "mca-recompute-spaces",
                "error",
                "recompute_modules",
                f"recompute_modules {shown(modules)} is split at commas alone, and names with spaces are refused",
                remedy=f"write recompute_modules: {tidy}",
                edits=change(configuration, ("recompute_modules",), value=tidy),
            )
    unused = []
    if granularity is None and (is_complete(configuration) or "recompute_granularity" in have):
        unused = [key for key in ("recompute_method", "recompute_num_layers", "recompute_modules") if have.get(key)]
    elif granularity == "full" and modules is not None:
        unused = ["recompute_modules"]
    for key in unused:
        yield found(
            configuration,
            "mca-recompute-unused",
            "warning",
            key,
            f"{key} has no effect: recompute_granularity is {'not set' if granularity is None else granularity}",
            remedy="set recompute_granularity, or take it out",
        )


# Experts -------------------------------------------------------------------------------------------------------------


def _experts(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    have = configuration.source.data
    tp, ep = degree(configuration, "tensor_model_parallel") or 1, degree(configuration, "expert_model_parallel") or 1
    moe = facts_of(model).is_moe if model else ep > 1
    dispatcher = value_of(configuration, _DISPATCHER)
    if dispatcher in (None, "allgather"):
        if flag(configuration, "variable_seq_lengths"):
            yield found(
                configuration,
                "mca-variable-lengths",
                "error",
                "variable_seq_lengths",
                "variable_seq_lengths with the allgather dispatcher, the default, is refused, in dense models too",
                why="mcore_adapter training_args.py: 'does not support variable sequence length'",
                remedy=f"set {_DISPATCHER}: alltoall",
                edits=_set(configuration, _DISPATCHER, "alltoall", "variable_seq_lengths"),
            )
        elif moe and ep > 1:
            yield found(
                configuration,
                "mca-allgather-dispatcher",
                "warning",
                _DISPATCHER if _DISPATCHER in have else _EP,
                f"the {'' if dispatcher else 'default '}allgather dispatcher sends every token to every expert rank",
                why=f"with ep {ep} and few experts a token most of that traffic, and the memory for it, is for nothing",
                remedy=f"set {_DISPATCHER}: alltoall",
                edits=_set(configuration, _DISPATCHER, "alltoall", _EP),
            )
    if moe and tp > 1 and ep > 1 and value_of(configuration, _ETP) is None:
        yield found(
            configuration,
            "mca-expert-tensor-unset",
            "warning",
            _EP,
            f"{_ETP} is not set, and is then {tp}, the tensor parallel size, whatever its help text says",
            why=f"each expert is cut into {tp} slices, and {tp} * {ep} * pipeline stages must divide all GPUs",
            remedy=f"set {_ETP}: 1, or {tp} where that is meant",
            edits=add(configuration, (_EP,), _ETP, 1),
        )
    if model is not None and moe and value_of(configuration, "moe_grouped_gemm") is None and is_complete(configuration):
        yield found(
            configuration,
            "mca-experts-one-by-one",
            "warning",
            "model_name_or_path",
            "moe_grouped_gemm is not set: the experts of a GPU are calculated one after the other",
            remedy="set moe_grouped_gemm: true",
            edits=add(configuration, ("model_name_or_path",), "moe_grouped_gemm", True),
        )


# Packing and lengths -------------------------------------------------------------------------------------------------


def _packing(configuration: Configuration) -> Iterator[Finding]:
    cp, stage = degree(configuration, "context_parallel") or 1, configuration.get("stage", "sft")
    for key in ("neat_packing", "sequence_packing"):
        if not flag(configuration, key):
            continue
        if cp > 1:
            yield found(
                configuration,
                "mca-packing-with-context-parallel",
                "error",
                key,
                f"{key} fails under context parallelism (cp {cp})",
                why=f"trainer.py wants packed samples at multiples of 2 * cp = {2 * cp} tokens; nothing pads them",
                remedy=f"set packing: true instead of {key}, or context_parallel_size: 1",
                edits=change(configuration, (key,), name="packing", value=True)
                if "packing" not in configuration.source.data
                else drop(configuration, (key,)),
            )
        elif stage == "dpo" and key == "sequence_packing":
            yield found(
                configuration,
                "mca-packing-in-dpo",
                "error",
                key,
                "sequence_packing is refused in stage dpo",
                remedy="take it out",
                edits=drop(configuration, (key,)),
            )
        elif configuration.get("transformer_impl") == "local":
            yield found(
                configuration,
                "mca-packing-without-te",
                "error",
                key,
                f"{key} needs Transformer Engine, and transformer_impl is local",
                remedy="take transformer_impl out",
            )
    if stage == "dpo" and flag(configuration, "packing"):
        yield found(
            configuration,
            "mca-packing-in-dpo",
            "warning",
            "packing",
            "packing has no effect in stage dpo: pairs are never packed",
            remedy="take it out",
            edits=drop(configuration, ("packing",)),
        )
    length = whole(configuration, "cutoff_len")
    if length and length > 0 and stage in ("sft", "dpo") and length % SFT_PAD:
        yield found(
            configuration,
            "mca-length-padded",
            "note",
            "cutoff_len",
            f"cutoff_len {length} is no multiple of {SFT_PAD}: full sequences are padded to"
            f" {-(-length // SFT_PAD) * SFT_PAD} tokens",
            why="train/mca/workflow.py, pad_to_multiple_of",
        )


# Speed and output ----------------------------------------------------------------------------------------------------


def _speed(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    micro_batch = degree(configuration, "per_device_train_batch")
    fused = flag(configuration, "apply_rope_fusion")
    if fused and model is not None and model.vision is not None and micro_batch is not None and micro_batch > 1:
        yield found(
            configuration,
            "mca-rope-fusion",
            "warning",
            "apply_rope_fusion",
            f"apply_rope_fusion has no kernel for the mRoPE of {model.name} with micro batches above 1",
            why="rope_utils.py::apply_rotary_pos_emb falls back, with a warning at every call",
            remedy="set apply_rope_fusion: false, or per_device_train_batch_size: 1",
            edits=change(configuration, ("apply_rope_fusion",), value=False),
        )
    tp = degree(configuration, "tensor_model_parallel")
    if flag(configuration, "cross_entropy_loss_fusion") and tp is not None and tp > 1:
        yield found(
            configuration,
            "mca-cross-entropy-fusion",
            "note",
            "cross_entropy_loss_fusion",
            f"cross_entropy_loss_fusion takes effect with tensor_model_parallel_size 1 alone, and it is {tp}",
        )
    if is_complete(configuration) and not flag(configuration, "save_hf_model"):
        key = "save_hf_model"
        anchor = next(
            (name for name in ("output_dir", "model_name_or_path") if name in configuration.source.data), None
        )
        yield found(
            configuration,
            "mca-no-hf-model",
            "note",
            key if key in configuration.source.data else None,
            "checkpoints are Megatron's, one part for each rank: vLLM and Transformers cannot load them",
            remedy="set save_hf_model: true, which writes Hugging Face weights too",
            edits=_set(configuration, key, True, anchor) if anchor else (),
        )


# additional_configs --------------------------------------------------------------------------------------------------


@cache
def megatron_settings() -> frozenset[str]:
    """What additional_configs may name."""
    path = files("topoplan.catalog").joinpath("trainer_keys", "megatron_config.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    return frozenset(document["megatron_core"]) | frozenset(document["mcore_adapter"])


def _additional(configuration: Configuration) -> Iterator[Finding]:
    additional = configuration.get("additional_configs")
    if not isinstance(additional, Mapping):
        return
    declared = {name for name, key in known_keys().items() if key.package == "mcore_adapter"}
    for name in additional:
        line = configuration.line("additional_configs", name)
        if name in megatron_settings():
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
