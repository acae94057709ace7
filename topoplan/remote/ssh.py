"""Log in to a host: connect, verify its key, authenticate.

Every step has a deadline, and every failure is a `HostError` with a remedy. Nothing is printed or logged.
"""

from __future__ import annotations

import functools
import logging
import shlex
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from topoplan.errors import HostError
from topoplan.remote import known_hosts
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access, NewKey
from topoplan.remote.known_hosts import HostKey, Known
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import Deadline
from topoplan.remote.wire import IDLE_MONITOR, ChannelWire, Wire, dial
from topoplan.units import in_seconds

if TYPE_CHECKING:
    import socket

    import paramiko
    from paramiko.packet import Packetizer

CONNECT_S = 20.0
"""Time limit for one host from the first packet to the login; every jump host before it has as much again."""

# paramiko logs a traceback for errors that it also raises. Its transports use a logger of our own, which discards it.
_LOG_NAME = "topoplan.paramiko"
logging.getLogger(_LOG_NAME).addHandler(logging.NullHandler())
logging.getLogger(_LOG_NAME).propagate = False
logging.getLogger(_LOG_NAME).setLevel(logging.CRITICAL + 1)


class Jump:
    """A connection to a jump host that is shared by several connections and closed with the last of them."""

    def __init__(self, connection: Connection) -> None:
        """Share `connection`; the creator counts as the first holder."""
        self.connection = connection
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Remove a holder; the last one closes the connection."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.connection.close()


def connect(
    target: Target, access: Access, *, deadline_s: float = CONNECT_S, through: Jump | None = None
) -> Connection:
    """Log in to `target` through its jump hosts. The caller closes the connection.

    `through` is an open connection to the last jump host, to be shared with other targets. The time that the user takes
    to answer `access.ask` does not count.

    Raises HostError: what failed; `host` is the jump host if that was the reason.
    """
    if through is not None:
        through.hold()
    jump = through or open_jump(target, access, deadline_s=deadline_s)
    try:
        return _log_in(target, access, Deadline(deadline_s), jump)
    except BaseException:
        if jump is not None:
            jump.release()
        raise


def open_jump(target: Target, access: Access, *, deadline_s: float = CONNECT_S) -> Jump | None:
    """Connect to the last of the target's jump hosts through the ones before it; None if there are none.

    The caller releases it. Raises HostError about the jump host that failed.
    """
    jump: Jump | None = None
    for hop in target.jumps:
        try:
            jump = Jump(_log_in(hop, access, Deadline(deadline_s), jump))
        except BaseException:
            if jump is not None:
                jump.release()
            raise
    return jump


def _log_in(target: Target, access: Access, deadline: Deadline, jump: Jump | None) -> Connection:
    """Return a connection that takes over the hold on `jump`, if the login succeeds."""
    wire = dial(target, deadline) if jump is None else _through(jump, target, deadline)
    try:
        known = known_hosts.look_up(target.key_name, (*target.user_known_hosts_files, *target.global_known_hosts_files))
        transport = _exchange_keys(target, wire, known, deadline)
        _check_host_key(target, access, transport, known)
        _authenticate(target, access, transport, wire, deadline)
        IDLE_MONITOR.add(transport, wire)
        return Connection(target, transport, release=jump.release if jump else lambda: None)
    except BaseException:
        wire.close()
        raise


def _through(jump: Jump, target: Target, deadline: Deadline) -> Wire:
    from paramiko import ChannelException, SSHException

    transport = jump.connection.transport
    by = jump.connection.name
    try:
        channel = transport.open_channel(
            "direct-tcpip", (target.hostname, target.port), ("127.0.0.1", 0), timeout=deadline.left_s
        )
    except ChannelException as error:
        # RFC 4254, 5.1: 1 is administratively prohibited, 2 is connect failed.
        if error.code == 1:
            raise target.error(
                "proxy",
                f"jump host {by} does not forward connections",
                "allow them there (AllowTcpForwarding in its sshd_config)",
            ) from None
        raise target.error(
            "unreachable",
            f"jump host {by} cannot reach port {target.port} of {target.hostname}",
            "check that the machine is up, and its name and port as seen from there",
        ) from None
    except (SSHException, EOFError, OSError):
        if transport.is_active():
            raise target.error(
                "timeout",
                f"no answer from port {target.port} of {target.hostname} through jump host {by} "
                f"within {in_seconds(deadline.total_s)}",
                "check that the machine is up and that no firewall drops the connection",
            ) from None
        raise target.error("lost", f"the connection to jump host {by} was lost") from None
    return ChannelWire(channel)


@functools.cache
def _clockless() -> type[Packetizer]:
    """Return the class, which is created on first use because paramiko is slow to import."""
    from paramiko.packet import Packetizer

    class Clockless(Packetizer):
        def start_handshake(self, timeout: float) -> None:
            """Start no timer: it would be a thread that outlives the connection and keeps the program from ending."""

    return Clockless


def _exchange_keys(target: Target, wire: Wire, known: Known, deadline: Deadline) -> paramiko.Transport:
    """Return a transport after key exchange, which is what proves that the host owns its key."""
    from paramiko import SSHException, Transport

    # paramiko's documentation allows any object with the methods of a socket.
    transport = Transport(cast("socket.socket", wire), packetizer_class=_clockless())
    transport.set_log_channel(_LOG_NAME)
    # Ask for key types that are known, as ssh does: a host with several keys must not look changed.
    options = transport.get_security_options()
    wanted = [name for kind in known.kinds for name in _ALGORITHMS.get(kind, (kind,)) if name in options.key_types]
    options.key_types = (*wanted, *(name for name in options.key_types if name not in wanted))
    # Ciphers that authenticate come first, as with ssh: paramiko compares a separate MAC byte by byte in Python.
    options.ciphers = tuple(sorted(options.ciphers, key=lambda name: "gcm" not in name))
    limit_s = min(deadline.left_s, target.connect_timeout_s or deadline.left_s)
    transport.banner_timeout = limit_s + 1.0
    error: BaseException | None = None
    try:
        transport.start_client(timeout=limit_s)
    except (SSHException, EOFError, OSError) as caught:
        error = caught
    # After its time limit, start_client returns as if it had succeeded.
    if error is None and transport.initial_kex_done:
        return transport
    greeted = bool(transport.remote_version)
    transport.close()
    wire.close()
    said = wire.first.split(b"\n")[0].decode(errors="replace").strip()
    if not greeted and not wire.first and wire.hung_up and target.proxy_command and not target.jumps:
        why = wire.why()
        raise target.error(
            "proxy",
            f"its ProxyCommand ended before the connection was made{f': {why}' if why else ''}",
            "run it by hand to see why",
        )
    if wire.hung_up and (greeted or not said or said in _TOO_MANY):
        raise target.error(
            "banner",
            "it hung up during the key exchange" if greeted else "it hung up immediately",
            "it may have too many logins at once (MaxStartups in its sshd_config) or refuse this address",
        )
    if greeted and isinstance(error, (OSError, EOFError)):
        raise _lost(target)
    if said and not greeted:
        raise target.error(
            "protocol",
            f"port {target.port} of {target.hostname} is not an SSH server, it sent '{said}'",
            "check the port",
        )
    if error is None:
        raise target.error(
            "timeout",
            f"connected, but {'it stopped answering' if greeted else 'no SSH banner'} within {limit_s:.3g} s",
            "check that sshd runs there and that the machine is not overloaded",
        )
    raise target.error("protocol", f"no SSH connection: {error}", "compare the versions of both sides")


def _lost(target: Target) -> HostError:
    return target.error(
        "lost",
        "the connection was lost while logging in",
        f"the network may be losing packets: see `ping` and `ip -s link`; if it happens each time, try `{target.ssh}`",
    )


_TOO_MANY = ("Exceeded MaxStartups", "Not allowed at this time")
"""What sshd says before it disconnects a surplus login; the wording depends on its version."""
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""Signature algorithms by key type, where their names differ from the key type's."""


def _check_host_key(target: Target, access: Access, transport: paramiko.Transport, known: Known) -> None:
    server_key = transport.get_remote_server_key()
    key = HostKey(kind=server_key.get_name(), blob=server_key.asbytes())
    verdict = known.verdict(key)
    shown = f"{key.kind} {key.fingerprint}"
    if verdict == "known":
        return
    if verdict == "revoked":
        raise target.error(
            "key-revoked",
            f"its key {shown} is marked as revoked",
            "do not connect; ask whoever runs it for its new key",
        )
    first = known.first()
    if verdict == "changed" and first is not None:
        forget = shlex.join(["ssh-keygen", "-R", target.key_name, "-f", str(first.file)])
        raise target.error(
            "key-changed",
            f"its key is not the one in {first.place}, {first.key.kind} {first.key.fingerprint}: it now shows {shown}. "
            "Either it was reinstalled, or the connection is being intercepted",
            f"if the new key is correct: `{forget}`, then `{target.ssh}`",
        )
    if (access.accept_new or target.strict_host_key_checking in ("no", "accept-new")) and target.user_known_hosts_files:
        file = target.user_known_hosts_files[0]
        try:
            added = known_hosts.add(target.key_name, key, file, hashed=target.hash_known_hosts)
        except OSError as error:
            raise target.error("key-unknown", f"its key {shown} cannot be saved in {file}: {error.strerror}") from None
        if added:
            access.on_new_key(NewKey(host=target.name, key=key, file=file))
        return
    what = f"its key is unknown, {shown}"
    if known.by_authority:
        what += ", and certificates of hosts are not supported"
    scan = ["ssh-keyscan", *(["-p", str(target.port)] if target.port != 22 else []), target.hostname]
    by_scan = "" if target.jumps or target.proxy_command else f" (or compare with `{shlex.join(scan)}`)"
    raise target.error(
        "key-unknown", what, f"check the fingerprint and take it with `{target.ssh}`{by_scan}, or use --accept-new"
    )


def _authenticate(target: Target, access: Access, transport: Any, wire: Wire, deadline: Deadline) -> None:
    from paramiko import AuthenticationException, SSHException

    offered: list[str] = []
    allowed: list[str] = []
    offers = access.offers(target)
    while True:
        asked = time.monotonic()
        name, key = next(offers, ("", None))
        deadline.extend(time.monotonic() - asked)
        if key is None:
            break
        offered.append(name)
        transport.auth_timeout = deadline.left_s
        try:
            # The result lists the methods that must follow: the host asks for more than a key.
            allowed = transport.auth_publickey(target.user, key)
            if not allowed:
                return
            break
        except AuthenticationException as error:
            allowed = list(getattr(error, "allowed_types", ()))
        except (SSHException, EOFError, OSError, ValueError):
            # A problem of this key, such as an agent that refuses to sign; or the end of the connection.
            pass
        if deadline.left_s <= 0:
            raise target.error(
                "timeout",
                f"no answer to the login of {target.user!r} within {in_seconds(deadline.total_s)}",
                "check that the machine is not overloaded, and that the agent does not wait for a confirmation",
            )
        if not transport.is_active():
            # An sshd that has seen too many keys says so before it disconnects: then this side ends the connection.
            if wire.broke or wire.hung_up:
                raise _lost(target)
            break
    offered_keys = f"{len(offered)} key{'s' if len(offered) != 1 else ''}"
    if offered:
        offered_keys += f" ({', '.join(dict.fromkeys(offered))})"
    what = f"user {target.user!r} was refused with {offered_keys}"
    remedy = f"put a public key there (ssh-copy-id), or name the right one with IdentityFile; try `{target.ssh}`"
    if not offered:
        what = f"there is no key to log in with as user {target.user!r}"
    elif not transport.is_active():
        what = f"it hung up after {offered_keys} for user {target.user!r}"
        remedy = "name the right key with IdentityFile, and offer no other with IdentitiesOnly yes"
    elif allowed and "publickey" not in allowed:
        what = f"it does not accept a key alone for user {target.user!r}, but requires {' or '.join(allowed)}"
        remedy = "keys are the only way to log in here: see AuthenticationMethods in its sshd_config"
    if unused := access.unused(target):
        what += f". Not offered: {'; '.join(unused)}"
    access.refused(target)
    raise target.error("auth", what, remedy)
