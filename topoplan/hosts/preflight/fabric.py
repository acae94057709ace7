"""Checks of what a network needs on hosts besides NCCL, and for cloud machines that the spec does not know of."""

from __future__ import annotations

from topoplan.bundle.fabric import fabric_needs
from topoplan.catalog.fabrics import daemon_of_kind, fabric_name, machine_of
from topoplan.hosts.preflight.fleet import Fleet, Node
from topoplan.hosts.result import Result, failure, ok, skipped, warning


def cloud(fleet: Fleet, node: Node) -> Result | None:
    """A cloud machine whose network needs a key that the spec lacks.

    NCCL would use another network, or pair GPUs and NICs wrongly.
    """
    cluster, facts = fleet.cluster, node.facts
    machine = machine_of(facts.firmware, facts.pci)
    if cluster.nodes == 1 or machine is None:
        return None
    if machine.kind not in (None, cluster.fabric.kind):
        network = fabric_name(machine.kind or cluster.fabric.kind)
        return warning(
            f"is {machine.name}, whose network is {network}, and the spec has {fabric_name(cluster.fabric.kind)}",
            f"write fabric: {{kind: {machine.kind}}} in the spec, and generate again",
        )
    is_given = cluster.fabric.topology_file or "NCCL_TOPO_FILE" in {**cluster.env, **facts.nccl_settings}
    if machine.topology_file and not is_given:
        return warning(
            f"is {machine.name}, which hides which NIC is near which GPU, and nothing names NCCL's topology file",
            f"write fabric: {{topology_file: {machine.topology_file}}} in the spec, and generate again",
        )
    return ok(f"{machine.name}, as in the spec")


def fabric_files(fleet: Fleet, node: Node) -> Result | None:
    """Plugins, profiles and topology files without which the node script stops."""
    needs = [need for need in fabric_needs(fleet.cluster) if all(path.startswith("/") for path in need.paths)]
    if not needs:
        return None
    found, missing = [], []
    for need in needs:
        if need.use == "library" and need.variable in node.facts.nccl_settings:
            continue  # the session names another plugin
        paths = [node.facts.paths[path] for path in need.paths if path in node.facts.paths]
        if not paths:
            return skipped("the host does not report what is there")
        there = [one.path for one in paths if one.exists]
        if there:
            found.append(there[0])
        else:
            missing.append(need)
    if missing:
        return failure("; ".join(need.missing for need in missing), "; ".join(need.remedy for need in missing))
    daemon = daemon_of_kind(fleet.cluster.fabric.kind)
    if daemon is not None and daemon.name not in node.facts.daemons:
        return warning(daemon.missing, daemon.remedy)
    return ok(", ".join(found) or "another plugin")
