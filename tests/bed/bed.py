"""SSH test hosts without machines: real sshd processes in network namespaces.

Each has its own address, host name, /etc/hosts and host key, and is connected to bridges that represent networks.
Namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN. Without them the sshd processes listen on loopback addresses:
logins are just as real, but no cable can be cut and every host sees every other one.

Beds of other processes on the same machine are left alone: each reserves a number, which is part of all its names and
addresses. The leftovers of a bed that died are removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.waiting import LIMIT_S
from topoplan.remote.ssh_config import Target

Kind = Literal["namespaces", "loopback"]
Hiding = Literal["drop", "deaf", "mute", "unreachable", "reset"]
"""What a client sees of a hidden host: silence, possibly in one direction only, a router's error, or refused
connections.
"""
HalfHiding = Literal["lossy"]
"""Three packets of ten are lost."""
_DROP = ["-j", "DROP"]
_SOME = ["-m", "statistic", "--mode", "random", "--probability", "0.3"]
_REJECT = ["-j", "REJECT", "--reject-with"]
_HIDING: dict[Hiding | HalfHiding, dict[str, list[str]]] = {
    "drop": {"INPUT": _DROP, "OUTPUT": _DROP},
    "deaf": {"INPUT": _DROP},
    "mute": {"OUTPUT": _DROP},
    "unreachable": {"INPUT": [*_REJECT, "icmp-host-unreachable"], "OUTPUT": _DROP},
    "lossy": {"INPUT": [*_SOME, *_DROP], "OUTPUT": [*_SOME, *_DROP]},
    "reset": {"INPUT": [*_REJECT, "tcp-reset"]},  # it is by the same way that the client is told
}
"""Firewall rules of the host, by chain."""

PREFIX = "tpbed"
STATE = Path(tempfile.gettempdir()) / f"topoplan-beds-{os.getuid()}"
"""One file for each bed: its creator, its processes and what to remove."""
LOOPBACK_PORT = 2222
MANY = 24
"""Number of machines that can all find each other. With more, the shared kernel would have to discover more neighbors
than it keeps (net.ipv4.neigh.default.gc_thresh3: 1024, for all namespaces), so they get permanent entries.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host to be created."""

    name: str
    networks: tuple[str, ...] = ("outer",)
    """The client is on `outer` only. A machine on two networks does not forward packets; it can be a jump host."""
    options: tuple[str, ...] = ()
    """Lines for its sshd_config before the usual ones: the first value of an option applies."""


@dataclass(kw_only=True)
class BedHost:
    """A running machine."""

    machine: Machine
    addresses: dict[str, str]
    """By network."""
    port: int
    directory: Path
    public_key: str
    """Public key of the host, `ssh-ed25519 AAAA...`."""
    sshd: subprocess.Popen[bytes] | None = None
    wires: dict[str, str] = field(default_factory=dict)
    """The bridge's end of the host's cables, by network."""

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def address(self) -> str:
        """Address on the host's first network."""
        return self.addresses[self.machine.networks[0]]

    @property
    def key_name(self) -> str:
        """Name of the host in a known-hosts file."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


@functools.cache
def probe() -> tuple[Kind | None, str]:
    """Return the best kind of bed that is possible here, and why nothing better is."""
    if missing := [tool for tool in ("sshd", "ssh", "ssh-agent", "ps") if not _tool(tool)]:
        return None, f"not installed: {', '.join(missing)} (Debian: openssh-server openssh-client procps)"
    if os.environ.get("TOPOPLAN_TEST_BED") == "loopback":
        return "loopback", "TOPOPLAN_TEST_BED=loopback"
    if os.getuid() != 0:
        return "loopback", "not root"
    if missing := [tool for tool in ("ip", "ss", "iptables", "unshare", "hostname") if not _tool(tool)]:
        return "loopback", f"not installed: {', '.join(missing)} (Debian: iproute2 iptables)"
    trial = f"{PREFIX}-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode != 0:
        return "loopback", f"no network namespaces: {made.stderr.strip()}"
    try:
        inside = ["ip", "netns", "exec", trial, "unshare", "--uts", "hostname", "trial"]
        for command in (["ip", "-n", trial, "link", "add", "br0", "type", "bridge"], inside):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return "loopback", f"`{shlex.join(command)}`: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", trial], capture_output=True)
    return "namespaces", ""


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


class Bed:
    """Hosts that run until `close`. To be used as a context manager."""

    def __init__(self, directory: Path, machines: Sequence[Machine], *, kind: Kind | None = None) -> None:
        """Create the machines, with keys and files under `directory`."""
        with removing():
            remove_leftovers()
        found, reason = probe()
        if found is None:
            raise RuntimeError(reason)
        self.kind: Kind = kind or found
        self.directory = directory
        self.user = getpass.getuser()
        self.number, self._state = _reserve()
        self.hosts: dict[str, BedHost] = {}
        self._namespaces: list[str] = []
        self._bridges: list[str] = []
        self._note()  # at once: a reservation without an owner is removed after a while
        self.home = directory / "home"
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        self.key = ssh / "id_ed25519"
        self.known_hosts = ssh / "known_hosts"
        (directory / "authorized_keys").write_text(new_key(self.key) + "\n")
        self.networks = list(dict.fromkeys(network for machine in machines for network in machine.networks))
        try:
            for index, machine in enumerate(machines):
                self._add(index, machine)
            self._note()
            if self.kind == "namespaces":
                self._wire_up()
            for host in self.hosts.values():
                self._start(host)
            for host in self.hosts.values():
                self._wait_for(host)
        except BaseException:
            self.close()
            raise
        self.known_hosts.write_text("".join(f"{host.key_name} {host.public_key}\n" for host in self.hosts.values()))

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> BedHost:
        return self.hosts[name]

    # ------------------------------------------------------------------------------------------------ the client's view

    def target(self, host_name: str, /, *jumps: str, **changes: object) -> Target:
        """Return the login target of a host, with the bed's key and known hosts; `changes` are fields of the target."""
        host = self.hosts[host_name]
        settings: dict[str, object] = {
            "name": host_name,
            "alias": host_name,
            "hostname": host.address,
            "user": self.user,
            "port": host.port,
            "identity_files": (self.key,),
            "user_known_hosts_files": (self.known_hosts,),
            "jumps": tuple(self.target(jump) for jump in jumps),
            **changes,
        }
        return Target(**settings)  # type: ignore[arg-type]

    def ssh(self, name: str, *command: str) -> list[str]:
        """Return the command line of OpenSSH's client for a host."""
        host = self.hosts[name]
        options = [f"UserKnownHostsFile={self.known_hosts}", f"IdentityFile={self.key}", "IdentitiesOnly=yes"]
        options += ["IdentityAgent=none", "BatchMode=yes", "GlobalKnownHostsFile=/dev/null"]
        flags = [word for option in options for word in ("-o", option)]
        return ["ssh", "-F", "/dev/null", *flags, "-p", str(host.port), f"{self.user}@{host.address}", *command]

    # ------------------------------------------------------------------------------------------------ faults

    def cut(self, name: str) -> None:
        """Disconnect the host's cables without any notification."""
        for wire in self.hosts[name].wires.values():
            _ip("link", "set", wire, "down")

    def heal(self, name: str) -> None:
        """Reconnect the host's cables."""
        for wire in self.hosts[name].wires.values():
            _ip("link", "set", wire, "up")

    @contextlib.contextmanager
    def partition(self, one: str, other: str) -> Iterator[None]:
        """Drop all packets between two hosts; the client still reaches both."""
        rules = [
            [*self._inside(mine), "-A", "INPUT", "-s", address, "-j", "DROP"]
            for mine, theirs in ((one, other), (other, one))
            for address in self.hosts[theirs].addresses.values()
        ]
        for rule in rules:
            subprocess.run(rule, check=True)
        try:
            yield
        finally:
            for rule in rules:
                subprocess.run(["-D" if word == "-A" else word for word in rule], check=True)

    @contextlib.contextmanager
    def closed_but_for(self, port: int) -> Iterator[None]:
        """Let a firewall on each host admit the other hosts at one port only; the client still reaches all."""
        others = ["!", "-s", f"10.213.{self.number}.1", "!", "-i", "lo"]
        rule = ["INPUT", *others, "-p", "tcp", "--syn", "!", "--dport", str(port), "-j", "DROP"]
        for name in self.hosts:
            subprocess.run([*self._inside(name), "-A", *rule], check=True)
        try:
            yield
        finally:
            for name in self.hosts:
                subprocess.run([*self._inside(name), "-D", *rule], check=True)

    def _inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(name), "iptables", "-w"]

    def hide(self, *names: str, how: Hiding | HalfHiding = "drop") -> None:
        """Hide hosts (all, if none is named) from the client, and the client from them; they see each other."""
        self._hiding(names, "-A", how)

    def show(self, *names: str, how: Hiding | HalfHiding = "drop") -> None:
        """Undo `hide`."""
        self._hiding(names, "-D", how)

    def _hiding(self, names: Sequence[str], action: str, how: Hiding | HalfHiding) -> None:
        # In the hosts' namespaces, which are removed with the bed; in all at once, as far as possible.
        client = f"10.213.{self.number}.1"
        commands = [
            [*self._inside(name), action, chain, "-p", "tcp", "-s" if chain == "INPUT" else "-d", client, *fate]
            for name in names or self.hosts
            for chain, fate in _HIDING[how].items()
        ]
        for command, process in [(command, subprocess.Popen(command)) for command in commands]:
            if process.wait() != 0:
                raise RuntimeError(f"`{shlex.join(command)}`: exit code {process.returncode}")

    @contextlib.contextmanager
    def hidden(self, *names: str, how: Hiding | HalfHiding = "drop") -> Iterator[None]:
        """Hide hosts from the client for a while."""
        self.hide(*names, how=how)
        try:
            yield
        finally:
            self.show(*names, how=how)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop the host's sshd and its sessions without ending them; the kernel still answers for them."""
        sshd = self.hosts[name].sshd
        stopped = [sshd.pid] if sshd is not None else []
        # The listener first, whose name then changes, so that no new session begins.
        while True:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            found = {pid for pid, words in self.processes(name).items() if words.startswith("sshd")}
            if found <= set(stopped):
                break
            stopped += found - set(stopped)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end_sessions(self, name: str) -> None:
        """End all sessions of the host's sshd. What they started goes on, and new logins are possible."""
        for pid, words in self.processes(name).items():
            if words.startswith("sshd: ") and "[listener]" not in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def restart(self, name: str, *, options: Sequence[str] = (), new_key: bool = False) -> None:
        """Restart the host's sshd, which ends its sessions, with options before its own or with another host key."""
        host = self.hosts[name]
        self._stop(host)
        if new_key:
            host.public_key = _new_host_key(host.directory)
        self._start(host, options)
        self._wait_for(host)

    @contextlib.contextmanager
    def restarted(self, name: str, *options: str) -> Iterator[None]:
        """Have the host's sshd run with these options before its own."""
        self.restart(name, options=options)
        try:
            yield
        finally:
            self.restart(name)

    def reboot(self, name: str, down_s: float) -> None:
        """Shut a host down, and boot it after a while."""
        self.shut_down(name)
        time.sleep(down_s)
        self.boot(name)

    def shut_down(self, name: str) -> None:
        """End all processes of a host."""
        self._stop(self.hosts[name])

    def boot(self, name: str) -> None:
        """Start the sshd of a host that was shut down, in another boot of the machine."""
        host = self.hosts[name]
        boot = host.directory / "boot_id"
        boot.write_text(f"{uuid.uuid4()}\n")
        self._start(host)
        self._wait_for(host)

    def processes(self, name: str) -> dict[int, str]:
        """Return the command lines on a host by process id, sshd included."""
        host = self.hosts[name]
        if self.kind == "namespaces":
            pids = [int(word) for word in _ip("netns", "pids", self._namespace(name)).split()]
        else:
            pids = [host.sshd.pid] if host.sshd else []
            pids += [pid for pid in _all_pids() if f"{host.address} {host.port}" in _environment(pid)]
            pids += [pid for pid in _all_pids() if _parent(pid) in pids and pid not in pids]
        lines = {pid: _command_line(pid) for pid in pids}
        return {pid: line for pid, line in lines.items() if line}

    # ------------------------------------------------------------------------------------------------ making and ending

    def close(self) -> None:
        """End what was started and remove what was created."""
        for host in self.hosts.values():
            self._stop(host)
        if self.kind == "namespaces":
            _remove_network(self._wires(), self._namespaces, self._bridges)
        self._state.unlink(missing_ok=True)

    def _wires(self) -> list[str]:
        return [wire for host in self.hosts.values() for wire in host.wires.values()]

    def _add(self, index: int, machine: Machine) -> None:
        directory = self.directory / machine.name
        (directory / "home").mkdir(parents=True)
        if self.kind == "namespaces":
            addresses = {
                network: f"10.{213 + self.networks.index(network)}.{self.number}.{index + 10}"
                for network in machine.networks
            }
            port = 22
        else:
            addresses = dict.fromkeys(machine.networks, f"127.77.{self.number}.{index + 10}")
            port = LOOPBACK_PORT
        wires = {network: f"{PREFIX}{self.number}-{index}x{end}" for end, network in enumerate(machine.networks)}
        self.hosts[machine.name] = BedHost(
            machine=machine,
            addresses=addresses,
            port=port,
            directory=directory,
            public_key=_new_host_key(directory),
            wires=wires if self.kind == "namespaces" else {},
        )
        if self.kind == "namespaces":
            self._namespaces.append(self._namespace(machine.name))

    def _namespace(self, name: str) -> str:
        return f"{PREFIX}{self.number}-{name}"

    def _wire_up(self) -> None:
        lines = []
        self._bridges = [f"{PREFIX}{self.number}-b{index}" for index in range(len(self.networks))]
        self._note()
        for bridge in self._bridges:
            lines += [f"link add {bridge} type bridge", f"link set {bridge} up"]
        lines.append(f"addr add 10.213.{self.number}.1/24 dev {self._bridges[0]}")
        inside: dict[str, list[str]] = {}
        names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts.values())
        for host in self.hosts.values():
            namespace = self._namespace(host.name)
            etc = Path("/etc/netns") / namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(names)
            (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
            lines.append(f"netns add {namespace}")
            inside[namespace] = ["link set lo up"]
            for index, (network, wire) in enumerate(host.wires.items()):
                bridge = self._bridges[self.networks.index(network)]
                mac = _hardware_address(host, network)
                lines.append(f"link add {wire} type veth peer name eth{index} address {mac} netns {namespace}")
                lines.append(f"link set {wire} master {bridge} up")
                inside[namespace] += [
                    f"addr add {host.addresses[network]}/24 dev eth{index}",
                    f"link set eth{index} up",
                ]
                if len(self.hosts) > MANY:
                    inside[namespace] += [
                        f"neigh add {other.addresses[network]} dev eth{index} lladdr"
                        f" {_hardware_address(other, network)}"
                        for other in self.hosts.values()
                        if network in other.addresses and other is not host
                    ]
        _ip("-batch", "-", lines=lines)
        for namespace, own in inside.items():
            _ip("-n", namespace, "-batch", "-", lines=own)

    def _start(self, host: BedHost, options: Sequence[str] = ()) -> None:
        listen = "0.0.0.0" if self.kind == "namespaces" else host.address
        lines = [
            *options,
            *host.machine.options,
            f"ListenAddress {listen}:{host.port}",
            f"HostKey {host.directory}/host_key",
            f"AuthorizedKeysFile {self.directory}/authorized_keys",
            "PidFile none",
            # A separate home directory, so that no real ~/.bashrc is read.
            f"SetEnv HOME={host.directory}/home",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PrintMotd no",
            "MaxStartups 100:30:200",
        ]
        config = host.directory / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        command = [str(_tool("sshd")), "-D", "-f", str(config), "-E", str(host.directory / "log")]
        if self.kind == "namespaces":
            named = f"hostname {shlex.quote(host.name)} && exec {shlex.join(command)}"
            boot = host.directory / "boot_id"
            if boot.exists():
                named = f"mount --bind {shlex.quote(str(boot))} /proc/sys/kernel/random/boot_id && {named}"
            command = ["ip", "netns", "exec", self._namespace(host.name), "unshare", "--uts", "sh", "-c", named]
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        host.sshd = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._note()

    def _stop(self, host: BedHost) -> None:
        """End the sshd, its sessions and all that they started, as a power cut does."""
        if host.sshd is None:
            return
        end = time.monotonic() + LIMIT_S
        while (running := set(self.processes(host.name))) and time.monotonic() < end:
            # All are frozen before one is ended: an sshd that outlives a command of its session would report its end.
            for sent in (signal.SIGSTOP, signal.SIGKILL):
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sent)
            host.sshd.poll()
            time.sleep(0.01)
        host.sshd.kill()
        host.sshd.wait()
        host.sshd = None

    def _wait_for(self, host: BedHost) -> None:
        """Wait until the host's sshd listens, as seen from the client or from the host itself."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            if host.sshd is not None and host.sshd.poll() is not None:
                break
            if self.kind == "namespaces":
                if _ip("netns", "exec", self._namespace(host.name), "ss", "-Hltn", f"sport = :{host.port}").strip():
                    return
            else:
                with contextlib.suppress(OSError), socket.create_connection((host.address, host.port), 1):
                    return
            time.sleep(0.01)
        log = host.directory / "log"
        raise RuntimeError(f"sshd of {host.name} does not run: {log.read_text() if log.exists() else 'no log'}")

    def _note(self) -> None:
        """Save what would have to be removed if this process died now."""
        left = {
            "owner": [os.getpid(), _start_time(os.getpid())],
            "wires": self._wires(),
            "namespaces": self._namespaces,
            "bridges": self._bridges,
            "processes": [[host.sshd.pid, _start_time(host.sshd.pid)] for host in self.hosts.values() if host.sshd],
        }
        self._state.write_text(json.dumps(left))


@contextlib.contextmanager
def small_disk(place: Path, options: str = "size=1m", *, inside: Bed | None = None, name: str = "") -> Iterator[Path]:
    """Mount a tmpfs, as a host sees it, or this machine without one; yield the path by which we see it."""
    sshd = inside[name].sshd if inside else None
    prefix = ["nsenter", "-t", str(sshd.pid), "-m"] if sshd else []
    made = subprocess.run([*prefix, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no mounts here")
    try:
        yield Path(f"/proc/{sshd.pid}/root{place}") if sshd else place
    finally:
        subprocess.run([*prefix, "umount", "-l", str(place)], check=True)


def fill_disk(place: Path) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), (place / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))


def under_way(bed: Bed, name: str, before: Collection[int] = ()) -> list[str]:
    """Return what a host runs for clients, present or gone: sshd sessions and programs of ours, but no jobs.

    `before` are process ids that do not count.
    """
    lines = [line for pid, line in bed.processes(name).items() if pid not in before]
    sessions = [line for line in lines if line.startswith("sshd") and "[listener]" not in line]
    return sessions + [line for line in lines if "--norc" in line]


def new_key(file: Path, passphrase: str = "") -> str:
    """Write a new key pair; return the public key in the format of authorized_keys."""
    key = Ed25519PrivateKey.generate()
    seal: KeySerializationEncryption = NoEncryption()
    if passphrase:
        seal = PrivateFormat.OpenSSH.encryption_builder().kdf_rounds(1).build(passphrase.encode())
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, seal))
    file.chmod(0o600)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    file.with_name(file.name + ".pub").write_text(public + "\n")
    return public


@contextlib.contextmanager
def removing() -> Iterator[None]:
    """Hold the lock for removing beds: the number of a removed bed may be that of a new one a moment later."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(STATE / "removing", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_leftovers() -> None:
    """Remove the namespaces, bridges and processes of beds whose process is gone, and nothing else.

    Needs the lock of `removing`.
    """
    for state in STATE.glob("*.json"):
        try:
            written = state.stat().st_mtime
            left = json.loads(state.read_text())
        except FileNotFoundError:  # closed meanwhile
            continue
        except (OSError, ValueError):
            if time.time() - written > 60:
                state.unlink(missing_ok=True)
            continue
        pid, started = left["owner"]
        if _start_time(pid) == started:
            continue
        for pid, started in left["processes"]:
            if _start_time(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for namespace in left["namespaces"]:
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
            for word in pids.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
        _remove_network(left.get("wires", ()), left["namespaces"], left["bridges"])
        state.unlink(missing_ok=True)


def _remove_network(wires: Iterable[str], namespaces: Iterable[str], bridges: Iterable[str]) -> None:
    # Wires first: the kernel removes a namespace slowly, and the next bed with this number needs their names.
    for link in (*wires, *bridges):
        subprocess.run(["ip", "link", "del", link], capture_output=True)
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def _hardware_address(host: BedHost, network: str) -> str:
    """Return a MAC address derived from the IP address: 10.213.1.10 has 02:00:0a:d5:01:0a."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in host.addresses[network].split("."))


def _reserve() -> tuple[int, Path]:
    """Reserve a number that no other bed on this machine has; return it with the file of the reservation."""
    for number in range(1, 255):
        state = STATE / f"{number}.json"
        with contextlib.suppress(FileExistsError):
            state.touch(exist_ok=False)
            return number, state
    raise RuntimeError(f"no bed is free, see {STATE}")


def _new_host_key(directory: Path) -> str:
    return new_key(directory / "host_key")


def _ip(*words: str, lines: Sequence[str] = ()) -> str:
    done = subprocess.run(["ip", *words], input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _start_time(pid: int) -> str:
    """Return the start time, which distinguishes a process from a later one with the same process id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _command_line(pid: int) -> str:
    """Return the command line of a process; empty for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
