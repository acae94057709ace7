"""A cluster's graph as JSON (`topoplan.topology/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.network.topology import Wiring, cluster_graph, local_ranks
from topoplan.planner.communication import GroupLinks, StepFlow
from topoplan.planner.view import cluster_to_dict, rounded
from topoplan.report.dump import picked
from topoplan.specs.cluster import Cluster

SCHEMA = "topoplan.topology/1"


def topology_to_dict(
    cluster: Cluster, layout: Layout | None, rows: Sequence[GroupLinks], flows: Sequence[StepFlow] = ()
) -> dict[str, Any]:
    """Return the graph of the first node, the count of each part in the whole cluster, and a layout's groups.

    Rates are bytes per second, one way; a link has one entry for both directions.
    """
    wiring, graph = Wiring(cluster), cluster_graph(cluster, [0])
    times: dict[str, int] = {
        "nvswitch": -(-cluster.world_size // local_ranks(cluster)),
        "leaf": wiring.leaf_units,
        "spine": 1,
    }
    position = {vertex: number for number, vertex in enumerate(graph.vertices)}
    view: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": cluster_to_dict(cluster),
        "nodes": [
            {"id": vertex, "kind": kind, "count": times.get(kind, cluster.nodes)}
            for vertex, kind in graph.vertices.items()
        ],
        "links": [
            {
                "ends": [one, other],
                **picked(link, "kind rate_bytes_per_s latency_s"),
                "count": wiring.leaf_units if link.kind == "uplink" else cluster.nodes,
            }
            for one in graph.vertices
            for other, link in graph.links[one].items()
            if position[one] < position[other]
        ],
    }
    if layout is not None:
        keys = engine_of(layout.backend).group_keys(layout)
        view["layout"] = {key: getattr(layout, key) for key in keys}
        view["groups"] = [_group_to_dict(row) for row in rows]
        if flows:
            view["step"] = [_step_to_dict(one) for one in flows]
    return view


def _step_to_dict(one: StepFlow) -> dict[str, Any]:
    return {
        **picked(one, "name=flow.name group kind=flow.call.kind moment=flow.moment times=flow.times calls=flow.calls"),
        "member_bytes": rounded(one.member_bytes),
        "links": [{"kind": kind, "bytes": rounded(size)} for kind, size in one.link_bytes.items()],
        "step_s": rounded(one.flow.step_s),
    }


def _group_to_dict(row: GroupLinks) -> dict[str, Any]:
    return {
        **picked(row, "name pattern size=shape.size stride=shape.stride groups first worst domains"),
        "links": [picked(one, "kind rate_bytes_per_s flows=messages load member_bytes_per_s") for one in row.links],
        **picked(row, "tightest=tightest.kind member_bytes_per_s"),
    }
