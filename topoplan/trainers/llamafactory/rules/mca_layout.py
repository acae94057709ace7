"""Layouts that Megatron refuses, whatever the cluster: degrees, switches, stages and recomputation.

Sources: LLaMA-Factory 0.9.5 `train/mca/workflow.py`, `train/tuner.py`; mcore_adapter 0.10 `training_args.py`,
`models/model_config.py`, `trainer/trainer.py`; megatron-core 0.16 `transformer/transformer_config.py`,
`parallel_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.engines.megatron.rules import RULES
from topoplan.errors import LayoutError
from topoplan.lint.fewest_gpus import UNKNOWN_MODEL, degree, spec_and_layout
from topoplan.lint.rules.layout_keys import KEYS_OF_RULE
from topoplan.planner.case import case_of
from topoplan.reading.edits import change, drop, set_to
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration
from topoplan.reading.values import flag, is_complete, value_of, words
from topoplan.specs.facts import facts_of
from topoplan.specs.layout_parts import RECOMPUTE_MODULES
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.key_list import known_keys
from topoplan.trainers.megatron_keys import CP, EP, PP, SP, TP, VPP
from topoplan.units import shown

_WITHOUT_CLUSTER = frozenset(
    [
        "overlap",
        "optimizer",
        "heads",
        "kv-heads",
        "widths",
        "vocabulary",
        "context-parallel",
        "experts",
        "expert-widths",
        "pipeline-split",
        "mtp-stage",
        "vision-first-stage",
        "interleaving",
        "sequence-parallel",
        "sequence-length",
        "recompute",
    ]
)
"""The layout rules that need no cluster."""
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
    "sequence-parallel": ((SP, True),),
}


def layout_findings(configuration: Configuration, model: Model | None, *, planned: bool) -> Iterator[Finding]:
    """Degrees and switches that do not go together, with each other or with the model.

    `planned`: topoplan wrote it, and has weighed what costs only memory.
    """
    tp, pp = degree(configuration, "tensor_model_parallel"), degree(configuration, "pipeline_model_parallel")
    ep = degree(configuration, "expert_model_parallel")
    complete, have = is_complete(configuration), configuration.source.data
    interleaved = value_of(configuration, VPP) is not None
    if interleaved and pp == 1 and (complete or PP in have):
        yield found(
            configuration,
            "mca-interleaving-alone",
            "error",
            VPP,
            f"{VPP} without pipeline stages: with pipeline_model_parallel_size 1 the start is refused",
            why="parallel_state.py: 'should be greater than 1 with interleaved schedule'",
            remedy="take it out",
            edits=drop(configuration, (VPP,)),
        )
    sequence_parallel = flag(configuration, SP)
    if tp is not None and tp > 1 and not sequence_parallel and (complete or SP in have) and not planned:
        yield from _sequence_parallel_off(configuration, model, tp, ep or 1)
    if sequence_parallel and tp == 1 and (complete or TP in have):
        yield found(
            configuration,
            "mca-sequence-parallel-alone",
            "warning",
            SP,
            "sequence_parallel is switched off again: it splits over tensor parallel ranks, and there are none",
            remedy="take it out, or set tensor_model_parallel_size",
            edits=drop(configuration, (SP,)),
        )
    yield from _broken_rules(configuration, model)
    if (
        complete
        and not flag(configuration, "use_distributed_optimizer")
        and not flag(configuration, "overlap_param_gather")
        and have.keys() & known_keys().keys() & {TP, PP, CP, EP}
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
            edits=set_to(configuration, key, True, next(iter(have.keys() & {TP, PP, CP, EP}))),
        )


def _sequence_parallel_off(configuration: Configuration, model: Model | None, tp: int, ep: int) -> Iterator[Finding]:
    edits = set_to(configuration, SP, True, TP)
    line_key = SP if SP in configuration.source.data else TP
    if ep > 1:
        if SP in configuration.source.data:
            yield found(
                configuration,
                "mca-sequence-parallel-forced",
                "note",
                SP,
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
        case = case_of(spec, layout.backend)
        stages_known = model is not None
        told: set[str] = set()
        for rule in RULES:
            if rule.name not in _WITHOUT_CLUSTER or (model is None and rule.name not in _WITHOUT_MODEL):
                continue
            keys = KEYS_OF_RULE[rule.name]
            if told & set(keys):
                continue
            if rule.name in _NEED_STAGES and not stages_known:
                continue
            if rule.name == "overlap" and not is_complete(configuration):
                continue  # a few lines of a file: the rest may switch them on
            equation = rule.failed(case, layout)
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
                for edit in set_to(configuration, name, value, key)
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


# Recompute ------------------------------------------------------------------------------------------------------------


def recompute_findings(configuration: Configuration) -> Iterator[Finding]:
    """Keys of recomputation that contradict each other."""
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
            edits=set_to(configuration, missing, value, given),
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
