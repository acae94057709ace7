"""Stop all nodes of a run concurrently, each over its existing connection or a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.waiting import INTERRUPT_LOOK_S, Call, Deadline
from topoplan.run.following import Reconnect
from topoplan.run.node import Stopped, stop_node, suspect_remedy, suspect_text
from topoplan.run.settings import Settings
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode

_SPARE_S = 5.0
_LOST_S = 8.0
"""Timeout for a new login to a host whose connection was lost: a stop does not wait for the network."""


def stop_all(
    nodes: Sequence[WatchedNode],
    settings: Settings,
    *,
    reconnect: Reconnect,
    at_once: Callable[[], bool],
    watch: Watch | None = None,
) -> dict[str, HostError]:
    """Stop the nodes and read their last output; return the errors of those not stopped, by node name.

    Waiting ends as soon as `at_once` returns true.
    """
    results: dict[str, Stopped | HostError] = {}

    def one(node: WatchedNode) -> None:
        results[node.name] = _stop_one(node, settings, reconnect)

    deadline = Deadline(settings.grace_s + 2 * settings.stop_s + _SPARE_S)
    if watch is not None:
        # Ends that happened before are handled first: they are the job's own doing.
        watch.until(lambda: True)
        watch.stopping = True
    calls = [Call(lambda node=node: one(node)) for node in nodes]  # type: ignore[misc]

    def done() -> bool:
        return all(call.done.is_set() for call in calls) or at_once()

    if watch is not None:
        watch.until(done, deadline_s=deadline.left_s)
    while not done() and deadline.left_s > 0:
        time.sleep(INTERRUPT_LOOK_S)
    left = {node.name: error for node in nodes if (error := _left(node, results.get(node.name))) is not None}
    if watch is not None and not at_once():
        watch.until(
            lambda: at_once() or all(node.is_over or node.name in left for node in watch.nodes),
            deadline_s=settings.drain_s,
        )
    return left


def _left(node: WatchedNode, result: Stopped | HostError | None) -> HostError | None:
    if result is None:
        return HostError(
            "not stopped yet", host=node.address, problem="deadline", remedy="check what is still running there"
        )
    if isinstance(result, HostError):
        return result
    if result.left:
        pids = " ".join(map(str, result.left))
        return HostError(f"processes {pids} are still there after SIGKILL", host=node.address, problem="command")
    if result.suspects:
        named = "; ".join(suspect_text(one) for one in result.suspects)
        return HostError(
            f"may belong to the run: {named}",
            host=node.address,
            problem="command",
            remedy=suspect_remedy(result.suspects),
        )
    return None


def _stop_one(node: WatchedNode, settings: Settings, reconnect: Reconnect) -> Stopped | HostError:
    """Stop one node, over a new connection if the existing one does not serve.

    It may be alive and refuse a further command: with MaxSessions 1, following the log uses the only session.
    """
    with node.start_lock:
        node.start_later = None
    connection = node.connection
    last: HostError | None = None
    for _ in range(2):
        fresh: Connection | None = None
        try:
            if connection is None or not connection.is_alive:
                was_lost = node.unreachable is not None or last is not None
                connection = fresh = reconnect(
                    node.name, min(settings.stop_s, _LOST_S) if was_lost else settings.stop_s
                )
            deadline_s = settings.grace_s + settings.stop_s
            return stop_node(
                connection, node.run_dir, started=node.started, grace_s=settings.grace_s, deadline_s=deadline_s
            )
        except HostError as error:
            last = error
            connection = None
            if error.problem not in ("lost", "command"):
                break
        finally:
            if fresh is not None:
                fresh.close()
    return last or HostError("not stopped", host=node.address, problem="lost")
