"""A cluster drawn in characters: one node with its parts, and the network above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from topoplan.network.topology import Wiring, gpu_link_bytes_per_s, nic_slot_bytes_per_s
from topoplan.report.tables import paragraph
from topoplan.report.topology_words import (
    domain_nodes,
    fabric_words,
    leaves_words,
    numbers,
    nvlink_words,
    sockets_words,
    spine_words,
    title,
)
from topoplan.specs.cluster import Cluster
from topoplan.units import format_bit_rate, format_byte_rate

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
    """Yield the lines of several PCIe switches side by side: NICs above, GPUs below."""
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
