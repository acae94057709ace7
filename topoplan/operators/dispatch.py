"""Which of Megatron's dispatchers brings tokens to their experts: alltoall, or flex (DeepEP, HybridEP)."""

from __future__ import annotations

from topoplan.catalog.fabrics import fabric_name
from topoplan.layout.layout import Layout
from topoplan.network.placement import Group, span
from topoplan.network.topology import local_ranks
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster


def flex_obstacle(cluster: Cluster, ep: int, etp: int) -> str | None:
    """Return why the flex dispatcher cannot run on these expert groups, or None.

    Megatron joins EP and ETP in one group for it. Source: MLM `moe/token_dispatcher.py::MoEFlexTokenDispatcher`;
    DeepEP's README (requirements) and `csrc/deep_ep.cpp::Buffer` (a group must lie within one NVLink domain or consist
    of whole domains); Megatron-Bridge `training/flex_dispatcher_backend.py` (Ampere and later).
    """
    ranks, local = etp * ep, local_ranks(cluster)
    if ranks == 1:
        return "flex with ep 1 and etp 1: nothing to exchange"
    if cluster.gpu.architecture == "volta":
        return f"flex on {cluster.gpu.name} (volta): DeepEP starts with Ampere"
    if not cluster.nvlink_bytes_per_s:
        return "flex without NVLink: DeepEP needs it between all GPUs of a node"
    if local % ranks == 0:
        return None
    if ranks % local or local % etp:
        return (
            f"flex with etp {etp} * ep {ep} = {ranks} ranks: neither in an NVLink domain of {local} GPUs nor whole ones"
        )
    if not cluster.fabric.uses_verbs:
        network = fabric_name(cluster.fabric.kind)
        return f"flex with etp {etp} * ep {ep} = {ranks} ranks over {network}: DeepEP needs InfiniBand or RoCE"
    return None


def dispatcher_of(case: Case, layout: Layout) -> str:
    """Return the dispatcher of an expert group: the layout's choice, or else the trainer's default.

    The trainer's default across nodes needs what flex needs; if that is missing, its default within a node is used.
    """
    inside, across = case.traits.dispatcher, case.traits.dispatcher_across_nodes
    if layout.moe_token_dispatcher_type or inside == across:
        return layout.moe_token_dispatcher_type or inside
    group = Group(layout.etp * layout.ep, 1)
    if span(group, case.cluster.gpus_per_node).domains == 1 or flex_obstacle(case.cluster, layout.ep, layout.etp):
        return inside
    return across
