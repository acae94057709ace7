"""An SSH agent that is asked for its keys and for signatures (draft-ietf-sshm-ssh-agent).

paramiko's own client supports only the agent of SSH_AUTH_SOCK, but each host may have a different one (IdentityAgent).
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramiko import Message, PKey

_REQUEST_IDENTITIES, _IDENTITIES, _SIGN_REQUEST, _SIGNATURE = 11, 12, 13, 14
_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE = "-cert-v01@openssh.com"


def keys_of(path: Path) -> list[PKey]:
    """Return the keys that an agent holds; the connection stays open for signing. Has no time limit of its own.

    Raises:
        OSError: there is no agent.
        SSHException: the socket is not an agent's, or the agent has gone.
    """
    agent = _Agent(path)
    kind, answer = agent.ask(_REQUEST_IDENTITIES)
    if kind != _IDENTITIES:
        raise agent.trouble("gives no keys")
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

    def ask(self, kind: int, body: bytes = b"") -> tuple[int, Message]:
        """Send a request; return the type of the response and its contents."""
        from paramiko import Message

        with self._lock:
            self._socket.sendall(struct.pack(">IB", len(body) + 1, kind) + body)
            head = self._answers.read(5)
            if len(head) < 5:
                raise self.trouble("has gone")
            size, answered = struct.unpack(">IB", head)
            return answered, Message(self._answers.read(size - 1))

    def trouble(self, what: str) -> Exception:
        """Return the error for an agent that does not behave as it should."""
        from paramiko import SSHException

        return SSHException(f"the agent {what}")


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
            kind, answer = self._agent.ask(_SIGN_REQUEST, question.asbytes())
            if kind != _SIGNATURE:
                raise self._agent.trouble("does not sign with this key")
            return answer.get_binary()

    return AgentKey
