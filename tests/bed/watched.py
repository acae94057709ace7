"""Jobs on a bed's hosts, watched in this process."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bed.bed import Bed
from tests.waiting import LIMIT_S, wait_until
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.upload import upload
from topoplan.run.events import Event
from topoplan.run.node import node_state, start_node, stop_node
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode

NOT_LET_IN: HostError | None = None
"""What prevents reconnecting, if it is something other than the hosts."""


@dataclass
class Jobs:
    """A job on each of some hosts, and the events of a watch."""

    bed: Bed
    home: str
    logs: Path
    names: tuple[str, ...]
    events: list[Event] = field(default_factory=list)
    let_in: threading.Event = field(default_factory=threading.Event)
    """While unset, reconnecting fails."""
    connections: list[Connection] = field(default_factory=list)

    def host(self, name: str) -> Connection:
        connection = connect(self.bed.target(name), Access(), deadline_s=LIMIT_S)
        self.connections.append(connection)
        return connection

    def run_dir(self, name: str) -> str:
        # Hosts of other tests share the process table, in which a run is identified by its name.
        return f"{self.home}/{name}/{Path(self.home).name}-{name}"

    def log(self, name: str) -> bytes:
        """Return the log as it is on the host."""
        return (Path(self.run_dir(name)) / ".topoplan" / "log").read_bytes()

    def copy(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, **scripts: str) -> None:
        for name, script in scripts.items():
            host = self.host(name)
            upload(host, {"node.sh": script.encode()}, self.run_dir(name), deadline_s=LIMIT_S)
            start_node(host, run_dir=self.run_dir(name), script="node.sh", environment={}, deadline_s=LIMIT_S)

    def go(self, name: str) -> None:
        """Let a job continue that waits for the file `go`."""
        (Path(self.run_dir(name)) / "go").touch()

    def ended(self, *names: str) -> None:
        """Wait for the ends of jobs."""
        for name in names:
            host, place = self.host(name), self.run_dir(name)

            def is_over(host: Connection = host, place: str = place) -> bool:
                return node_state(host, place, deadline_s=LIMIT_S).state == "ended"

            wait_until(is_over, f"the job on {name} ends")

    def ended_before(self, name: str, seconds: float) -> Path:
        """Date the end of a job back; return the file in which it is."""
        end = Path(self.run_dir(name)) / ".topoplan" / "exit"
        code, up_s = end.read_text().split()
        end.write_text(f"{code} {float(up_s) - seconds}\n")
        return end

    def said(self, name: str, data: bytes) -> None:
        """Wait for the first output of a job."""
        wait_until(lambda: self.log(name) == data, f"{name} has written {data!r}")

    def node(self, name: str, **changes: Any) -> WatchedNode:
        values: dict[str, Any] = {
            "node": self.names.index(name),
            "name": name,
            "address": self.bed[name].address,
            "run_dir": self.run_dir(name),
            "connection": self.host(name),
            "log": self.copy(name),
        }
        return WatchedNode(**(values | changes))

    @contextlib.contextmanager
    def watch(self, *nodes: WatchedNode, **options: Any) -> Iterator[Watch]:
        def reconnect(name: str, deadline_s: float) -> Connection:
            if not self.let_in.is_set():
                raise NOT_LET_IN or HostError("nobody is let in", host=name, problem="refused")
            return self.host(name)

        self.events = []
        watch = Watch(nodes, tell=self.events.append, reconnect=reconnect, **options)
        try:
            yield watch
        finally:
            watch.close()

    def of(self, kind: str, node: str = "") -> list[str]:
        return texts(self.events, kind, node)

    def stop(self, name: str, grace_s: float = LIMIT_S / 2) -> None:
        with connect(self.bed.target(name), Access(), deadline_s=LIMIT_S) as host:
            stop_node(host, self.run_dir(name), grace_s=grace_s, deadline_s=LIMIT_S)

    def close(self) -> None:
        for name in self.names:
            self.stop(name, grace_s=0)
        for connection in self.connections:
            connection.close()


def texts(events: Sequence[Event], kind: str, node: str) -> list[str]:
    """Return the texts of the events of one kind, of all nodes or of one; `line` means a line of an output event."""
    wanted = "output" if kind == "line" else kind
    found = [event.text for event in events if event.kind == wanted and node in ("", event.node)]
    return [line for text in found for line in text.split("\n")] if kind == "line" else found


def sees(watch: Watch, condition: Callable[[], object]) -> bool:
    """Watch until a condition holds."""
    return watch.until(lambda: bool(condition()), deadline_s=LIMIT_S)


def ends(watch: Watch) -> bool:
    """Watch until all nodes are over."""
    watch.until(lambda: False, deadline_s=LIMIT_S)
    return all(node.is_over for node in watch.nodes)
