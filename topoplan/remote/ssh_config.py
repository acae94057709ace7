"""How to reach a host: first the spec's settings, then the user's SSH configuration, then SSH's own defaults.

The configuration is evaluated by OpenSSH's own client (`ssh -G`), so that Include, every kind of Match, canonical names
and the order of precedence mean the same as for `ssh HOST`. paramiko's parser lacks Include and treats unknown Match
criteria as met. As with ssh, a `Match exec` runs its command.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from topoplan.errors import HostError, HostProblem, InputError
from topoplan.specs.cluster import Host

_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_STRICT = {"true": "yes", "false": "no", "off": "no"}
_READ_S = 20.0
"""Time limit for evaluating the configuration: a `Match exec` or a canonical name can wait for a network."""
_MOST_HOPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One SSH server and how to log in to it. Targets with the same settings are equal."""

    name: str
    """The user's name for the host, in messages and results: the spec's address, with `:port` if given."""
    alias: str
    """The address in the spec, by which `ssh` on the command line finds the host's settings."""
    hostname: str
    user: str
    port: int = 22
    identity_files: tuple[Path, ...] = ()
    """Private keys in the order in which they are offered. Files that do not exist are skipped."""
    identities_only: bool = False
    """Offer only these keys, and no others from the agent: servers disconnect after a few keys."""
    agent: Path | None = None
    """Socket of the agent; None if no agent is to be asked."""
    jumps: tuple[Target, ...] = ()
    """Hosts to go through, the first one first. They have no jumps of their own."""
    proxy_command: str | None = None
    """Shell command whose standard input and output are the connection; with jumps, it leads to the first jump host."""
    user_known_hosts_files: tuple[Path, ...] = ()
    """New keys are added to the first file."""
    global_known_hosts_files: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    """Name of the key in the known-hosts files, instead of the host's own name."""
    hash_known_hosts: bool = False
    """Whether to write names into the known-hosts file as hashes."""
    strict_host_key_checking: str = "ask"
    """`yes` and `ask` refuse unknown keys, `accept-new` and `no` accept and record them; changed ones are refused."""
    connect_timeout_s: float | None = None
    """Time limit for the connection before keys are exchanged; None leaves it to the caller."""
    address_family: str = "any"

    @property
    def key_name(self) -> str:
        """The name under which known-hosts files list the host's key."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname.lower() if self.port == 22 else f"[{self.hostname.lower()}]:{self.port}"

    @property
    def ssh(self) -> str:
        """The command with which a person would log in to the host."""
        port = [] if self.name == self.alias else ["-p", str(self.port)]
        return shlex.join(["ssh", *port, f"{self.user}@{self.alias}"])

    def error(self, problem: HostProblem, what: str, remedy: str = "") -> HostError:
        """Return the error for a host that cannot be reached, or fails to do what it should."""
        return HostError(what, host=self.name, problem=problem, remedy=remedy)


def placeholders(hosts: Iterable[Host]) -> dict[str, Target]:
    """Return targets with the hosts' own words, looked up nowhere: for hosts that do not exist."""
    return {
        host.address: Target(name=host.address, alias=host.address, hostname=host.address, user=host.user or "")
        for host in hosts
    }


class SshConfig:
    """Looks up the targets of hosts. Jump hosts shared by several hosts are looked up once."""

    def __init__(self, file: Path | None = None) -> None:
        """Use `file` in place of `~/.ssh/config` and the system's file, as `ssh -F file` does.

        Raises InputError if it cannot be read, or if a configuration exists without an `ssh` to evaluate it.
        """
        self._home = Path.home()
        own = self._home / ".ssh" / "config"
        if file is not None:
            try:
                file.read_bytes()
            except OSError as error:
                raise InputError(
                    f"cannot be read: {error.strerror}", where=str(file), expected="expected an SSH configuration"
                ) from None
        self._files = (file.absolute(),) if file is not None else (own, _SYSTEM_CONFIG)
        self._ssh = shutil.which("ssh")
        if self._ssh is None and (file is not None or own.exists()):
            raise InputError(
                "no `ssh` on this machine to read it with",
                where=str(file or own),
                remedy="install OpenSSH's client, or give address, user and port of each host in the spec",
            )
        self._hops: dict[str, tuple[Target, ...]] = {}

    def target(self, host: Host) -> Target:
        """Return the target of a host; the spec's user and port override the configuration, as on ssh's command line.

        Raises InputError: the configuration is wrong, or its jump hosts form a cycle.
        """
        alias = _bare(host.address)
        name = alias if host.port is None else f"[{alias}]:{host.port}" if ":" in alias else f"{alias}:{host.port}"
        target, jump = self._look_up(name, alias, host.user, host.port)
        return replace(target, jumps=self._chain(jump, (name,)))

    def targets(self, hosts: Iterable[Host]) -> dict[str, Target]:
        """Return the targets of hosts by name, in order. Raises InputError, as `target`."""
        with ThreadPoolExecutor(8) as pool:
            return {target.name: target for target in pool.map(self.target, hosts)}

    def _chain(self, jump: str, trail: tuple[str, ...]) -> tuple[Target, ...]:
        """Return the hosts that a ProxyJump leads through; as in ssh, only the first one's own ProxyJump counts."""
        if not jump:
            return ()
        if jump not in self._hops:
            hops: list[Target] = []
            for position, word in enumerate(jump.split(",")):
                if word in trail or len(trail) > _MOST_HOPS:
                    raise InputError(
                        "jump hosts lead in a circle: " + " -> ".join((*trail, word)),
                        where=self._place,
                        remedy="see ProxyJump of these hosts",
                    )
                hop, before = self._look_up(word, *_split_jump(word))
                if position == 0:
                    hops += self._chain(before, (*trail, word))
                else:
                    hop = replace(hop, proxy_command=None)
                hops.append(hop)
            self._hops[jump] = tuple(hops)
        return self._hops[jump]

    def _look_up(self, name: str, address: str, user: str | None, port: int | None) -> tuple[Target, str]:
        """Return one host's own settings, without its jumps, and its ProxyJump value."""
        said = self._ask_ssh(address, user, port) if self._ssh else {}

        def one(key: str, otherwise: str = "") -> str:
            value = said.get(key, [otherwise])[0]
            return "" if value.lower() == "none" else value

        hostname = one("hostname", address)
        login = user or one("user", getpass.getuser())
        at = port or int(one("port", "22"))
        ssh_directory = self._home / ".ssh"
        tokens = {
            "%": "%",
            "d": str(self._home),
            "h": hostname,
            "k": one("hostkeyalias", address),
            "L": socket.gethostname().split(".")[0],
            "l": socket.gethostname(),
            "n": address,
            "p": str(at),
            "r": login,
            "u": getpass.getuser(),
            "i": str(os.getuid()),
        }
        agent = one("identityagent", "SSH_AUTH_SOCK")
        agent = os.environ.get(agent, "") if agent == "SSH_AUTH_SOCK" else os.path.expandvars(_expand(agent, tokens))
        keys = [one_key for one_key in said.get("identityfile", []) if one_key.lower() != "none"]
        if not said:
            keys = [str(ssh_directory / key) for key in _DEFAULT_KEYS]
        return Target(
            name=name,
            alias=address,
            hostname=_bare(hostname),
            user=login,
            port=at,
            identity_files=tuple(Path(_expand(key, tokens)).expanduser() for key in keys),
            identities_only=one("identitiesonly") == "yes",
            agent=Path(agent).expanduser() if agent else None,
            proxy_command=_expand(one("proxycommand"), tokens) or None,
            user_known_hosts_files=_paths(one("userknownhostsfile", str(ssh_directory / "known_hosts")), tokens),
            global_known_hosts_files=_paths(one("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"), tokens),
            host_key_alias=one("hostkeyalias") or None,
            hash_known_hosts=one("hashknownhosts") == "yes",
            strict_host_key_checking=_STRICT.get((strict := one("stricthostkeychecking", "ask")), strict),
            connect_timeout_s=float(wait) if (wait := one("connecttimeout")) else None,
            address_family=one("addressfamily", "any"),
        ), one("proxyjump")

    def _ask_ssh(self, address: str, user: str | None, port: int | None) -> Mapping[str, list[str]]:
        """Return every setting that ssh would use, by its name in lower case."""
        command = [str(self._ssh), "-G", "-F", "/dev/stdin"]
        command += ["-l", user] if user else []
        command += ["-p", str(port)] if port else []
        # ssh takes the home directory from the password database, whatever $HOME is. Here $HOME counts, as for other
        # programs: the files are named explicitly, and the last line replaces ssh's own default.
        quoted = [f'"{self._home}/.ssh/{name}"' for name in ("known_hosts", "known_hosts2")]
        lines = [f'Include "{file}"' for file in self._files if file.exists()]
        lines += ["Host *", "UserKnownHostsFile " + " ".join(quoted)]
        try:
            done = subprocess.run(
                [*command, "--", address],
                input="\n".join(lines) + "\n",
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=_READ_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise InputError(
                f"ssh did not finish reading it within {_READ_S:g} s, for host {address}",
                where=self._place,
                remedy=f"try: {shlex.join(['ssh', '-G', address])}",
            ) from None
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if "terminating" not in line and "Pseudo-" not in line]
            raise InputError(
                f"ssh cannot use it for host {address}: {said[0] if said else f'exit code {done.returncode}'}",
                where=self._place,
                remedy=f"try: {shlex.join(['ssh', '-G', address])}",
            )
        settings: dict[str, list[str]] = defaultdict(list)
        for line in done.stdout.splitlines():
            key, _, value = line.partition(" ")
            settings[key].append(value)
        return settings

    @property
    def _place(self) -> str:
        return str(self._files[0])


def _bare(address: str) -> str:
    """Return an address, without the brackets of an IPv6 address."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def _split_jump(word: str) -> tuple[str, str | None, int | None]:
    """Parse `[user@]host[:port]` or an `ssh://` URI into address, user and port; ssh has checked the form."""
    user, _, place = word.removeprefix("ssh://").rstrip("/").rpartition("@")
    head, colon, tail = place.rpartition(":")
    if colon and tail.isdigit() and (head.count(":") == 0 or head.endswith("]")):
        return _bare(head), user or None, int(tail)
    return _bare(place), user or None, None


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    """Expand `%h` and other tokens; unknown ones are left unchanged."""
    head, *rest = text.split("%")
    pieces = [head]
    while rest:
        piece = rest.pop(0)
        if piece == "" and rest:  # "%%"
            pieces.append("%" + rest.pop(0))
        else:
            pieces.append(tokens.get(piece[:1], "%" + piece[:1]) + piece[1:])
    return "".join(pieces)


def _paths(value: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files of a setting. `ssh -G` separates them by blanks, so names with blanks are not supported."""
    return tuple(Path(_expand(word, tokens)).expanduser() for word in value.split())
