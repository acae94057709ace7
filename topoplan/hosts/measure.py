"""Time the operations that plans consist of on the hosts themselves: matrix products, attention, copies, collectives.

The program is `scripts/measure.py`. It runs only as long as its connection lives, so nothing stays behind on a host.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from topoplan.errors import HostError
from topoplan.hosts.needs import python_on
from topoplan.remote.connection import Chunk, Connection, Stream, last_line, program
from topoplan.remote.waiting import Deadline
from topoplan.specs.cluster import Cluster
from topoplan.trainers.environment import node_environment

LIMIT_S = 240.0
_STARTS_S = 90.0
"""Time for torch to be imported and all processes to meet."""
_MIB = 2**20
_PROGRAM = program("hosts", "measure.py")
_PORTS = (20000, 30000)
"""Below the range from which Linux takes ephemeral ports."""
# Rows, columns and inner dimension of products, as in layers of 1B to 100B models; heads, tokens and width of
# attention.
_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 4096), (4096, 14336, 4096), (2048, 2048, 8192))
_ATTENTION = ((32, 4096, 128), (16, 8192, 128))
_COPIES = (256 * _MIB, 1024 * _MIB)
_MESSAGES = (1 * _MIB, 16 * _MIB, 128 * _MIB)
_SMALL: Mapping[str, Any] = {
    "products": ((256, 256, 256),),
    "attention": ((2, 256, 64),),
    "copies": (4 * _MIB,),
    "messages": (_MIB // 4, _MIB),
}
"""Sizes for CPUs, on which only the functioning is tested."""


def groups_of(cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of the groups that plans use: within a node, one GPU of each node, and all GPUs."""
    gpus, nodes = cluster.gpus_per_node, cluster.nodes
    inside = [(size, 1) for size in (2, 4, 8, 16, 32) if size < gpus and gpus % size == 0]
    inside += [(gpus, 1)] if gpus > 1 else []
    between = [(nodes, gpus)] if nodes > 1 else []
    return (*inside, *between, *([(gpus * nodes, 1)] if nodes > 1 and gpus > 1 else []))


def measure(
    connections: Mapping[str, Connection],
    cluster: Cluster,
    *,
    on_cpu: bool = False,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Return rank 0's description of the machine and a row for each measurement.

    `on_progress` is called with the number of finished measurements and their total. `connections` are in the order of
    the cluster's hosts. Raises HostError: `command` (no torch, other GPUs than in the spec, or the program failed),
    `deadline`, `lost`.
    """
    streams: dict[str, Stream] = {}
    port = random.randint(*_PORTS)
    try:
        total = 0
        for node, (name, connection) in enumerate(connections.items()):
            task = {**_task(cluster, node, on_cpu=on_cpu), "port": port, "limit_s": limit_s}
            kernels = len(task["products"]) + 2 * len(task["attention"]) + len(task["copies"])
            total = kernels + 3 * len(task["groups"]) * len(task["messages"])
            python = python_on(cluster.hosts[node]) or "python3"
            words = (python, "-c", _PROGRAM, _PROGRAM)
            line = json.dumps(task).encode() + b"\n"
            streams[name] = connection.start(words, stdin=line, hold_stdin=True)
        return _read(streams, connections, Deadline(limit_s + _STARTS_S), lambda done: on_progress(done, total))
    finally:
        for stream in streams.values():
            stream.close()


def _task(cluster: Cluster, node: int, *, on_cpu: bool) -> dict[str, Any]:
    sizes = {"products": _PRODUCTS, "attention": _ATTENTION, "copies": _COPIES, "messages": _MESSAGES}
    return {
        "cpu": on_cpu,
        "gpus": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "node": node,
        "master": cluster.hosts[0].address if cluster.nodes > 1 else "127.0.0.1",
        "rounds": 5,
        "groups": groups_of(cluster),
        "environment": {one.name: one.value for one in node_environment(cluster, (), node)},
        **(_SMALL if on_cpu else sizes),
    }


def _read(
    streams: Mapping[str, Stream],
    connections: Mapping[str, Connection],
    deadline: Deadline,
    on_progress: Callable[[int], None],
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    about: Mapping[str, Any] = {}
    rows: list[Mapping[str, Any]] = []
    for name, document in _documents(streams, connections, deadline):
        if "error" in document:
            raise connections[name].target.error(
                "command", str(document["error"]), "give --venv, or `venv` in the spec"
            )
        if "about" in document:
            about = document["about"]
        elif "kind" in document:
            rows.append(document)
            on_progress(len(rows))
    return about, rows


def _documents(
    streams: Mapping[str, Stream], connections: Mapping[str, Connection], deadline: Deadline
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield lines of JSON as they arrive, until all programs have ended well. Raises HostError."""
    left = dict(streams)
    kept = {name: {"stdout": b"", "stderr": b""} for name in streams}
    while left:
        for name, stream in list(left.items()):
            for item in stream.read(0.1):
                if isinstance(item, Chunk):
                    kept[name][item.source] += item.data
                    continue
                del left[name]
                if item.lost is not None:
                    raise item.lost
                if item.code != 0:
                    said = last_line(kept[name]["stderr"])
                    what = f"the measuring program ended with exit code {item.code}{said}"
                    raise connections[name].target.error("command", what)
            *lines, kept[name]["stdout"] = kept[name]["stdout"].split(b"\n")
            for line in lines:
                if line.startswith(b"{"):
                    yield name, json.loads(line)
        if deadline.left_s <= 0:
            first: HostError = connections[next(iter(left))].target.error(
                "deadline", "measuring took too long", "check whether the hosts reach each other: topoplan preflight"
            )
            raise first
