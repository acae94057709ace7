"""Environment variables that should not be set, or not to that value.

Most verdicts are data in `topoplan/catalog/environment_variables.json`, each with its source. This module has the few
that depend on more than name and value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.catalog.fabrics import profile_of
from topoplan.reading.edits import goes_on, line_text, rewritten
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.launch_facts import nodes_of
from topoplan.reading.rules import Rule, read_rules
from topoplan.reading.setup import Setup, Variable
from topoplan.reading.words import is_open
from topoplan.specs.secrets import is_secret

RULES = read_rules(__package__, "environment.toml")

_READS = "environment variables that scripts set"
_PLACEHOLDER = re.compile(
    r"<.*>|\[.*\]|\{.*\}|[xX*.]{3,}.*|(?:your|my|the)[-_ ].*|.*(?:_here|\.\.\.|[xX*]{4,})|[^\x00-\x7f]+"
)
_OWN_SCRIPT = "# Written by topoplan"
_ADDRESS = re.compile(r"\d+(?:\.\d+){3}$")
_OF_A_CARD = re.compile(r"(?:mlx[45]|bnxt_re|irdma|hfi1|qedr|rocep\d)")
_OF_AN_INTERFACE = re.compile(r"(?:eth|ens|enp|eno|bond|ib|team)\d\w*")
_INDEXED = re.compile(r".*_[a-z]*[1-9]")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of the environment variables that are set."""
    counts = [launch.options["nnodes"].value for launch in setup.launches if "nnodes" in launch.options]
    counts += [one.value for one in setup.variables if one.name == "NNODES"]
    nodes = max([*map(_number, counts), *(nodes_of(launch) or 0 for launch in setup.launches)], default=0)
    vendors = profile_of({variable.name for variable in setup.variables})
    for variable in setup.variables:
        yield from _secret(variable)
        if variable.name in vendors:
            continue  # the fabric's plugin stops the run if the value differs
        yield from _from_catalog(variable)
        if variable.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield from _no_interface(variable)
        if variable.name == "NCCL_SOCKET_IFNAME":
            yield from _socket_interface(variable, several_nodes=nodes > 1)
        elif variable.name == "NCCL_IB_HCA":
            yield from _hca(variable)
        elif variable.name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            yield from _allocator(variable)


def removal(variable: Variable) -> tuple[Edit, ...]:
    """Return an edit that deletes a variable's line, if nothing else is set there and no command continues into it."""
    line = line_text(variable)
    if goes_on(variable.part, variable.line) and not line.rstrip().endswith("\\"):
        return ()
    alone = re.fullmatch(
        rf"\s*(?:export\s+)?{re.escape(variable.name)}=(?:[^\s'\"`$;&|]*|'[^']*'|\"[^\"`$]*\")\s*(?:\\|#.*|;)?\s*", line
    )
    if alone is None:
        return ()
    return (Edit(first_line=variable.line, last_line=variable.line, text=""),)


def new_value(variable: Variable, value: str) -> tuple[Edit, ...]:
    """Return an edit that sets a variable to another value."""
    name = re.escape(variable.name)
    return rewritten(variable, rf"\b{name}=(?:'[^']*'|\"[^\"]*\"|[^\s'\"`;&|]*)", f"{variable.name}={value}")


@cache
def _catalog() -> Mapping[str, Any]:
    text = files("topoplan.catalog").joinpath("environment_variables.json").read_text(encoding="utf-8")
    catalog: Mapping[str, Any] = json.loads(text)
    return catalog


def rule_of(case: Mapping[str, Any]) -> Rule:
    """Return one case of the catalog as a rule."""
    return Rule(
        id=case["rule"],
        level=case["severity"],
        reads=_READS,
        what=case["what"],
        why=case["why"],
        remedy=case["remedy"],
        source=case["source"],
    )


def rules_of_catalog() -> Iterator[Rule]:
    """Yield all cases of the catalog as rules."""
    catalog = _catalog()
    for cases in catalog["variables"].values():
        yield from map(rule_of, cases)
    yield from map(rule_of, [*catalog["kinds"], catalog["debugging"]])


def known_names() -> frozenset[str]:
    """Return the variables that the catalog has cases for."""
    return frozenset(_catalog()["variables"])


def _shown(variable: Variable) -> str:
    """Return the value for display in a message."""
    return variable.value if variable.value.isprintable() and len(variable.value) <= 60 else "..."


def _case(variable: Variable) -> Mapping[str, Any] | None:
    catalog = _catalog()
    kind: Mapping[str, Any]
    for kind in catalog["kinds"]:
        if variable.name in kind["names"] and not re.fullmatch(kind["takes"], variable.value):
            return kind
    cases: list[Mapping[str, Any]] = catalog["variables"].get(variable.name, [])
    for case in cases:
        if "values" in case:
            fits = variable.value in case["values"]
        elif "pattern" in case:
            fits = re.fullmatch(case["pattern"], variable.value) is not None
        else:
            fits = True
        if fits:
            return case
    if variable.name in catalog["debugging"]["names"]:
        general: Mapping[str, Any] = catalog["debugging"]
        return general
    return None


def _from_catalog(variable: Variable) -> Iterator[Finding]:
    case = None if is_open(variable.value) or not variable.value else _case(variable)
    if case is None:
        return
    if variable.name == "NCCL_IB_DISABLE" and _OWN_SCRIPT in variable.part.text[:1000]:
        return  # topoplan wrote it because the cluster spec says that the fabric has no RDMA
    fix = case.get("fix")
    edits = removal(variable) if fix == "remove" else new_value(variable, fix) if fix else ()
    yield _found(rule_of(case), variable, edits=edits)


def _found(rule: Rule, variable: Variable, **said: Any) -> Finding:
    return rule.found(variable.part, variable.line, name=variable.name, value=_shown(variable), **said)


def _secret(variable: Variable) -> Iterator[Finding]:
    value = variable.value
    if is_open(value) or variable.assumed or not is_secret(variable.name, value):
        return
    if len(value) >= 8 and not _PLACEHOLDER.fullmatch(value):
        yield _found(RULES["env-secret"], variable)


def _names(variable: Variable) -> list[str]:
    """Return the device names in a list, without the prefixes `=` and `^`."""
    return [] if is_open(variable.value) else re.findall(r"[^,=^:]+", variable.value)


def _no_interface(variable: Variable) -> Iterator[Finding]:
    if variable.value.startswith("^"):
        return
    for rule, pattern in (("env-interface-of-a-card", _OF_A_CARD), ("env-interface-by-address", _ADDRESS)):
        name = next((one for one in _names(variable) if pattern.match(one)), None)
        if name is not None:
            yield _found(RULES[rule], variable, given=name)


def _socket_interface(variable: Variable, *, several_nodes: bool) -> Iterator[Finding]:
    value = _shown(variable)
    if is_open(value) or not value:
        return
    names = value.split(",")
    if several_nodes and value.lstrip("=") in ("lo", "docker0"):
        yield _found(RULES["env-nccl-socket-interface"], variable)
    elif not value.startswith(("=", "^")) and all(
        re.search(r"\d$", name) and not _ADDRESS.match(name) for name in names
    ):
        yield _found(RULES["env-nccl-socket-prefix"], variable, first=names[0])


def _hca(variable: Variable) -> Iterator[Finding]:
    interface = next((name for name in _names(variable) if _OF_AN_INTERFACE.fullmatch(name)), None)
    if interface is not None and not variable.value.startswith("^"):
        yield _found(RULES["env-card-of-an-interface"], variable, interface=interface)
        return
    value = _shown(variable)
    if is_open(value) or value.startswith(("=", "^")):
        return
    names = [name.partition(":")[0] for name in value.split(",")]
    trap = next((name for name in names if _INDEXED.fullmatch(name)), None)
    if trap is not None:
        yield _found(RULES["env-nccl-hca-prefix"], variable, bare=trap)


def _allocator(variable: Variable) -> Iterator[Finding]:
    value, better = variable.value, "expandable_segments:True"
    if not is_open(value) and "max_split_size_mb" in value and better not in value:
        yield _found(RULES["env-allocator-split"], variable)


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
