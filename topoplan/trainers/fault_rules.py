"""Rules on known faults of packages that a layout triggers, certain if the files pin an affected version."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.utils import canonicalize_name

from topoplan.catalog.packages import allows, narrowed
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
    """Yield a finding for each fault that a configuration triggers in some version that may be installed.

    A bundle's scripts check at the start that versions are those that its plan requires; a layout that was edited since
    may meet faults that these versions have.
    """
    part, bundle = configuration.part, setup.bundle_of(configuration)
    for fault in faults_of_keys(spec, layout, configuration.source.data):
        in_block = configuration.line("additional_configs", next(iter(fault.keys)))
        yield RULES[fault.name].found(part, key_line(configuration, tuple(fault.keys)) or in_block)
    pins = {pin.package: pin for pin in setup.pins}
    of_deepspeed = [one.source.data for one in setup.of("deepspeed")]
    for fault in FAULTS:
        is_spared = bool(fault.spared_by) and any(at(data, fault.spared_by) for data in of_deepspeed)
        if fault.keys or not fault.is_triggered(spec, layout, {}) or is_spared:
            continue
        name, line = canonicalize_name(fault.package), key_line(configuration, _KEYS[fault.layout_key])
        pin, stated = pins.get(name), setup.versions.get(name)
        level: Severity = "error" if fault.level == "stops" else "warning"
        if pin is not None:
            if allows(fault.versions, pin.version):
                what = f"{fault.package} {pin.version} is installed here ({fault.when}): {fault.text}"
                yield RULES[fault.name].found(pin.part, pin.line, level=level, what=what)
        elif bundle is not None and not _is_let_through(fault, setup.required.get(bundle, {}).get(name)):
            continue
        elif stated is None or not fault.versions:
            yield RULES[fault.name].found(part, line)
        elif allows(fault.versions, stated):
            what = f"{fault.package} {stated} is what the hosts have ({fault.when}): {fault.text}"
            yield RULES[fault.name].found(part, line, level=level, what=what)


def _is_let_through(fault: Fault, required: str | None) -> bool:
    """Whether a bundle that requires these versions starts with one whose fault would stop its run."""
    if required is None or fault.level != "stops" or not fault.cure:
        return False
    return narrowed((required, fault.cure)) != narrowed((required,))


def _rule_of(fault: Fault) -> Rule:
    """Return a fault as a rule; its level is that for an unknown version."""
    install = f"install '{fault.package}{fault.cure}'" if fault.cure else ""
    level: Severity = "error" if fault.keys else "warning" if fault.level == "stops" else "note"
    return Rule(
        id=f"fault-{fault.name}",
        level=level,
        reads="layouts, and the versions that the spec, `pip install`, lock files or a bundle's scripts name",
        what=f"{fault.when}: {fault.text}".replace("{", "{{").replace("}", "}}"),
        why=fault.source,
        remedy=", or ".join(filter(None, (install, fault.remedy))),
    )


RULES = {fault.name: _rule_of(fault) for fault in FAULTS}
