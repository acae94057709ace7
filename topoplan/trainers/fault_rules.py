"""Known faults of the packages that a layout meets: certain where a version is named beside the configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from topoplan.catalog.packages import allows
from topoplan.layout.layout import Layout
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part
from topoplan.reading.rules import Rule
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import FAULTS, Fault, faults_of_keys
from topoplan.trainers.layout_keys import key_line
from topoplan.trainers.megatron_keys import CP, EP, ETP, SP, TP, VPP

_INSTALL = re.compile(r"\b(?:pip3?|pip3\.\d+|uv pip)\s+install\s((?:[^\n\\;&|]|\\\n|\\.)*)")
_KEYS = {
    "distributed_optimizer": ("use_distributed_optimizer",),
    "overlap_param_gather": ("overlap_param_gather",),
    "vpp": (VPP,),
    "ep": (EP,),
    "etp": (ETP, TP),
    "tp": (TP,),
    "cp": (CP,),
    "sequence_parallel": (SP, TP),
}
"""Key of a layout -> the trainer keys that decide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    """A version that a command installs."""

    version: str
    part: Part
    line: int


def fault_findings(setup: Setup, configuration: Configuration, spec: Spec, layout: Layout) -> Iterator[Finding]:
    """A finding for each fault that a configuration meets; of versions that nobody names only for files of others, as
    our own bundles look for them when they start."""
    for fault in faults_of_keys(spec, layout, configuration.source.data):
        yield _of_keys(configuration, fault)
    pins = _pins(setup)
    for fault in FAULTS:
        if fault.keys or not fault.met(spec, layout, {}):
            continue
        pin = pins.get(canonicalize_name(fault.package))
        if pin is not None:
            if allows(fault.versions, pin.version):
                yield _of_version(fault, pin)
        elif setup.bundle_of(configuration) is None:
            yield _of_layout(configuration, fault)


def _of_keys(configuration: Configuration, fault: Fault) -> Finding:
    line = key_line(configuration, (*fault.keys, "additional_configs"))
    return RULES[fault.name].found(configuration.part, line)


def _of_version(fault: Fault, pin: _Pin) -> Finding:
    level: Severity = "error" if fault.level == "stops" else "warning"
    what = f"{fault.package} {pin.version} is installed here ({fault.when}): {fault.text}"
    return RULES[fault.name].found(pin.part, pin.line, level=level, what=what)


def _of_layout(configuration: Configuration, fault: Fault) -> Finding:
    return RULES[fault.name].found(configuration.part, key_line(configuration, _KEYS[fault.layout_key]))


def _rule_of(fault: Fault) -> Rule:
    """Its row of known_faults.py as a rule; the level is the one of a version that nobody names."""
    install = f"install '{fault.package}{fault.cure}'" if fault.cure else ""
    level: Severity = "error" if fault.keys else "warning" if fault.level == "stops" else "note"
    return Rule(
        id=f"fault-{fault.name}",
        level=level,
        reads="layouts of the Megatron trainers, and the versions that `pip install` names",
        what=f"{fault.when}: {fault.text}".replace("{", "{{").replace("}", "}}"),
        why=fault.source,
        remedy=", or ".join(filter(None, (install, fault.remedy))),
    )


RULES = {fault.name: _rule_of(fault) for fault in FAULTS}


def _pins(setup: Setup) -> dict[str, _Pin]:
    """Package -> the version that a `pip install` names; the last one counts."""
    found: dict[str, _Pin] = {}
    for part in setup.parts:
        for command in _INSTALL.finditer(part.text) if part.kind == "shell" else ():
            line = part.text.count("\n", 0, command.start()) + 1
            for word in _words(command[1]):
                try:
                    asked = Requirement(word)
                except InvalidRequirement:  # an option, a path or an address
                    continue
                exact = [clause.version for clause in asked.specifier if clause.operator in ("==", "===")]
                if exact:
                    version = exact[0].removesuffix(".*")
                    found[canonicalize_name(asked.name)] = _Pin(version=version, part=part, line=line)
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # a quote that does not end
        return text.split()
