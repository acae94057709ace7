"""The keys for logging in: those of the agent and of the identity files, each read and decrypted once for all hosts.

The agent is asked for its keys and for signatures (draft-ietf-sshm-ssh-agent). paramiko's own client supports only the
agent of SSH_AUTH_SOCK, but each host may have a different one (IdentityAgent).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from topoplan.remote.known_hosts import HostKey
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import TimedOut, within

if TYPE_CHECKING:
    from paramiko import Message, PKey

Ask = Callable[[str], str | None]
"""Shows a question and returns the answer, which is a secret; None if the user gives none."""

_AGENT_S = 5.0
_AGENT_AGAIN_S = 30.0
"""Time after which an agent whose keys were all refused may be asked again."""
_ASK_AT_MOST = 3
_REQUEST_IDENTITIES, _IDENTITIES, _SIGN_REQUEST, _SIGNATURE = 11, 12, 13, 14
_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE = "-cert-v01@openssh.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """The key of a host that was seen for the first time and has been added to a known-hosts file."""

    host: str
    key: HostKey
    file: Path


@dataclass(slots=True, kw_only=True)
class Access:
    """What may be asked and accepted while connecting, and the keys. To be shared by the hosts of a run.

    Passphrases are not kept; decrypted keys live as long as this object, in memory only.
    """

    ask: Ask | None = None
    """Asks for the passphrase of a key; never called concurrently. None: encrypted keys are skipped."""
    accept_new: bool = False
    """Whether to accept and record keys of hosts that no known-hosts file names. Changed keys are always refused."""
    on_new_key: Callable[[NewKey], None] = lambda new: None
    """Called for each accepted new key, from the connecting thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _files: dict[Path, PKey | str] = field(default_factory=dict)
    """By file: the key, or why there is none."""
    _agents: dict[Path, list[PKey] | str] = field(default_factory=dict)
    _asked_at: dict[Path, float] = field(default_factory=dict)

    def offers(self, target: Target) -> Iterator[tuple[str, PKey]]:
        """Yield the keys to offer, each with a name for messages, in the order in which ssh offers them.

        First the agent's keys that identity files name, then its other keys unless IdentitiesOnly is set, then the
        files. Encrypted files come last, so that the user is asked only if all other keys failed.
        """
        named = [blob for file in target.identity_files if (blob := _public_blob(file))]
        held = [(key.asbytes(), key) for key in self._agent_keys(target.agent)]
        chosen = [key for blob in named for have, key in held if have == blob]
        others = [] if target.identities_only else [key for have, key in held if have not in named]
        offered = set()
        for key in (*chosen, *others):
            offered.add(key.asbytes())
            yield "a key of the agent", key
        encrypted = []
        for file in target.identity_files:
            if not file.is_file() or _public_blob(file) in offered:
                continue
            with self._lock:
                if file not in self._files:
                    self._files[file] = _read_key(file, None)
                loaded = self._files[file]
            if loaded == _ENCRYPTED:
                encrypted.append(file)
            elif not isinstance(loaded, str) and loaded.asbytes() not in offered:
                yield str(file), loaded
        for file in encrypted:
            with self._lock:
                loaded = self._decrypt(file)
            if not isinstance(loaded, str):
                yield str(file), loaded

    def unused(self, target: Target) -> list[str]:
        """Return why keys of the target were not offered, one phrase each."""
        reasons = [f"{file}: {why}" for file in target.identity_files if isinstance(why := self._files.get(file), str)]
        if target.agent and isinstance(silent := self._agents.get(target.agent), str):
            reasons.append(f"agent {target.agent}: {silent}")
        return reasons

    def refused(self, target: Target) -> None:
        """Note that no key was accepted: the agent, which may be given others in a long run, is asked again later."""
        with self._lock:
            if target.agent and time.monotonic() - self._asked_at.get(target.agent, math.inf) > _AGENT_AGAIN_S:
                self._agents.pop(target.agent, None)

    def _decrypt(self, file: Path) -> PKey | str:
        """Ask for a passphrase, with the lock held: there is one question at a time, and one for each key."""
        loaded = self._files[file]
        if loaded != _ENCRYPTED or self.ask is None:
            return loaded
        for _ in range(_ASK_AT_MOST):
            answer = self.ask(f"Passphrase of {file}: ")
            if not answer:
                break
            self._files[file] = loaded = _read_key(file, answer)
            if loaded != _WRONG:
                return loaded
        self._files[file] = _WRONG if self._files[file] == _WRONG else _NO_ANSWER
        return self._files[file]

    def _agent_keys(self, path: Path | None) -> list[PKey]:
        if path is None:
            return []
        with self._lock:
            if path not in self._agents:
                self._asked_at[path] = time.monotonic()
                try:
                    self._agents[path] = within(_AGENT_S, lambda: keys_of(path))
                except TimedOut:
                    self._agents[path] = f"no answer for {_AGENT_S:g} s"
                except Exception as error:
                    self._agents[path] = str(error) or type(error).__name__
            keys = self._agents[path]
        return [] if isinstance(keys, str) else keys


_ENCRYPTED = "encrypted, and its passphrase could not be asked for"
_WRONG = "encrypted, and the passphrase was wrong"
_NO_ANSWER = "encrypted, and no passphrase was given"


def _read_key(file: Path, passphrase: str | None) -> PKey | str:
    from paramiko import PKey
    from paramiko.pkey import UnknownKeyType

    try:
        # By position, because paramiko 5 has renamed the parameter; and in bytes, contrary to its stubs.
        return PKey.from_path(file, None if passphrase is None else cast("str", passphrase.encode()))
    except OSError as error:
        return str(error.strerror)
    except UnknownKeyType:
        return "a kind of key that is not supported"
    except Exception as error:
        # cryptography and paramiko raise TypeError, ValueError and their own SSHException here.
        text = str(error).lower()
        if passphrase is None and ("encrypted" in text or "password" in text):
            return _ENCRYPTED
        return _WRONG if passphrase is not None else "not a private key that can be read"


def _public_blob(file: Path) -> bytes | None:
    """Return the public key beside a private one, or `file` itself if IdentityFile names a public key."""
    for candidate in (file, file.with_name(file.name + ".pub")):
        if candidate.suffix == ".pub":
            with contextlib.suppress(OSError, ValueError, IndexError):
                return base64.b64decode(candidate.read_text().split()[1])
    return None


def keys_of(path: Path) -> list[PKey]:
    """Return the keys that an agent holds; the connection stays open for signing. Has no time limit of its own.

    Raises OSError if there is no agent, SSHException if the socket is not an agent's or the agent has gone.
    """
    agent = _Agent(path)
    answer = agent.ask(_REQUEST_IDENTITIES, _IDENTITIES, "gives no keys")
    keys = []
    for _ in range(answer.get_int()):
        keys.append(_key_class()(agent, answer.get_binary()))
        answer.get_binary()  # the key's comment
    return keys


class _Agent:
    """A connection to an agent: one request and its response at a time."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise
        self._answers = self._socket.makefile("rb")

    def ask(self, kind: int, wanted: int, refusal: str, body: bytes = b"") -> Message:
        """Send a request; return the response. Raises SSHException with `refusal` if it is not of the wanted kind."""
        from paramiko import Message, SSHException

        with self._lock:
            self._socket.sendall(struct.pack(">IB", len(body) + 1, kind) + body)
            head = self._answers.read(5)
            if len(head) < 5:
                raise SSHException("the agent has gone")
            size, answered = struct.unpack(">IB", head)
            answer = Message(self._answers.read(size - 1))
        if answered != wanted:
            raise SSHException(f"the agent {refusal}")
        return answer


@functools.cache
def _key_class() -> type[Any]:
    """Return the class, which is created on first use because paramiko is slow to import."""
    from paramiko import Message, PKey

    class AgentKey(PKey):
        """A key whose private half only the agent has."""

        public_blob = None

        def __init__(self, agent: _Agent, blob: bytes) -> None:
            self._agent = agent
            self._blob = blob

        def asbytes(self) -> bytes:
            return self._blob

        def get_name(self) -> str:
            return Message(self._blob).get_text()

        def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Any:
            question = Message()
            question.add_string(self._blob)
            question.add_string(data)
            question.add_int(_FLAGS.get((algorithm or "").removesuffix(_CERTIFICATE), 0))
            refusal = "does not sign with this key"
            return self._agent.ask(_SIGN_REQUEST, _SIGNATURE, refusal, question.asbytes()).get_binary()

    return AgentKey
