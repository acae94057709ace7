"""Checks of NCCL's settings, of what a network needs besides, and for cloud machines that the spec does not know of."""

from __future__ import annotations

from topoplan.bundle.fabric import fabric_needs
from topoplan.catalog.fabrics import daemon_of_kind, fabric_name, machine_of, profile_of
from topoplan.hosts.preflight.fleet import Fleet, Node
from topoplan.hosts.result import Result, failure, ok, skipped, warning
from topoplan.units import named


def cloud(fleet: Fleet, node: Node) -> Result | None:
    """A cloud machine whose network needs a key that the spec lacks: NCCL would use another one, or pair NICs
    wrongly."""
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


_DEBUG_SETTINGS = {
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through host memory",
    "NCCL_SHM_DISABLE": "ranks of a node communicate over the network",
    "NCCL_IB_DISABLE": "no RDMA",
    "NCCL_ALGO": "overrides its choice of algorithm",
    "NCCL_PROTO": "overrides its choice of protocol; LL128 can corrupt data",
    "NCCL_P2P_LEVEL": "decides which GPUs communicate directly",
    "NCCL_NET_GDR_LEVEL": "decides where GPUDirect RDMA is used",
    "NCCL_BUFFSIZE": "changes the size of its buffers",
    "NCCL_NTHREADS": "changes its kernels",
    "NCCL_MIN_NCHANNELS": "changes its kernels",
    "NCCL_MAX_NCHANNELS": "changes its kernels",
    "NCCL_CUMEM_ENABLE": "disables multi-node NVLink if 0",
    "NCCL_LAUNCH_MODE": "changes how its kernels start",
}
"""Settings from the debugging section of NCCL's user guide ("should not be used in production"), with their effects."""
_UNLESS_SET = {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_IB_DISABLE": "0", "NCCL_CUMEM_ENABLE": "1"}
"""Values that change nothing."""


def nccl_settings(fleet: Fleet, node: Node) -> Result:
    """Settings of the session and of NCCL's files that disable good defaults, or that differ between hosts."""
    own = {name: value for name, value in node.facts.nccl_settings.items() if name not in fleet.cluster.env}
    vendors = profile_of(own)
    wrong = [
        f"{name}={value} ({_DEBUG_SETTINGS[name]})"
        for name, value in sorted(own.items())
        if name in _DEBUG_SETTINGS.keys() - vendors
        and value.strip() != _UNLESS_SET.get(name)
        and (name != "NCCL_IB_DISABLE" or fleet.uses_rdma)
    ]
    if wrong:
        return warning(
            named(wrong), "remove it from the session's environment, /etc/nccl.conf and ~/.nccl.conf, or say why in env"
        )
    for name in sorted({name for other in fleet.nodes for name in other.facts.nccl_settings} - set(fleet.cluster.env)):
        if name.endswith("_IFNAME") or name == "NCCL_IB_HCA":
            continue  # names of devices, which may differ

        def setting(one: Node, name: str = name) -> str | None:
            return one.facts.nccl_settings.get(name, "not set")

        if words := fleet.difference(node, setting):
            return warning(f"{name} is {words}", "set the same value on all hosts, or on none")
    shown = [f"{name}={value}" for name, value in sorted(own.items())]
    return ok(named(shown, 6) if shown else "NCCL's defaults")
