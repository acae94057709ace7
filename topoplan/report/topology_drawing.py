"""A cluster as a drawing (SVG): every node of a small cluster, or one node that stands for all of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from topoplan.network.topology import Wiring, gpu_link_bytes_per_s, socket_bytes_per_s
from topoplan.report.topology_words import (
    SwitchView,
    domain_nodes,
    fabric_words,
    leaves_words,
    nvlink_words,
    rate_words,
    sockets_words,
    spine_words,
    switches_of,
    title,
)
from topoplan.specs.cluster import Cluster
from topoplan.units import format_byte_rate

MARK = "<!-- drawn by topoplan topology -->"
"""In the first lines of every drawing, so that no other file is overwritten."""

_MOST_NODES = 4
"""Beyond, one node stands for all."""

# Sizes in pixels, from the top of a node's card to its bottom.
_PART, _PART_HEIGHT, _GAP = 38, 22, 6
_PADDING, _WIRE = 12, 26
_MARGIN = 46
"""Left of the first PCIe switch of each socket: its name and rates; also between sockets."""
_BETWEEN_SOCKETS = 48
_BETWEEN_NODES = 24
_BAR = 24
_FAN = 64
"""Height of the wires between NICs and leaves."""
_LINE = 17
_LETTER, _TITLE_LETTER = 6.6, 8.6
"""Width of a letter of 12 pixels, and of a bold one of 14, on average."""

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
"""One colour a rail, over again after eight."""


@dataclass(slots=True)
class _Canvas:
    """Shapes in the order in which they are painted."""

    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        fill, stroke = _COLOURS[kind]
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{stroke}"/>'
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

    def document(self, width: float, height: float) -> str:
        return "\n".join(
            (
                MARK,
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
                f' height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
                f'<rect width="{width:g}" height="{height:g}" fill="{_PAPER}"/>',
                *self.shapes,
                "</svg>\n",
            )
        )


@dataclass(frozen=True, slots=True)
class _Card:
    """Where the parts of one node are, from the left edge of its card."""

    width: float
    columns: tuple[tuple[SwitchView, float, float], ...]
    """A switch, its left edge and its width."""
    nics: dict[int, float]
    """Middle of each NIC."""
    gpus: dict[int, float]
    """Middle of each GPU."""


def _card(cluster: Cluster) -> _Card:
    views = switches_of(cluster)
    x: float = _PADDING
    columns: list[tuple[SwitchView, float, float]] = []
    nics: dict[int, float] = {}
    gpus: dict[int, float] = {}
    for number, view in enumerate(views):
        if number == 0 or view.socket != views[number - 1].socket:
            x += _MARGIN + (_BETWEEN_SOCKETS if number else 0)
        width = max(len(view.gpus), len(view.nics), 2) * (_PART + _GAP)
        columns.append((view, x, width))
        for held, places in ((view.nics, nics), (view.gpus, gpus)):
            step = width / max(1, len(held))
            places.update({one: x + (place + 0.5) * step for place, one in enumerate(held)})
        x += width + _GAP
    return _Card(x - _GAP + _PADDING, tuple(columns), nics, gpus)


def topology_svg(cluster: Cluster) -> str:
    """The drawing, as the text of a file."""
    wiring, card, canvas = Wiring(cluster), _card(cluster), _Canvas()
    shown = list(range(cluster.nodes)) if cluster.nodes <= _MOST_NODES else [0]
    footer = _footer(cluster)
    least = max(_TITLE_LETTER * len(title(cluster)), *(_LETTER * len(words) for words in footer)) + 2 * _PADDING
    cards_width = len(shown) * (card.width + _BETWEEN_NODES) - _BETWEEN_NODES
    stacked = 8 if cluster.nodes > len(shown) else 0
    width = max(cards_width + stacked + 4 * _PADDING, least)
    left = (width - cards_width - stacked) / 2
    places = {node: left + place * (card.width + _BETWEEN_NODES) for place, node in enumerate(shown)}

    canvas.text(_PADDING, 24, title(cluster), size=14)
    y: float = 40
    if cluster.nodes > 1:
        y = _network(canvas, wiring, card, places, y)
    bottom = y
    for node, x in places.items():
        name = ["one of", f"{cluster.nodes:,}", "nodes"] if stacked else [f"node {node}"]
        bottom = _node(canvas, cluster, card, x, y, name, stacked=bool(stacked))
    if domain_nodes(cluster) > 1:
        bottom = _rack(canvas, wiring, card, places, bottom)
    y = bottom + stacked + 26
    for line, words in enumerate(footer):
        canvas.text(_PADDING, y + line * _LINE, words, size=12, colour=_MUTED)
    return canvas.document(width, y + len(footer) * _LINE)


def _footer(cluster: Cluster) -> list[str]:
    words = [sockets_words(cluster)]
    if cluster.nodes > 1:
        words = [fabric_words(cluster), leaves_words(cluster), *words]
    nvlink = ", of NVLink both ways together" if cluster.nvlink_bytes_per_s else ""
    return [f"{line[0].upper()}{line[1:]}." for line in (*words, f"rates are each way{nvlink}")]


def _network(canvas: _Canvas, wiring: Wiring, card: _Card, places: dict[int, float], y: float) -> float:
    """Spine, leaves and their wires. Returns where the nodes begin."""
    cluster = wiring.cluster
    units: dict[int, list[int]] = {}
    for node in places:
        units.setdefault(wiring.leaf_of(node), []).append(node)
    first, last = min(places.values()), max(places.values()) + card.width
    spine = spine_words(cluster)
    leaf_y = y + (_BAR + _WIRE if spine else 0)
    nodes_y = leaf_y + _BAR + _FAN
    nic_rate = rate_words("nic", cluster.nic_bytes_per_s)
    canvas.text(first + _PADDING, nodes_y - 8, nic_rate, size=10, colour=_MUTED)
    spine_width = max(last - first, _LETTER * len(spine) + 16)
    if spine:
        canvas.box((first + last - spine_width) / 2, y, spine_width, _BAR, "spine", spine)
    for unit, nodes in units.items():
        start, end = places[nodes[0]], places[nodes[-1]] + card.width
        step = (end - start) / wiring.planes
        for plane in range(wiring.planes):
            middle = start + (plane + 0.5) * step
            if spine:
                canvas.wire(middle, y + _BAR, middle, leaf_y, _COLOURS["spine"][1])
            colour = _rail_colour(plane)
            # Every NIC on its rail has a place of its own on the leaf, in the order of the nodes.
            sources = [
                (places[node] + x) for node in nodes for nic, x in card.nics.items() if wiring.plane_of(nic) == plane
            ]
            for place, x in enumerate(sources):
                at = x if wiring.planes == 1 else middle + ((place + 0.5) / len(sources) - 0.5) * step * 0.7
                canvas.wire(at, leaf_y + _BAR, x, nodes_y, colour)
            canvas.box(start + plane * step + 2, leaf_y, step - 4, _BAR, "leaf", _leaf_label(wiring, unit, plane, step))
    return nodes_y


def _leaf_label(wiring: Wiring, unit: int, plane: int, width: float) -> str:
    """As long a name as there is room for."""
    unit_words = f" {unit}" if wiring.leaf_units > 1 else ""
    rail = f"rail {plane}" if wiring.planes > 1 else ""
    candidates = (f"leaf{unit_words} {rail}".strip(), rail, str(plane))
    if not rail:
        return f"leaf switch{unit_words}" if wiring.cluster.fabric.nodes_per_leaf else "non-blocking network"
    return next((words for words in candidates if _LETTER * len(words) < width - 8), "")


def _node(
    canvas: _Canvas, cluster: Cluster, card: _Card, x: float, y: float, name: Sequence[str], *, stacked: bool
) -> float:
    """One node's card, with its name in lines at the left. Returns its bottom."""
    nvlink_inside = domain_nodes(cluster) == 1
    nic_y = y + 14
    switch_y = nic_y + (_PART_HEIGHT + _WIRE if card.nics else 18)
    gpu_y = switch_y + _PART_HEIGHT + _GAP + _WIRE
    bar_y = gpu_y + _PART_HEIGHT + 14
    bottom = bar_y + _BAR + _PADDING if nvlink_inside else gpu_y + _PART_HEIGHT + _PADDING
    fill, stroke = _COLOURS["node"]
    for shift in (8, 4, 0) if stacked else (0,):
        canvas.shapes.append(
            f'<rect x="{x + shift:g}" y="{y + shift:g}" width="{card.width:g}" height="{bottom - y:g}" rx="8"'
            f' fill="{fill}" stroke="{stroke}"/>'
        )
    for line, words in enumerate(name):
        canvas.text(x + _PADDING, y + 20 + 13 * line, words)
    _sockets(canvas, cluster, card, x, switch_y)
    gpu_rate = format_byte_rate(gpu_link_bytes_per_s(cluster))
    canvas.text(x + _PADDING, gpu_y - _WIRE / 2 + 6, gpu_rate, size=10, colour=_MUTED)
    for view, column, width in card.columns:
        for nic in view.nics:
            at, colour = x + card.nics[nic], _rail_colour(Wiring(cluster).plane_of(nic))
            canvas.wire(at, y, at, nic_y, colour)
            canvas.wire(at, nic_y + _PART_HEIGHT, at, switch_y)
            canvas.box(at - _PART / 2, nic_y, _PART, _PART_HEIGHT, "nic", f"NIC {nic}" if nic < 10 else str(nic))
        for gpu in view.gpus:
            at = x + card.gpus[gpu]
            canvas.wire(at, switch_y + _PART_HEIGHT, at, gpu_y)
            if nvlink_inside:
                canvas.wire(at, gpu_y + _PART_HEIGHT, at, bar_y, _COLOURS["nvswitch"][1], 2)
            canvas.box(at - _PART / 2, gpu_y, _PART, _PART_HEIGHT, "gpu", f"GPU {gpu}" if gpu < 10 else str(gpu))
        canvas.box(x + column + 2, switch_y, width - 4, _PART_HEIGHT, "pcie", f"PCIe {view.number}")
    if nvlink_inside:
        canvas.box(x + _PADDING, bar_y, card.width - 2 * _PADDING, _BAR, "nvswitch", _nvlink_label(cluster, card))
    return bottom


def _rail_colour(plane: int) -> str:
    return _RAILS[plane % len(_RAILS)]


def _nvlink_label(cluster: Cluster, card: _Card) -> str:
    words = nvlink_words(cluster)
    short = rate_words("nvlink", cluster.nvlink_bytes_per_s)
    return words if _LETTER * len(words) < card.width - 2 * _PADDING else short


def _sockets(canvas: _Canvas, cluster: Cluster, card: _Card, x: float, switch_y: float) -> None:
    """The CPU sockets as fields around their PCIe switches, and the links between them."""
    fields: dict[int, list[float]] = {}
    for view, column, width in card.columns:
        edges = fields.setdefault(view.socket, [x + column - _MARGIN, x + column + width])
        edges[1] = x + column + width
    middle = switch_y + _PART_HEIGHT / 2
    for (_, end), (start, _) in pairwise(fields.values()):
        canvas.wire(end, middle, start, middle, _INK, 2)
        words = format_byte_rate(socket_bytes_per_s(cluster))
        canvas.text((start + end) / 2, middle - 6, words, anchor="middle", size=10, colour=_MUTED)
    for socket, (start, end) in fields.items():
        canvas.box(start, switch_y - _GAP, end - start + 4, _PART_HEIGHT + 2 * _GAP, "socket")
        canvas.text(start + 8, middle + 4, f"CPU {socket}")


def _rack(canvas: _Canvas, wiring: Wiring, card: _Card, places: dict[int, float], y: float) -> float:
    """The NVSwitches of domains of several nodes, below the nodes. Returns their bottom."""
    cluster = wiring.cluster
    bar_y = y + _WIRE
    domains: dict[int, list[float]] = {}
    for node, x in places.items():
        domains.setdefault(wiring.domain_of(node), []).append(x)
        for at in card.gpus.values():
            canvas.wire(x + at, y - _PADDING, x + at, bar_y, _COLOURS["nvswitch"][1], 2)
    for starts in domains.values():
        width = starts[-1] + card.width - starts[0]
        words = nvlink_words(cluster)
        words = words if _LETTER * len(words) < width else rate_words("nvlink", cluster.nvlink_bytes_per_s)
        canvas.box(starts[0], bar_y, width, _BAR, "nvswitch", words)
    return bar_y + _BAR
