"""Rules that the layout of a configuration breaks, each at the line of the key that decides it."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.check.finding import Finding, Severity
from topoplan.check.setup import Configuration
from topoplan.check.translate import Translation
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.layout.rules import Rule
from topoplan.planner.predict import RULES_OF_A_GIVEN_LAYOUT
from topoplan.specs.spec import Spec

_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_VPP, _CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_SPLIT = "pipeline_model_parallel_layout"
_KEYS: dict[str, tuple[str, ...]] = {
    "overlap": ("overlap_param_gather",),
    "adapter": ("optimizer_offload_fraction", "optimizer_cpu_offload"),
    "optimizer": ("optimizer_offload_fraction", "optimizer_cpu_offload", "use_precision_aware_optimizer"),
    "world-size": (_TP, _PP, _CP),
    "tp-in-nvlink-domain": (_TP,),
    "heads": (_TP,),
    "kv-heads": (_TP,),
    "widths": (_TP,),
    "vocabulary": (_TP,),
    "context-parallel": (_CP,),
    "experts": (_EP, _ETP),
    "expert-grid": (_EP, _ETP, _PP),
    "dispatcher": ("moe_token_dispatcher_type",),
    "expert-widths": (_ETP, _TP),
    "fp8-widths": ("fp8", "fp8_format", _TP),
    "pipeline-split": (_SPLIT, _VPP, _PP),
    "mtp-stage": ("mtp_num_layers", _PP),
    "vision-first-stage": (_SPLIT, _VPP, _PP),
    "batch": ("max_samples", "global_batch_size", "per_device_train_batch_size"),
    "interleaving": ("gradient_accumulation_steps", "global_batch_size", _VPP),
    "sequence-parallel": ("sequence_parallel", _TP),
    "sequence-length": ("cutoff_len", "max_length"),
    "recompute": ("recompute_granularity",),
}
"""The trainer keys that decide a rule; the first one that a file has is named."""

SLOW_RULES = frozenset(["tp-in-nvlink-domain"])
"""A trainer runs what breaks them, at the speed of the network between nodes."""


def broken_rules(spec: Spec, layout: Layout) -> list[tuple[Rule, str]]:
    """Every rule that a layout breaks, with its equation; of those that one key decides, the first."""
    broken: dict[str, tuple[Rule, str]] = {}
    for rule in RULES_OF_A_GIVEN_LAYOUT:
        try:
            equation = rule.failed(spec, layout)
        except LayoutError:  # stages that do not divide, which a rule of their own tells
            continue
        if equation:
            broken.setdefault(_KEYS[rule.name][0], (rule, equation))
    return list(broken.values())


def legality_findings(translation: Translation) -> Iterator[Finding]:
    """A finding for each broken rule."""
    for rule, equation in broken_rules(translation.spec, translation.layout):
        severity: Severity = "warning" if rule.name in SLOW_RULES else "error"
        yield Finding(
            rule=f"layout-{rule.name}",
            severity=severity,
            part=translation.configuration.part,
            line=key_line(translation.configuration, _KEYS[rule.name]),
            what=equation,
            why=f"{'it runs, and slowly' if rule.name in SLOW_RULES else 'the trainer cannot run it'}: {rule.source}",
            remedy=rule.fix,
        )


def key_line(configuration: Configuration, keys: tuple[str, ...]) -> int | None:
    """Line of the first of these keys that the configuration has."""
    return next((configuration.line(key) for key in keys if key in configuration.source.data), None)
