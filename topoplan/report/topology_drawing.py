"""Draw a cluster as SVG: every node of a small cluster, or one node that represents all nodes of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise

from topoplan.layout.layout import Layout
from topoplan.network.topology import Wiring, gpu_link_bytes_per_s, socket_bytes_per_s
from topoplan.planner.communication import GroupLinks, StepFlow
from topoplan.report.topology import (
    NAMES,
    domain_nodes,
    fabric_words,
    group_words,
    layout_words,
    leaves_words,
    nvlink_words,
    rate_words,
    sockets_words,
    spine_words,
    title,
)
from topoplan.specs.cluster import Cluster
from topoplan.units import format_byte_rate

MARK = "<!-- drawn by topoplan topology -->"
"""Marker at the top of every drawing; a file without it is not overwritten."""

_MOST_NODES = 4
"""Above this number of nodes, only one is drawn."""

# Sizes in pixels, from the top of a node's card to its bottom.
_PART, _PART_HEIGHT, _GAP = 38, 22, 6
_PADDING, _WIRE = 12, 26
_MARGIN = 46
"""Space left of the first PCIe switch of each socket, for its name and rates; also used between sockets."""
_BETWEEN_SOCKETS = 48
_BETWEEN_NODES = 24
_BAR = 24
_FAN = 64
"""Height of the wires between NICs and leaf switches."""
_LINE = 17
_LETTER, _TITLE_LETTER = 6.6, 8.6
"""Average width of a 12-pixel letter and of a bold 14-pixel letter."""

_INK, _MUTED, _PAPER = "#1f2933", "#52606d", "#ffffff"
_COLOURS = {
    "gpu": ("#d7f0dd", "#2f855a"),
    "nvswitch": ("#bfe6c9", "#2f855a"),
    "pcie": ("#e4e7eb", "#7b8794"),
    "socket": ("#f5f7fa", "#cbd2d9"),
    "nic": ("#dbeafe", "#2b6cb0"),
    "leaf": ("#cfe0fb", "#2b6cb0"),
    "spine": ("#fde8c8", "#b7791f"),
    "node": ("#ffffff", "#9aa5b1"),
}
_RAILS = ("#2b6cb0", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#0987a0", "#97266d", "#4a5568")
"""One color per rail, repeating after eight."""


class _Drawing:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.wiring = cluster, Wiring(cluster)
        self.shapes: list[str] = []
        self.columns: list[tuple[float, float]] = []
        """Left edge (within a node's card) and width of each PCIe switch."""
        self.nics: dict[int, float] = {}
        """Center of each NIC within a node's card."""
        self.gpus: dict[int, float] = {}
        """Center of each GPU within a node's card."""
        self.width = self._place_parts()
        """Width of a node's card."""

    def _place_parts(self) -> float:
        x: float = _PADDING - _BETWEEN_SOCKETS
        for _, switches in groupby(range(self.wiring.switches), key=self.wiring.socket_of_switch):
            x += _MARGIN + _BETWEEN_SOCKETS
            for switch in switches:
                gpus, nics = self.wiring.gpus_on(switch), self.wiring.nics_on(switch)
                width = max(len(gpus), len(nics), 2) * (_PART + _GAP)
                self.columns.append((x, width))
                for held, places in ((nics, self.nics), (gpus, self.gpus)):
                    step = width / max(1, len(held))
                    places.update({one: x + (place + 0.5) * step for place, one in enumerate(held)})
                x += width + _GAP
        return x - _GAP + _PADDING

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "", radius: int = 4) -> None:
        fill, stroke = _COLOURS[kind]
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}"'
            f' stroke="{stroke}"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4, label, anchor="middle")

    def wire(self, x1: float, y1: float, x2: float, y2: float, colour: str = _MUTED, width: float = 1.2) -> None:
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, colour: str = _INK
    ) -> None:
        weight = ' font-weight="bold"' if size > 12 else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def rate(self, x: float, y: float, words: str, *, anchor: str = "start") -> None:
        """Write a link's rate in small letters."""
        self.text(x, y, words, anchor=anchor, size=10, colour=_MUTED)

    def document(self, width: float, height: float) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
            f' height="{height:g}" font-family="Helvetica, Arial, sans-serif">'
        )
        paper = f'<rect width="{width:g}" height="{height:g}" fill="{_PAPER}"/>'
        return "\n".join((MARK, head, paper, *self.shapes, "</svg>\n"))

    def network(self, nodes: dict[int, float], y: float) -> float:
        """Draw the spine, leaves and wires above nodes with the given left edges. Return the top of the nodes."""
        spine = spine_words(self.cluster)
        leaf_y = y + (_BAR + _WIRE if spine else 0)
        nodes_y = leaf_y + _BAR + _FAN
        first, last = min(nodes.values()), max(nodes.values()) + self.width
        self.rate(first + _PADDING, nodes_y - 8, rate_words("nic", self.cluster.nic_bytes_per_s))
        if spine:
            width = max(last - first, _LETTER * len(spine) + 16)
            self.box((first + last - width) / 2, y, width, _BAR, "spine", spine)
        for unit, group in groupby(nodes, key=self.wiring.leaf_of):
            starts = [nodes[node] for node in group]
            step = (starts[-1] + self.width - starts[0]) / self.wiring.planes
            for plane in range(self.wiring.planes):
                left = starts[0] + plane * step
                middle = starts[0] + (plane + 0.5) * step
                if spine:
                    self.wire(middle, y + _BAR, middle, leaf_y, _COLOURS["spine"][1])
                # Each NIC on a rail has its own position on the leaf, in node order.
                nics = [x + at for x in starts for nic, at in self.nics.items() if self.wiring.plane_of(nic) == plane]
                for place, x in enumerate(nics):
                    at = x if self.wiring.planes == 1 else middle + ((place + 0.5) / len(nics) - 0.5) * step * 0.7
                    self.wire(at, leaf_y + _BAR, x, nodes_y, _RAILS[plane % len(_RAILS)])
                self.box(left + 2, leaf_y, step - 4, _BAR, "leaf", self._leaf_label(unit, plane, step - 8))
        return nodes_y

    def _leaf_label(self, unit: int, plane: int, width: float) -> str:
        """Return the longest name of a leaf that fits the width."""
        unit_words = f" {unit}" if self.wiring.leaf_units > 1 else ""
        if self.wiring.planes == 1:
            return f"leaf switch{unit_words}" if self.cluster.fabric.nodes_per_leaf else "non-blocking network"
        names = (f"leaf{unit_words} rail {plane}", f"rail {plane}", str(plane))
        return next((words for words in names if _LETTER * len(words) < width), "")

    def node(self, x: float, y: float, name: Sequence[str], *, stacked: bool) -> float:
        """Draw the card of one node, with its name in lines at the left. Return the card's bottom."""
        nvlink_inside = domain_nodes(self.cluster) == 1
        nic_y = y + 14
        switch_y = nic_y + (_PART_HEIGHT + _WIRE if self.nics else 18)
        gpu_y = switch_y + _PART_HEIGHT + _GAP + _WIRE
        bar_y = gpu_y + _PART_HEIGHT + 14
        bottom = bar_y + _BAR + _PADDING if nvlink_inside else gpu_y + _PART_HEIGHT + _PADDING
        for shift in (8, 4, 0) if stacked else (0,):
            self.box(x + shift, y + shift, self.width, bottom - y, "node", radius=8)
        for line, words in enumerate(name):
            self.text(x + _PADDING, y + 20 + 13 * line, words)
        self._sockets(x, switch_y)
        self.rate(x + _PADDING, gpu_y - _WIRE / 2 + 6, format_byte_rate(gpu_link_bytes_per_s(self.cluster)))
        for switch, (column, width) in enumerate(self.columns):
            for nic in self.wiring.nics_on(switch):
                at = x + self.nics[nic]
                self.wire(at, y, at, nic_y, _RAILS[self.wiring.plane_of(nic) % len(_RAILS)])
                self.wire(at, nic_y + _PART_HEIGHT, at, switch_y)
                self.box(at - _PART / 2, nic_y, _PART, _PART_HEIGHT, "nic", f"NIC {nic}" if nic < 10 else str(nic))
            for gpu in self.wiring.gpus_on(switch):
                at = x + self.gpus[gpu]
                self.wire(at, switch_y + _PART_HEIGHT, at, gpu_y)
                if nvlink_inside:
                    self.wire(at, gpu_y + _PART_HEIGHT, at, bar_y, _COLOURS["nvswitch"][1], 2)
                self.box(at - _PART / 2, gpu_y, _PART, _PART_HEIGHT, "gpu", f"GPU {gpu}" if gpu < 10 else str(gpu))
            self.box(x + column + 2, switch_y, width - 4, _PART_HEIGHT, "pcie", f"PCIe {switch}")
        if nvlink_inside:
            self._nvswitch(x + _PADDING, bar_y, self.width - 2 * _PADDING)
        return bottom

    def _sockets(self, x: float, switch_y: float) -> None:
        """Draw the CPU sockets as areas around their PCIe switches, and the links between the sockets."""
        fields = []
        for _, group in groupby(range(self.wiring.switches), key=self.wiring.socket_of_switch):
            columns = [self.columns[switch] for switch in group]
            fields.append((x + columns[0][0] - _MARGIN, x + sum(columns[-1])))
        middle = switch_y + _PART_HEIGHT / 2
        for (_, end), (start, _) in pairwise(fields):
            self.wire(end, middle, start, middle, _INK, 2)
            words = format_byte_rate(socket_bytes_per_s(self.cluster))
            self.rate((start + end) / 2, middle - 6, words, anchor="middle")
        for socket, (start, end) in enumerate(fields):
            self.box(start, switch_y - _GAP, end - start + 4, _PART_HEIGHT + 2 * _GAP, "socket")
            self.text(start + 8, middle + 4, f"CPU {socket}")

    def racks(self, nodes: dict[int, float], y: float) -> float:
        """Draw the NVSwitches of NVLink domains that span nodes, below the nodes. Return their bottom."""
        for x in nodes.values():
            for at in self.gpus.values():
                self.wire(x + at, y - _PADDING, x + at, y + _WIRE, _COLOURS["nvswitch"][1], 2)
        for _, group in groupby(nodes, key=self.wiring.domain_of):
            starts = [nodes[node] for node in group]
            self._nvswitch(starts[0], y + _WIRE, starts[-1] + self.width - starts[0])
        return y + _WIRE + _BAR

    def groups(self, nodes: dict[int, float], rows: Sequence[GroupLinks], y: float) -> float:
        """Draw a row per kind of group, with each GPU's group number below it. Return the bottom of the rows."""
        for row in rows:
            y += _GAP
            for node, x in nodes.items():
                self.rate(x + _PADDING, y + _PART_HEIGHT / 2 + 4, NAMES.get(row.name, row.name))
                for gpu, at in self.gpus.items():
                    number = row.shape.number(node * self.cluster.gpus_per_node + gpu)
                    self._number(x + at, y, number)
            y += _PART_HEIGHT
        return y

    def _number(self, x: float, y: float, number: int) -> None:
        colour = _RAILS[number % len(_RAILS)]
        self.shapes.append(
            f'<rect x="{x - _PART / 2:g}" y="{y:g}" width="{_PART}" height="{_PART_HEIGHT}" rx="4" fill="{colour}"/>'
        )
        self.text(x, y + _PART_HEIGHT / 2 + 4, str(number), anchor="middle", colour=_PAPER)

    def _nvswitch(self, x: float, y: float, width: float) -> None:
        words = nvlink_words(self.cluster)
        if _LETTER * len(words) >= width:
            words = rate_words("nvlink", self.cluster.nvlink_bytes_per_s)
        self.box(x, y, width, _BAR, "nvswitch", words)


def topology_svg(
    cluster: Cluster,
    layout: Layout | None = None,
    rows: Sequence[GroupLinks] = (),
    flows: Sequence[StepFlow] = (),
) -> str:
    """Return a cluster's drawing as SVG text; with a layout, also its groups and their traffic in a step."""
    drawing = _Drawing(cluster)
    stands_for_all = cluster.nodes > _MOST_NODES
    shown = 1 if stands_for_all else cluster.nodes
    stacked = 8 if stands_for_all else 0
    footer = [*_groups_footer(layout, rows, flows, stands_for_all=stands_for_all), *_footer(cluster)]
    least = max(_TITLE_LETTER * len(title(cluster)), *(_LETTER * len(words) for words in footer)) + 2 * _PADDING
    cards_width = shown * (drawing.width + _BETWEEN_NODES) - _BETWEEN_NODES
    width = max(cards_width + stacked + 4 * _PADDING, least)
    left = (width - cards_width - stacked) / 2
    nodes = {node: left + node * (drawing.width + _BETWEEN_NODES) for node in range(shown)}

    drawing.text(_PADDING, 24, title(cluster), size=14)
    y: float = 40
    if cluster.nodes > 1:
        y = drawing.network(nodes, y)
    bottom = y
    for node, x in nodes.items():
        name = ["one of", f"{cluster.nodes:,}", "nodes"] if stands_for_all else [f"node {node}"]
        bottom = drawing.node(x, y, name, stacked=stands_for_all)
    if domain_nodes(cluster) > 1:
        bottom = drawing.racks(nodes, bottom)
    if rows:
        bottom = drawing.groups(nodes, rows, bottom + stacked + _GAP) - stacked
    y = bottom + stacked + 26
    for line, words in enumerate(footer):
        drawing.text(_PADDING, y + line * _LINE, words, size=12, colour=_MUTED)
    return drawing.document(width, y + len(footer) * _LINE)


def _groups_footer(
    layout: Layout | None, rows: Sequence[GroupLinks], flows: Sequence[StepFlow], *, stands_for_all: bool
) -> list[str]:
    if layout is None:
        return []
    if not rows:
        return [f"Groups of {layout_words(layout)}: none has more than one member."]
    shown = ", of node 0" if stands_for_all else ""
    head = f"Groups of {layout_words(layout)}{shown}."
    return [head, "GPUs with the same number are in one group.", *(f"{group_words(row, flows)}." for row in rows)]


def _footer(cluster: Cluster) -> list[str]:
    words = [sockets_words(cluster)]
    if cluster.nodes > 1:
        words = [fabric_words(cluster), leaves_words(cluster), *words]
    nvlink = ", of NVLink both ways together" if cluster.nvlink_bytes_per_s else ""
    return [f"{line[0].upper()}{line[1:]}." for line in (*words, f"rates are each way{nvlink}")]
