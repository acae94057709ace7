"""A cluster and its groups: in vendors' words and units, drawn in characters, as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.catalog.fabrics import fabric_name
from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.network.topology import (
    LinkKind,
    Wiring,
    cluster_graph,
    gpu_link_bytes_per_s,
    local_ranks,
    nic_slot_bytes_per_s,
    socket_bytes_per_s,
    uplink_bytes_per_s,
)
from topoplan.planner.communication import GroupLinks, StepFlow
from topoplan.planner.view import cluster_to_dict, rounded
from topoplan.report.dump import picked
from topoplan.report.tables import heading, paragraph, table_of
from topoplan.report.text import counted, layout_label, significant
from topoplan.report.time import MOMENTS
from topoplan.specs.cluster import Cluster
from topoplan.units import format_bit_rate, format_byte_rate, format_seconds

LINKS: dict[LinkKind, str] = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "bridge": "PCIe to CPU",
    "socket": "CPU to CPU",
    "nic": "NIC",
    "uplink": "uplink",
}


def rate_words(kind: LinkKind, rate_bytes_per_s: float) -> str:
    """Format a link's rate: NVLink as both directions together, networks in bits, the rest in bytes one way."""
    if kind == "nvlink":
        return format_byte_rate(2 * rate_bytes_per_s)
    return (format_bit_rate if kind in ("nic", "uplink") else format_byte_rate)(rate_bytes_per_s)


def numbers(values: Iterable[int]) -> str:
    """Return `0`, `0-3`, or `0, 2` if the numbers are not consecutive."""
    found = list(values)
    if len(found) > 1 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ", ".join(map(str, found))


def domain_nodes(cluster: Cluster) -> int:
    """Return the number of nodes joined by one NVSwitch domain; 0 without NVLink."""
    return max(1, local_ranks(cluster) // cluster.gpus_per_node) if cluster.nvlink_bytes_per_s else 0


def title(cluster: Cluster) -> str:
    """Return `h100-4x8: 4 nodes x 8 h100-sxm-80gb, 32 GPUs`."""
    machines = f"{counted(cluster.nodes, 'node')} x {cluster.gpus_per_node} {cluster.gpu.name}"
    return f"{cluster.name}: {machines}, {counted(cluster.world_size, 'GPU')}"


def nvlink_words(cluster: Cluster) -> str:
    """Describe the NVLink connection of the GPUs; empty without NVLink."""
    nodes = domain_nodes(cluster)
    if not nodes:
        return ""
    reach = f", over {nodes:,} nodes" if nodes > 1 else ""
    return f"NVSwitch, {rate_words('nvlink', cluster.nvlink_bytes_per_s)} per GPU{reach}"


def sockets_words(cluster: Cluster) -> str:
    """Describe the CPU sockets, their PCIe switches and the links between them."""
    wiring = Wiring(cluster)
    by_socket = groupby(range(wiring.switches), key=wiring.socket_of_switch)
    words = [f"CPU {socket} (PCIe {numbers(switches)})" for socket, switches in by_socket]
    words.append(f"{format_byte_rate(cluster.pcie_bytes_per_s)} a switch")
    if wiring.sockets > 1:
        words.append(f"{format_byte_rate(socket_bytes_per_s(cluster))} between sockets")
    return ", ".join(words)


def leaves_words(cluster: Cluster) -> str:
    """Describe the leaf switches: how many, and the nodes on each."""
    wiring = Wiring(cluster)
    if wiring.leaf_units == 1 and not cluster.fabric.nodes_per_leaf:
        # The spec does not describe the switches, so all that is known is that no pair of nodes is slower.
        rails = f"{wiring.planes} rails, each" if wiring.planes > 1 else "one network,"
        return f"{rails} non-blocking for all nodes"
    count = wiring.leaf_units * wiring.planes
    on_each = min(wiring.nodes_per_leaf, cluster.nodes)
    each = "all nodes" if wiring.leaf_units == 1 else counted(on_each, "node")
    rails = f", {wiring.planes} rails" if wiring.planes > 1 else ""
    return f"{counted(count, 'leaf switch', 'leaf switches')}{rails}, {each} on {'it' if count == 1 else 'each'}"


def spine_words(cluster: Cluster) -> str:
    """Describe the spine and its uplinks; empty if there is only one leaf."""
    wiring = Wiring(cluster)
    if wiring.leaf_units == wiring.planes == 1:
        return ""
    ratio = f"{cluster.fabric.oversubscription:g}:1"
    blocking = "non-blocking" if cluster.fabric.oversubscription == 1 else f"{ratio} oversubscribed"
    return f"spine, {format_bit_rate(uplink_bytes_per_s(cluster))} a leaf, {blocking}"


def fabric_words(cluster: Cluster) -> str:
    """Describe the network's kind, rate and latency."""
    fabric = cluster.fabric
    nics = f"{cluster.nics_per_node} x {format_bit_rate(cluster.nic_bytes_per_s)} per node"
    return f"{fabric_name(fabric.kind)}, {nics}, {format_seconds(fabric.latency_s)} from NIC to NIC"


NAMES = {"dp_cp": "dp x cp"}
"""Display names of groups whose identifiers are not words."""
_PATTERNS = {"ring": "ring", "neighbour": "to the next", "all-to-all": "all to all", "tree": "tree"}

_MEANINGS = {
    "ulysses": "ranks that share a sequence",
    "cp": "ranks that share a sequence",
    "shards": "ranks that divide the states of the model between them",
    "replicas": "ranks that hold the same states and add up their gradients",
}


def print_groups(console: Console, layout: Layout, rows: Sequence[GroupLinks]) -> None:
    """Print one row per kind of group, for its worst-placed group."""
    words = layout_words(layout)
    console.print()
    if not rows:
        paragraph(console, f"Communication groups of {words}: none has more than one member.", style="bold")
        return
    paragraph(console, f"Communication groups of {words}", style="bold")
    table = table_of("group", right=("size", "groups"), last=("first", "worst placed", "links", "tightest"))
    for header in ("flows\non it", "GB/s\na GPU"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            NAMES.get(row.name, row.name),
            f"{row.shape.size:,}",
            f"{row.groups:,}",
            members(row.first),
            "the same" if row.worst == row.first else members(row.worst),
            ", ".join(dict.fromkeys(LINKS[one.kind] for one in row.links)),
            _tightest(row),
            f"{row.tightest.messages:,}",
            f"{row.member_bytes_per_s / 1e9:.4g}",
        )
    console.print(table)
    patterns = "; ".join(f"{NAMES.get(row.name, row.name)}: {_PATTERNS[row.pattern]}" for row in rows)
    paragraph(
        console,
        f"Traffic: {patterns}. All groups of a kind are active at the same moment and share the links. GB/s is what a"
        " member sends, with what NCCL reaches of the links.",
        style="dim",
    )
    if "backend" in engine_of(layout.backend).group_keys(layout):
        paragraph(console, "; ".join(f"{row.name}: {_MEANINGS[row.name]}" for row in rows) + ".", style="dim")


def group_words(row: GroupLinks, flows: Sequence[StepFlow]) -> str:
    """Describe a kind of group: `tp: 8 groups of 4, tightest NVLink 450 GB/s; a GPU sends 12.3 GB in a step`."""
    groups = "1 group" if row.groups == 1 else f"{row.groups:,} groups"
    sent = sum(one.member_bytes for one in flows if one.group == row.name)
    sends = f"; a GPU sends {_gb(sent)} GB in a step" if sent else ""
    return f"{NAMES.get(row.name, row.name)}: {groups} of {row.shape.size:,}, tightest {_tightest(row)}{sends}"


def _tightest(row: GroupLinks) -> str:
    link = row.tightest
    return f"{LINKS[link.kind]} {rate_words(link.kind, link.rate_bytes_per_s)}"


def layout_words(layout: Layout) -> str:
    """Return the parts of a layout that determine its groups: `tp4 pp2 dp4`, or `fsdp2 hybrid ulysses2 dp8`."""
    keys = engine_of(layout.backend).group_keys(layout)
    if "backend" in keys:
        return layout_label(layout).partition(" mbs")[0]
    degrees = {key: getattr(layout, key) for key in keys}
    return " ".join(f"{key}{value}" for key, value in degrees.items() if value > 1 or key in ("tp", "pp", "dp"))


_TIMES = {"layers": " of {} micro batches"}
"""How often a moment occurs, if its name does not say of what."""


def print_step_flows(console: Console, flows: Sequence[StepFlow]) -> None:
    """Print what a GPU sends in a step, and the resulting load on the busiest link of each kind."""
    if not flows:
        return
    heading(console, "Bytes of a step, GB")
    kinds = list(dict.fromkeys(kind for flow in flows for kind in flow.link_bytes))
    right = ("a GPU\nsends", *(f"busiest\n{LINKS[kind]}" for kind in kinds))
    table = table_of("what", "group", "kind", "in", right=right)
    for one in flows:
        times = _TIMES.get(one.flow.moment, " x {}").format(one.flow.times) if one.flow.times > 1 else ""
        table.add_row(
            one.flow.name,
            NAMES.get(one.group, one.group),
            one.flow.call.kind,
            f"{MOMENTS[one.flow.moment]}{times}",
            _gb(one.member_bytes),
            *(_gb(one.link_bytes.get(kind, 0.0)) for kind in kinds),
        )
    if len(flows) > 1:
        sent = sum(one.member_bytes for one in flows)
        on_links = (sum(one.link_bytes.get(kind, 0.0) for one in flows) for kind in kinds)
        table.add_row("together", "", "", "", _gb(sent), *map(_gb, on_links), style="bold")
    console.print(table)
    words = "Busiest: the most loaded link of its kind, one way, all groups together."
    if any(one.group == "embd" for one in flows):
        words += " embd: the stages that hold the tied embedding."
    paragraph(console, words, style="dim")


def _gb(size_bytes: float) -> str:
    return significant(size_bytes / 1e9) if size_bytes else "-"


def members(ranks: Sequence[int]) -> str:
    """Format evenly spaced ranks as `0-7` or `0, 8, .. 24`."""
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3:
        return f"{ranks[0]}, {ranks[1]}, .. {ranks[-1]}"
    return ", ".join(map(str, ranks))


_ASCII = str.maketrans("╭╮╰╯─│┴└┘", "++++-|+++")
_FRAME = 4
"""Width of a node's border and padding, both sides together."""
_GUTTER = 9
"""Width of the link rates at the left."""
_COLUMN = 14
"""Width of a PCIe switch with its devices."""


def print_topology(console: Console, cluster: Cluster) -> None:
    """Print the title, the network, one node, and a line on what the drawing cannot show."""
    paragraph(console, f"{title(cluster)}.", style="bold")
    console.print()
    for line in _lines(cluster, console.width):
        console.print(Text(line.translate(_ASCII) if console.options.ascii_only else line), soft_wrap=True)
    console.print()
    nvlink = ", that of NVLink both ways together as vendors quote it" if domain_nodes(cluster) else ""
    paragraph(console, f"{sockets_words(cluster)}. Rates are each way{nvlink}.", style="dim")


def _lines(cluster: Cluster, width: int) -> Iterator[str]:
    switches = range(Wiring(cluster).switches)
    fitting = max(1, (width - _FRAME - _GUTTER) // _COLUMN)
    inner = max(_GUTTER + _COLUMN * min(fitting, max(2, len(switches))), len(nvlink_words(cluster)))
    if cluster.nodes > 1:
        for words in (spine_words(cluster), leaves_words(cluster), fabric_words(cluster)):
            if words:
                yield _centred(words, inner + _FRAME)
                yield _centred("│", inner + _FRAME)
    name = " the node " if cluster.nodes == 1 else f" one of {cluster.nodes:,} nodes "
    border = "─" + name + "─" * (inner + 1 - len(name))
    if cluster.nodes > 1:
        middle = (inner + _FRAME) // 2 - 1
        border = f"{border[:middle]}┴{border[middle + 1 :]}"
    yield f"╭{border}╮"
    for start in switches[::fitting]:
        for line in _row(cluster, switches[start : start + fitting]):
            yield f"│ {line.ljust(inner)} │"
    if nvlink := nvlink_words(cluster):
        yield f"│ {_centred(nvlink, inner).ljust(inner)} │"
    yield f"╰{'─' * (inner + 2)}╯"


def _row(cluster: Cluster, switches: Sequence[int]) -> Iterator[str]:
    wiring = Wiring(cluster)
    nics = [numbers(wiring.nics_on(switch)) for switch in switches]
    if any(nics):
        yield _cells([f"NIC {held}" if held else "" for held in nics], format_bit_rate(cluster.nic_bytes_per_s))
        yield _cells(["│" if held else "" for held in nics], format_byte_rate(nic_slot_bytes_per_s(cluster)))
    yield _cells([f"PCIe {switch}" for switch in switches])
    yield _cells(["│"] * len(switches), format_byte_rate(gpu_link_bytes_per_s(cluster)))
    yield _cells([f"GPU {numbers(wiring.gpus_on(switch))}" for switch in switches])
    if wiring.has_nvlink:
        yield _bus(len(switches))


def _bus(count: int) -> str:
    """Return a line that joins the GPUs of `count` columns from below."""
    middle = " " * (_GUTTER + _COLUMN // 2)
    if count == 1:
        return f"{middle}│"
    line = "─" * (_COLUMN - 1)
    return f"{middle}└{line}{f'┴{line}' * (count - 2)}┘"


def _cells(texts: Sequence[str], rate: str = "") -> str:
    return rate.rjust(_GUTTER) + "".join(_centred(text, _COLUMN).ljust(_COLUMN) for text in texts)


def _centred(text: str, width: int) -> str:
    """Center text in a width, without trailing spaces."""
    return " " * max(0, width // 2 - len(text) // 2) + text


def topology_to_dict(
    cluster: Cluster, layout: Layout | None, rows: Sequence[GroupLinks], flows: Sequence[StepFlow] = ()
) -> dict[str, Any]:
    """Return the graph of the first node, the count of each part in the whole cluster, and a layout's groups. Rates are
    bytes per second, one way; a link has one entry for both directions."""
    wiring, graph = Wiring(cluster), cluster_graph(cluster, [0])
    times: dict[str, int] = {
        "nvswitch": -(-cluster.world_size // local_ranks(cluster)),
        "leaf": wiring.leaf_units,
        "spine": 1,
    }
    position = {vertex: number for number, vertex in enumerate(graph.vertices)}
    view: dict[str, Any] = {
        "schema": "topoplan.topology/1",
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
