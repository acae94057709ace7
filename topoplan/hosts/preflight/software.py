"""Checks of the trainer's environment: present, complete, of compatible versions, and the same everywhere."""

from __future__ import annotations

from topoplan.catalog.packages import allows, releases
from topoplan.hosts.facts import LIBRARIES
from topoplan.hosts.needs import python_on
from topoplan.hosts.preflight.fleet import Fleet, Node
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.units import named

_SAME = (*LIBRARIES, "python", "cuda")
"""Packages whose versions must agree: with different ones, ranks disagree on shapes, defaults or NCCL's protocol."""


def python(fleet: Fleet, node: Node) -> Result:
    """Row 10: the trainer's Python is elsewhere, or another one comes first in a session without a login shell."""
    wanted = python_on(node.host)
    said = node.facts.versions.get("python")
    if said:
        return ok(f"{node.facts.python or wanted or 'python3'}, {said}")
    why = node.facts.missing.get("versions", "").removeprefix("python: ")
    if not why:
        return node.not_reported("versions")
    reason = "" if why == "not installed" else f": {why}"
    if wanted is None:
        return failure(
            f"no python3 on PATH{reason}", "name the trainer's environment with venv under hosts in the spec"
        )
    return failure(f"no Python at {wanted}{reason}", "put the trainer's environment there, or correct venv in the spec")


def packages(fleet: Fleet, node: Node) -> Result | None:
    """Rows 10 and 11: packages that the trainer imports, in compatible versions."""
    if fleet.needs is None:
        return None
    have = node.facts.versions
    if not have.get("python"):
        return skipped("no Python to ask")
    where = node.facts.python or python_on(node.host) or "python3"
    wanted = fleet.needs.run.requirements
    if lacking := [one for one in wanted if not have.get(one.package.name)]:
        return failure(
            f"{where} lacks {named((one.package.name for one in lacking), 8)}",
            f"pip install {' '.join(one.pip_words for one in lacking)}, or correct venv in the spec",
        )
    for one in wanted:
        if not allows(one.versions, have[one.package.name]):
            return failure(
                f"{where} has {one.package.name} {have[one.package.name]}, and the run wants {one.versions}: {one.why}",
                one.remedy,
            )
    known = next((one for one in releases() if one.version == have.get("llamafactory")), None)
    if known is not None and not allows(known.transformers, have.get("transformers", "")):
        return failure(
            f"LLaMA-Factory {known.version} refuses transformers {have['transformers']}",
            f"pip install 'transformers{known.transformers}'",
        )
    return ok(named((f"{one.package.name} {have[one.package.name]}" for one in wanted), 8))


def versions(fleet: Fleet, node: Node) -> Result | None:
    """Row 11: versions that differ between hosts."""
    if len(fleet.nodes) < 2:
        return None
    if not node.facts.versions:
        return node.not_reported("versions")

    def apart(name: str) -> str:
        return fleet.difference(node, lambda one: one.facts.versions.get(name) or None)

    if found := [f"{name} {words}" for name in _SAME if (words := apart(name))]:
        return failure("; ".join(found), "install the same versions on all hosts")
    if words := apart("driver"):
        return warning(f"driver {words}", "bring all hosts to one version of the driver")
    return ok("the same as on the other hosts")
