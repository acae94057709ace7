"""What an SSH connection runs over: a TCP socket, a ProxyCommand's input and output, or a channel of a jump host.

On each of them, a peer that is gone must be noticed. TCP does not report a cut cable, so the kernel is told to probe
(`_TCP_SILENT_S`). But the kernel also answers for a host whose sshd is stuck, and behind a proxy or a jump host there
is no such socket; so SSH itself also asks for a sign of life, and `IdleMonitor` closes connections that stay silent
(`_SSH_SILENT_S`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from topoplan.errors import HostError, HostProblem
from topoplan.remote import channel
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import Deadline, TimedOut, within
from topoplan.units import in_seconds

if TYPE_CHECKING:
    import paramiko

_TCP_SILENT_S = 3.2
"""A peer whose kernel acknowledges nothing for this long is gone. Our kernel retransmits after 0.2, 0.6, 1.4 and 3.0 s,
so that a network outage of 2 s is survived.
"""
_SSH_SILENT_S = 10.0
"""A peer whose sshd answers nothing for this long is gone; longer, as a busy machine may be slow to schedule it."""
_PROBE_S = 1
"""Time without traffic after which sshd is asked for a sign of life; from then on the kernel's limit applies too."""
_WAKE_S = 0.5
_SENDING_S = 0.1
_FIRST_BYTES = 80
_AHEAD_BYTES = 64 * 1024
"""Received at once. paramiko asks for the head and the rest of each packet, and asking the system is what costs."""
_NOTHING = memoryview(b"")
_PROXY_ENDS_S = 1.0
_ADDRESS_AT_MOST_S = 5.0
"""Time limit per address if a name has several."""


class Wire:
    """A socket or channel that records when data last arrived."""

    def __init__(self, pipe: socket.socket | paramiko.Channel) -> None:
        """Take over `pipe`, which is closed together with this object."""
        self._pipe = pipe
        self.heard_s = time.monotonic()
        self.hung_up = False
        """Whether the other side has closed the connection."""
        self.broke = False
        """Whether the system has given up the connection. What follows looks as if the other side had closed it."""
        self.first = b""
        """The first bytes received; if the other side is not an SSH server, they tell what it is."""
        self._ahead = _NOTHING
        """Received, but not asked for yet."""
        self._closed = False  # paramiko reads this name
        self._closing = threading.Lock()

    def recv(self, most: int) -> bytes:
        """Receive like a socket."""
        if not self._ahead:
            data = self.receive()
            self.heard_s = time.monotonic()
            if len(self.first) < _FIRST_BYTES:
                self.first += data[: _FIRST_BYTES - len(self.first)]
            self.hung_up |= not data and not self._closed and not self.broke
            self._ahead = memoryview(data)
        found, rest = bytes(self._ahead[:most]), self._ahead[most:]
        self._ahead = rest or _NOTHING  # an empty view would hold on to the whole
        return found

    def receive(self) -> bytes:
        """Return what has arrived, as much as there is."""
        with self._noticing():
            return self._pipe.recv(_AHEAD_BYTES)

    def send(self, data: bytes) -> int:
        """Send like a socket."""
        with self._noticing():
            return self._pipe.send(data)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ECONNRESET, errno.EPIPE):
                self.hung_up |= not self.broke
            elif error.errno is not None and not self._closed:
                self.broke = not self.hung_up
            raise

    def settimeout(self, seconds: float | None) -> None:
        """Set a timeout longer than asked for: paramiko would wake ten times a second, and closing wakes it anyway."""
        self._pipe.settimeout(_WAKE_S)

    def close(self) -> None:
        """Wake readers and writers, and close. The connection's own thread may do this at the same time."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if isinstance(self._pipe, socket.socket):
            with contextlib.suppress(OSError):
                self._pipe.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError):
            self._pipe.close()

    def why(self) -> str:
        """Return what the other end said for itself, if anything: the last output of a ProxyCommand."""
        return ""


class TcpWire(Wire):
    """A TCP socket connected to a host."""

    def __init__(self, connection: socket.socket) -> None:
        """Send small packets immediately, and notice a peer that is gone; skip options that this system lacks."""
        super().__init__(connection)
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": 1,
            "TCP_KEEPINTVL": 1,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": round(_TCP_SILENT_S * 1000),
        }
        for name, value in options.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def receive(self) -> bytes:
        """Return what has arrived, and acknowledge it immediately.

        sshd waits for an acknowledgement before it sends its next small packet, and the kernel would delay it by 40 ms;
        the option lasts for one packet only.
        """
        data = super().receive()
        if hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


class ChannelWire(Wire):
    """A channel of a jump host."""

    def __init__(self, session: paramiko.Channel) -> None:
        super().__init__(session)
        self._session = session

    def send(self, data: bytes) -> int:
        """Send like a socket; raises TimeoutError if nothing can be sent for a while."""
        with self._noticing():
            sent = channel.send(self._session, data, wait_s=_SENDING_S)
        if sent == 0:
            if self._session.transport is not None:
                self._session.transport.clear_to_send.wait(_SENDING_S)
            raise TimeoutError
        return sent


class ProxyWire(Wire):
    """A ProxyCommand's standard input and output."""

    def __init__(self, command: str) -> None:
        """Start the command with the user's shell, as ssh does. Raises OSError if that cannot be started."""
        ours, theirs = socket.socketpair()
        # A file, because a pipe could fill up and block the command. It disappears with the last reference to it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with theirs:
                # In a session of its own, so that Ctrl-C in the terminal does not cut the connection before it is
                # closed in order.
                self._process = subprocess.Popen(
                    [os.environ.get("SHELL") or "/bin/sh", "-c", "exec " + command],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            self._errors.close()
            raise
        super().__init__(ours)

    def close(self) -> None:
        """Close the connection, end the command and all that it started, and wait for its end."""
        super().close()
        if self._process.returncode is None:
            for end in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, end)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PROXY_ENDS_S)
                    break

    def why(self) -> str:
        """Return the end of the command's standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 300))
        return " ".join(self._errors.read().decode(errors="replace").split())


def dial(target: Target, deadline: Deadline) -> Wire:
    """Connect to the target itself, without jump hosts: over TCP, or with its ProxyCommand.

    Raises HostError: unresolved, unreachable, refused, timeout or proxy.
    """
    if target.proxy_command is not None:
        try:
            return ProxyWire(target.proxy_command)
        except OSError as error:
            raise target.error("proxy", f"ProxyCommand cannot be started: {error.strerror}") from None
    if target.connect_timeout_s is not None and target.connect_timeout_s < deadline.left_s:
        deadline = Deadline(target.connect_timeout_s)
    addresses = _addresses(target, deadline)
    for index, (family, _, _, _, address) in enumerate(addresses):
        last = index == len(addresses) - 1
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, deadline.left_s if last else min(deadline.left_s, _ADDRESS_AT_MOST_S)))
            connection.connect(address)
        except OSError as error:
            connection.close()
            if last:
                raise _not_connected(target, error, deadline) from None
        else:
            return TcpWire(connection)
    raise target.error("unresolved", "its name has no address")


def _addresses(target: Target, deadline: Deadline) -> list[Any]:
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(target.address_family, socket.AF_UNSPEC)

    def look_up(flags: int = 0) -> list[Any]:
        return socket.getaddrinfo(target.hostname, target.port, family, socket.SOCK_STREAM, flags=flags)

    with contextlib.suppress(OSError):
        return look_up(socket.AI_NUMERICHOST)
    problem: HostProblem = "unresolved"
    try:
        return within(deadline.left_s, look_up)
    except TimedOut:
        reason, problem = f"no answer within {in_seconds(deadline.total_s)}", "timeout"
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a name"
    raise target.error(
        problem,
        f"the address of {target.hostname!r} cannot be found: {reason}",
        "check the name, or give an IP address or an alias of the SSH configuration",
    )


def _not_connected(target: Target, error: OSError, deadline: Deadline) -> HostError:
    where = f"port {target.port} of {target.hostname}"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return target.error(
            "timeout",
            f"no answer from {where} within {in_seconds(deadline.total_s)}",
            "check that the machine is up and that no firewall drops the connection",
        )
    if error.errno == errno.ECONNREFUSED:
        return target.error("refused", f"nothing listens on {where}", "check the port and that sshd runs there")
    return target.error(
        "unreachable", f"{where} cannot be reached: {error.strerror}", "check the address and the network in between"
    )


class IdleMonitor:
    """A single thread that closes those connections of the process that have been silent for too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[paramiko.Transport, Wire] = {}
        self._thread: threading.Thread | None = None

    def add(self, transport: paramiko.Transport, wire: Wire) -> None:
        """Ask sshd for signs of life from now on, and close the connection if none come."""
        probe = _probe_of(weakref.ref(transport))
        transport.packetizer.set_keepalive(_PROBE_S, probe)
        with self._lock:
            self._watched[transport] = wire
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="topoplan-ssh-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(1.0)
            now = time.monotonic()
            # This process was stopped for a while, during which no data could be received.
            paused = now - before > 3.0
            before = now
            with self._lock:
                for transport in [one for one in self._watched if not one.is_active()]:
                    del self._watched[transport]
                if not self._watched:
                    self._thread = None
                    return
                watched = list(self._watched.items())
            for transport, wire in watched:
                if paused:
                    wire.heard_s = now
                elif now - wire.heard_s > _SSH_SILENT_S:
                    transport.close()


def _probe_of(reference: weakref.ref[paramiko.Transport]) -> Callable[[], None]:
    """Return the function that asks for a sign of life; paramiko's own keepalive requests no reply.

    sshd rejects the unknown request, and the rejection is the reply, as with ssh's ServerAliveInterval. The function
    runs in the transport's thread, which must not block.
    """
    from paramiko import Message
    from paramiko.common import cMSG_GLOBAL_REQUEST

    message = Message()
    message.add_byte(cMSG_GLOBAL_REQUEST)
    message.add_string("keepalive@openssh.com")
    message.add_boolean(True)

    def probe() -> None:
        if (transport := reference()) is not None and transport.is_active():
            channel.pass_on(transport, message)

    return probe


IDLE_MONITOR = IdleMonitor()
