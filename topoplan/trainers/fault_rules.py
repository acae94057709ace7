"""Rules on known faults of packages that a layout triggers, certain if the files pin an affected version."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.utils import canonicalize_name

from topoplan.catalog.packages import allows
from topoplan.layout.layout import Layout
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.rules import Rule
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.source import at
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import FAULTS, Fault, faults_of_keys
from topoplan.trainers.layout_keys import key_line
from topoplan.trainers.megatron_keys import CP, EP, ETP, SP, TP, VPP

_KEYS = {
    "distributed_optimizer": ("use_distributed_optimizer",),
    "overlap_param_gather": ("overlap_param_gather",),
    "vpp": (VPP,),
    "ep": (EP,),
    "etp": (ETP, TP),
    "tp": (TP,),
    "cp": (CP,),
    "sequence_parallel": (SP, TP),
    "zero_stage": ("deepspeed",),
}
"""Key of a layout -> the trainer keys that decide it."""


def fault_findings(setup: Setup, configuration: Configuration, spec: Spec, layout: Layout) -> Iterator[Finding]:
    """Yield a finding for each fault that a configuration triggers.

    If no version is pinned, only users' files are reported: bundles check the versions when they start.
    """
    part = configuration.part
    for fault in faults_of_keys(spec, layout, configuration.source.data):
        in_block = configuration.line("additional_configs", next(iter(fault.keys)))
        yield RULES[fault.name].found(part, key_line(configuration, tuple(fault.keys)) or in_block)
    pins = {pin.package: pin for pin in setup.pins}
    of_deepspeed = [one.source.data for one in setup.of("deepspeed")]
    for fault in FAULTS:
        is_spared = bool(fault.spared_by) and any(at(data, fault.spared_by) for data in of_deepspeed)
        if fault.keys or not fault.is_triggered(spec, layout, {}) or is_spared:
            continue
        pin = pins.get(canonicalize_name(fault.package))
        if pin is None and setup.bundle_of(configuration) is None:
            yield RULES[fault.name].found(part, key_line(configuration, _KEYS[fault.layout_key]))
        elif pin is not None and allows(fault.versions, pin.version):
            level: Severity = "error" if fault.level == "stops" else "warning"
            what = f"{fault.package} {pin.version} is installed here ({fault.when}): {fault.text}"
            yield RULES[fault.name].found(pin.part, pin.line, level=level, what=what)


def _rule_of(fault: Fault) -> Rule:
    """Return a fault as a rule; its level is that for an unknown version."""
    install = f"install '{fault.package}{fault.cure}'" if fault.cure else ""
    level: Severity = "error" if fault.keys else "warning" if fault.level == "stops" else "note"
    return Rule(
        id=f"fault-{fault.name}",
        level=level,
        reads="layouts, and the versions that `pip install` names",
        what=f"{fault.when}: {fault.text}".replace("{", "{{").replace("}", "}}"),
        why=fault.source,
        remedy=", or ".join(filter(None, (install, fault.remedy))),
    )


RULES = {fault.name: _rule_of(fault) for fault in FAULTS}
