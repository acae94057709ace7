"""Degrees, switches and recomputation on the Megatron path that contradict each other on any cluster."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.edits import change
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration
from topoplan.reading.values import flag, is_complete, value_of, words
from topoplan.specs.facts import facts_of
from topoplan.specs.layout_parts import RECOMPUTE_MODULES
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.rules.keys import degree
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.megatron_keys import CP, EP, PP, SP, TP, VPP
from topoplan.units import shown

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
