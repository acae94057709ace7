"""How long each step of a session may take, and what is wanted of it."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.remote.ssh import CONNECT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of a session that starts a run, and of one that comes back to it."""

    detach: bool = False
    """Return when all nodes have started."""
    stop_on_exit: bool = False
    """Stop the run when this program is ended by a signal, as with Ctrl-C."""
    stop_on_failure: bool = True
    """Stop the others when a node fails; who starts a run always does."""
    tail_lines: int = 10
    """Lines of the past that who comes back begins with."""
    connect_s: float = CONNECT_S
    upload_s: float = 120.0
    start_s: float = 30.0
    starting_s: float = 30.0
    """How long who comes back waits for a launch that is about to start the run."""
    retries: int = 0
    """How often the run is started again after a failure that is worth it."""
    back_s: float = 900.0
    """Before that, how long hosts are waited for that cannot be asked whether anything of it is left."""
    lost_after_s: float | None = None
    """A host that was not seen for so long is given up, and the watching with it; None: never."""
    hang_after_s: float | None = None
    """A run in which no step has come for so long is ended; None: never."""
    linger_s: float = 15.0
    """After the first failure, time for the others to end: more than the usual grace of a launch that stops them."""
    grace_s: float = 10.0
    """Time between asking a node's processes to end and killing them."""
    stop_s: float = 15.0
    """Time to stop a node, beside the grace."""
    drain_s: float = 5.0
    """Time for the last output of nodes that were stopped."""
