"""A run of two nodes on the test bed, in the state in which `topoplan launch` leaves it."""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed, Machine, probe
from tests.waiting import LIMIT_S, wait_until
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.upload import upload
from topoplan.run import record
from topoplan.run.node import node_state, start_node, stop_node
from topoplan.run.record import NodeRecord, RunRecord

NAMES = ("alpha", "beta")


@dataclass
class LiveRun:
    bed: Bed
    record: RunRecord

    def start(self, *scripts: str) -> None:
        """Start each node with a script, and record what the hosts report."""
        nodes = list(self.record.nodes)
        for node, script in zip(self.record.nodes, scripts, strict=False):
            files = {node.script: script.encode()}
            options: dict[str, Any] = {"run_dir": node.run_dir, "script": node.script, "environment": {}}
            with self.host(node.node) as host:
                upload(host, files, node.run_dir, deadline_s=LIMIT_S)
                started = start_node(host, **options, files=files, deadline_s=LIMIT_S)
            nodes[node.node] = dataclasses.replace(node, started=started)
        self.record = record.update(self.record.run_id, nodes=tuple(nodes))

    def host(self, node: int) -> Connection:
        return connect(self.bed.target(NAMES[node]), Access(), deadline_s=LIMIT_S)

    def wait_for(self, states: Sequence[str]) -> None:
        for node, state in enumerate(states):
            with self.host(node) as host:
                place = self.record.nodes[node].run_dir

                def is_so(host: Connection = host, place: str = place, state: str = state) -> bool:
                    return node_state(host, place, deadline_s=LIMIT_S).state == state

                wait_until(is_so, f"node {node} is {state}")

    def wait_for_log(self, node: int, data: bytes) -> None:
        path = Path(self.record.nodes[node].run_dir) / ".topoplan" / "log"
        wait_until(lambda: path.read_bytes() == data, f"node {node} has written {data!r}")

    @contextlib.contextmanager
    def unreachable(self, node: int) -> Iterator[None]:
        """Make nothing listen on the node's port."""
        changed = dataclasses.replace(self.record.nodes[node], port=9)
        nodes = tuple(changed if one.node == node else one for one in self.record.nodes)
        record.update(self.record.run_id, nodes=nodes)
        try:
            yield
        finally:
            record.update(self.record.run_id, nodes=self.record.nodes)


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[Bed]:
    kind, reason = probe()
    if kind is None:
        pytest.skip(f"no sshd to log in to: {reason}")
    with Bed(directory, [Machine(name=name) for name in NAMES]) as bed:
        yield bed


@contextlib.contextmanager
def live_run(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = tmp_path / "ssh_config"
    config.write_text(f"IdentityFile {bed.key}\nIdentityAgent none\nUserKnownHostsFile {bed.known_hosts}\n")
    # Jobs are found by the name of their run directory, and other tests run at the same time.
    nodes = tuple(
        NodeRecord(
            node=index,
            name=name,
            address=bed[name].address,
            user=bed.user,
            port=bed[name].port,
            run_dir=f"{bed[name].directory}/home/{tmp_path.name} of mine/live-1-{name}-{secrets.token_hex(8)}",
            script=f"node-{index:02d}.sh",
        )
        for index, name in enumerate(NAMES)
    )
    made = RunRecord(
        run_id="live-1",
        name="live",
        bundle=str(tmp_path),
        created="2030-01-01T10:00:00.000+00:00",
        state="running",
        ssh_config=str(config),
        nodes=nodes,
    )
    record.create(made)
    run = LiveRun(bed, made)
    try:
        yield run
    finally:
        for node in run.record.nodes:
            with run.host(node.node) as host:
                stop_node(host, node.run_dir, started=node.started, grace_s=0, deadline_s=LIMIT_S)
