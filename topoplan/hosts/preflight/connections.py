"""The second stage of a preflight: can every host open a connection to every other one?

Most hangs are between two hosts: a firewall admits the rendezvous, but not the ports that NCCL and Gloo choose
afterwards. So each host listens on some ports of the range from which the system takes them, node 0 also on the
rendezvous port, and each connects to all others. Everything here is pure: the scripts and their arguments, and their
answers as results.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import HostError
from topoplan.hosts.needs import python_on
from topoplan.hosts.preflight.checks import MASTER_REACHABLE, PORTS_OPEN
from topoplan.hosts.preflight.fleet import Fleet, Node
from topoplan.hosts.preflight.interfaces import fabric_address
from topoplan.hosts.result import Result, failure, ok, skipped
from topoplan.remote.connection import program
from topoplan.terminal import plain_values
from topoplan.units import named

CONNECT_S = 4.0
"""Time limit per connection: a lost first packet is sent again after 1 and 3 s (RFC 6298, tcp_syn_retries)."""
LIMIT_S = 45.0
PORTS = 2
SCRIPT, PROGRAM = program("hosts", "meet.sh"), program("hosts", "ports.py")
_CANDIDATES = 12
_AT_ONCE = 128
_RANGE = (32768, 60999)
"""Linux's default, for hosts that do not report their range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The ports on which a host listens."""

    ports: tuple[int, ...]
    master: str | None = None
    """Empty if the host listens on the rendezvous port too, else why it cannot; None if it was not asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A port of a host to which another host connects."""

    name: str
    address: str
    port: int
    is_master: bool = False


def arguments(fleet: Fleet, node: Node, choice: random.Random) -> tuple[str, str, str]:
    """Return the arguments $1, $2, $3 of SCRIPT on a host."""
    low, high = node.facts.port_range or _RANGE
    taken = node.facts.listening_ports or frozenset()
    drawn = choice.sample(range(low, high + 1), min(4 * _CANDIDATES, max(0, high + 1 - low)))
    is_master = node.number == 0 and fleet.needs is not None
    task = {
        "token": _token(node.name),
        "master": fleet.needs.master_port if is_master and fleet.needs is not None else None,
        "candidates": [port for port in drawn if port not in taken][:_CANDIDATES],
        "ports": PORTS,
        "connect_s": CONNECT_S,
        "at_once": _AT_ONCE,
        "limit_s": LIMIT_S,
    }
    return PROGRAM, json.dumps(task), python_on(node.host) or ""


def read_listening(line: bytes) -> Listening | str:
    """Parse the first line of a host's output; a string says why the host does not listen."""
    document = _document(line)
    if document.get("lacks"):
        return "no python3 (3.6 or later) there to try it with"
    ports, master = document.get("ports"), document.get("master")
    if not isinstance(ports, list) or not all(isinstance(port, int) for port in ports):
        return "its program for trying ports did not start"
    return Listening(ports=tuple(ports), master=master if isinstance(master, str) else None)


def peers_of(fleet: Fleet, node: Node, listening: Mapping[str, Listening | str | HostError]) -> Iterator[Peer]:
    """Yield what a host connects to: the ports of all others, and the rendezvous as named in the node scripts."""
    for other in fleet.nodes:
        there = listening.get(other.name)
        if not isinstance(there, Listening):
            continue
        if there.master == "" and fleet.needs is not None:
            port = fleet.needs.master_port
            yield Peer(name=other.name, address=fleet.master_address, port=port, is_master=True)
        if other is not node:
            for port in there.ports:
                yield Peer(name=other.name, address=fabric_address(fleet, other), port=port)


def peer_line(peers: Sequence[Peer]) -> bytes:
    """Return the line that tells a host what to connect to."""
    return json.dumps([[peer.address, peer.port, _token(peer.name)] for peer in peers]).encode() + b"\n"


def read_results(line: bytes, peers: Sequence[Peer]) -> Mapping[Peer, str] | None:
    """Return why each connection failed, empty if it did not; None if the host did not get that far."""
    results = _document(line).get("results")
    if not isinstance(results, list) or len(results) != len(peers):
        return None
    return {peer: str(result) for peer, result in zip(peers, results, strict=True)}


def connection_results(
    fleet: Fleet,
    listening: Mapping[str, Listening | str | HostError],
    results: Mapping[str, Mapping[Peer, str] | HostError | None],
    *,
    skip: Collection[str] = (),
) -> tuple[Result, ...]:
    """Return the results for all hosts that took part."""
    checks = {MASTER_REACHABLE: _master, PORTS_OPEN: _pairs}
    return tuple(
        replace(found, name=name, host=node.name)
        for name, check in checks.items()
        if name not in skip
        for node in fleet.nodes
        if (found := check(fleet, node, listening.get(node.name), results.get(node.name))) is not None
    )


_Listens = Listening | str | HostError | None
_Results = Mapping[Peer, str] | HostError | None


def _master(fleet: Fleet, node: Node, own: _Listens, results: _Results) -> Result | None:
    """Row 6: a rendezvous port that node 0 cannot listen on, or that a firewall keeps the others from."""
    if fleet.needs is None:
        return None
    port = fleet.needs.master_port
    if isinstance(own, Listening) and own.master:
        return failure(f"cannot listen on port {port}: {own.master}", f"see `ss -ltnp sport = :{port}` there")
    if (why := _why_untried(own, results)) is not None:
        return why
    if not isinstance(results, Mapping):
        return skipped("the host did not try")
    tried = [reason for peer, reason in results.items() if peer.is_master]
    if not tried:
        return skipped("nothing listens on node 0")
    place = f"{fleet.master_address}:{port}"
    if tried[0]:
        return failure(
            f"no connection to node 0 at {place}: {tried[0]}", f"open TCP port {port} of node 0 to all other hosts"
        )
    return ok(f"{place} is open")


def _pairs(fleet: Fleet, node: Node, own: _Listens, results: _Results) -> Result | None:
    """Row 7: ports that NCCL and Gloo will choose are blocked between two hosts."""
    if len(fleet.nodes) < 2:
        return None
    if (why := _why_untried(own, results)) is not None:
        return why
    if not isinstance(results, Mapping):
        return skipped("the host did not try")
    closed: dict[str, list[str]] = defaultdict(list)
    tried: dict[str, int] = defaultdict(int)
    for peer, reason in results.items():
        if not peer.is_master:
            tried[peer.name] += 1
            if reason:
                closed[peer.name].append(f"{peer.address}:{peer.port} {reason}")
    if closed:
        first, places = next(iter(closed.items()))
        hosts = named(closed)
        low, high = node.facts.port_range or _RANGE
        return failure(
            f"no connection to {hosts} ({'; '.join(places)}{' and so on' if len(closed) > 1 else ''})",
            f"see routes and firewalls between {node.name} and {first}: NCCL and Gloo need TCP ports {low} to {high}"
            " open between all hosts",
        )
    if not tried:
        return skipped("no other host listens")
    return ok(f"open to {len(tried)} other{'s' if len(tried) > 1 else ''}")


def _why_untried(own: _Listens, results: _Results) -> Result | None:
    for answer in (own, results):
        if isinstance(answer, HostError):
            return failure(answer.what, answer.remedy)
    if isinstance(own, str):
        return skipped(own)
    return None


def _token(name: str) -> str:
    """Return what the program on a host answers, to tell it from another program on its port or address."""
    return f"topoplan preflight of {name}"


def _document(line: bytes) -> Mapping[str, object]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return plain_values(document) if isinstance(document, dict) else {}
