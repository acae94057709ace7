"""Time limits for the steps of a session, and what the session is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.remote.ssh import CONNECT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a session that starts a run, or attaches to it."""

    detach: bool = False
    """Return when all nodes have started."""
    stop_on_exit: bool = False
    """Stop the run when this program is ended by a signal, as with Ctrl-C."""
    stop_on_failure: bool = True
    """Stop the other nodes when one fails; a session that starts a run always does."""
    tail_lines: int = 10
    """Number of earlier lines to show when attaching."""
    connect_s: float = CONNECT_S
    upload_s: float = 120.0
    start_s: float = 30.0
    starting_s: float = 30.0
    """How long an attaching session waits for a launch that is about to start the run."""
    retries: int = 0
    """How often the run is restarted after a failure that is worth it."""
    back_s: float = 900.0
    """How long to wait, before a restart, for hosts that cannot be asked whether anything of the run is left."""
    lost_after_s: float | None = None
    """Give up on a host that was not seen for this long, and stop watching; None: never."""
    hang_after_s: float | None = None
    """End a run in which no step has come for this long; None: never."""
    linger_s: float = 15.0
    """Time for the other nodes to end after a failure: more than the usual grace of a launch that stops them."""
    grace_s: float = 10.0
    """Time between asking a node's processes to end and killing them."""
    stop_s: float = 15.0
    """Time to stop a node, beside the grace period."""
    drain_s: float = 5.0
    """Time for the last output of nodes that were stopped to arrive."""
