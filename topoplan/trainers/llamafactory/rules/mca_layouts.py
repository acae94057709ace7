"""Layouts of LLaMA-Factory's Megatron path that Megatron refuses or whose results cannot be used.

The cluster is unknown here, so only rules that do not need one are checked, for the fewest GPUs that the degrees allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topoplan.engines.megatron.rules import RULES as LAYOUT_RULES
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule, read_rules
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, is_complete
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.fault_rules import fault_findings
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.layout_keys import KEYS_OF_RULE
from topoplan.trainers.llamafactory.fewest_gpus import UNKNOWN_MODEL, spec_and_layout
from topoplan.trainers.llamafactory.key_list import templates

_WITHOUT_MODEL = ("overlap", "optimizer", "interleaving", "sequence-length")
_WITHOUT_CLUSTER = (
    *_WITHOUT_MODEL,
    *("heads", "kv-heads", "widths", "vocabulary", "context-parallel", "experts", "expert-widths"),
    *("pipeline-split", "mtp-stage", "vision-first-stage", "sequence-parallel", "recompute"),
)
_NEED_STAGES = ("mtp-stage", "vision-first-stage")
_REMEDIES: Mapping[str, str] = {
    "overlap": "set use_distributed_optimizer and overlap_grad_reduce to true",
    "optimizer": "set use_distributed_optimizer: true",
    "sequence-parallel": "set sequence_parallel: true",
}
"""Remedies in terms of the trainer's keys, replacing those of the rule, which are about plans."""
_TABLE = read_rules(__package__, "mca_layouts.toml")
RULES = {**_TABLE} | {
    f"mca-{rule.name}": Rule(
        id=f"mca-{rule.name}",
        level="error",
        reads="LLaMA-Factory's YAML that mcore_adapter trains (USE_MCA=1)",
        what=f"the layout breaks the rule {rule.name}: the equation that fails, with its numbers",
        why=rule.source,
        remedy=_REMEDIES.get(rule.name, rule.fix),
    )
    for rule in LAYOUT_RULES
    if rule.name in _WITHOUT_CLUSTER
}


def layouts_findings(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """Report broken layout rules, checkpoints that nothing else can read, and known faults of packages."""
    asked = spec_and_layout(configuration, model or UNKNOWN_MODEL)
    is_built = model is not None and model.model_type in templates().supported_model_types
    if asked is not None:
        try:
            yield from _broken_rules(configuration, *asked, with_model=is_built)
        except LayoutError as error:
            key = "pipeline_model_parallel_layout"
            yield RULES["mca-pipeline-split.text"].at(configuration, key, error=error.what, remedy=error.remedy)
    yield from _not_exported(configuration, asked if is_built else None)
    if asked is not None:
        yield from fault_findings(setup, configuration, *asked)


def _broken_rules(configuration: Configuration, spec: Spec, layout: Layout, *, with_model: bool) -> Iterator[Finding]:
    case = case_of(spec, layout.backend)
    stages_known = with_model
    told: set[str] = set()
    for rule in LAYOUT_RULES:
        keys = KEYS_OF_RULE.get(rule.name, ())
        if rule.name not in (_WITHOUT_CLUSTER if with_model else _WITHOUT_MODEL) or told & set(keys):
            continue
        if rule.name in _NEED_STAGES and not stages_known:
            continue
        if rule.name == "overlap" and not is_complete(configuration):
            continue  # in an excerpt; the rest of the file may enable them
        equation = rule.failed(case, layout)
        if equation is None:
            continue
        if rule.name == "pipeline-split":
            stages_known = False
            if layout.vpp > 1 and layout.pp == 1:
                continue  # reported already
        key = next((key for key in keys if key in configuration.source.data), None)
        told |= {key} if key else set()
        what = f"{equation}{f' ({spec.model.name})' if with_model else ''}"
        yield RULES[f"mca-{rule.name}"].at(configuration, key, what=what)


def _not_exported(configuration: Configuration, asked: tuple[Spec, Layout] | None) -> Iterator[Finding]:
    key, have = "save_hf_model", configuration.source.data
    if not is_complete(configuration) or flag(configuration, key) or (asked and not can_export(*asked)):
        return
    yield RULES["mca-no-hf-model"].at(configuration, key if key in have else None)
