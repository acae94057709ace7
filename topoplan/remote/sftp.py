"""New files on a host by SFTP: version 3, which is all that OpenSSH speaks (draft-ietf-secsh-filexfer-02).

Only what an upload needs: open, write, close. paramiko's own client waits for an answer at the start and the end of
every file, has no time limits, and sends to a channel that may be closing (see `topoplan.remote.channel`). Here all
requests of many files are under way at once: two round trips for all of them, after one for the greeting.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from topoplan.remote.connection import Chunk, Stream
from topoplan.remote.waiting import Deadline, Overtime

_INIT, _VERSION, _OPEN, _CLOSE, _WRITE, _STATUS, _HANDLE = 1, 2, 3, 4, 6, 101, 102
_OK = struct.pack(">I", 0)
_NEW_FILE = 0x02 | 0x08 | 0x20
"""SSH_FXF_WRITE, CREAT and EXCL."""
_DATA_BYTES = 32 * 1024
"""Of one request: what every server takes (section 3)."""
_REPLY_BYTES = 256 * 1024
"""More is no reply but something else, such as the greeting of a shell."""
_AT_ONCE = 64
"""Files that are open at the same time."""
_HAND_OVER_BYTES = 2**20
_SENDING_S = 0.005
"""How often to look whether the host takes more."""
_LOOK_S = 0.25
"""How often to look for what rings no bell."""


class Refused(Exception):  # noqa: N818  no error by itself: there is another way
    """The server is none, or does not do what it was asked for."""


class _Reply(NamedTuple):
    kind: int
    payload: bytes
    """What follows the kind; first the number of the request."""


class Writer:
    """Writes new files. Use it from one thread."""

    def __init__(self, stream: Stream, deadline: Deadline) -> None:
        """Talk to the server behind `stream`, until the deadline."""
        self._stream = stream
        self._deadline = deadline
        self._came = bytearray()
        self._requests = 0

    def greet(self, limit_s: float) -> None:
        """Say hello, and wait for the answer; `limit_s` at most.

        Raises:
            Overtime: there was none.
            Refused: another one than that of an SFTP server.
            HostError: `lost`.
        """
        self._stream.write(_packet(_INIT, struct.pack(">I", 3)))
        limit = Deadline(min(limit_s, self._deadline.left_s))
        while (reply := self._reply()) is None:
            self._listen(limit, limit.left_s)
        if reply.kind != _VERSION:
            raise Refused

    def put(self, directory: bytes, files: Mapping[str, bytes]) -> None:
        """Write files that are not there yet, by their names in `directory`; all directories are there.

        Raises:
            Overtime: the deadline has passed.
            Refused: some file could not be written. The protocol has no word for most reasons.
            HostError: `lost`.
        """
        names = list(files)
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            opened = self._ask(_open(directory + b"/" + name.encode(errors="surrogateescape")) for name in some)
            self._ask(_written(opened, [files[name] for name in some]))

    def close(self) -> None:
        """Close; the server ends."""
        self._stream.close()

    def _ask(self, requests: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """What each of the requests gave, many being under way at a time: a handle, or nothing."""
        first = self._requests
        replies: dict[int, bytes] = {}
        waiting = iter(requests)
        more = True
        while more or len(replies) < self._requests - first:
            if more and not self._stream.feeding:
                more = self._send(waiting)
            while (reply := self._reply()) is not None:
                number, content = struct.unpack(">I", reply.payload[:4])[0], reply.payload[4:]
                if reply.kind != _HANDLE and (reply.kind, content[:4]) != (_STATUS, _OK):
                    raise Refused
                replies[number] = content[4:] if reply.kind == _HANDLE else b""
            if self._stream.feeding:
                self._listen(self._deadline, _SENDING_S)
            elif more or len(replies) < self._requests - first:
                self._listen(self._deadline, 0.0 if more else self._deadline.left_s)
        return [replies[number] for number in range(first, self._requests)]

    def _send(self, requests: Iterator[tuple[int, bytes]]) -> bool:
        """Hand over some; whether there may be more."""
        packets = bytearray()
        for kind, body in requests:
            packets += _packet(kind, struct.pack(">I", self._requests) + body)
            self._requests += 1
            if len(packets) >= _HAND_OVER_BYTES:
                break
        self._stream.write(bytes(packets))
        return len(packets) >= _HAND_OVER_BYTES

    def _reply(self) -> _Reply | None:
        """One that has come as a whole."""
        if len(self._came) < 5:
            return None
        size, kind = struct.unpack(">IB", self._came[:5])
        if not 5 <= size <= _REPLY_BYTES:
            raise Refused
        if len(self._came) < 4 + size:
            return None
        reply = _Reply(kind, bytes(self._came[5 : 4 + size]))
        del self._came[: 4 + size]
        return reply

    def _listen(self, limit: Deadline, wait_s: float) -> None:
        """Take what has come, and before that wait for it."""
        if limit.left_s <= 0:
            raise Overtime
        self._stream.bell.listen(min(wait_s, limit.left_s, _LOOK_S))
        for item in self._stream.poll():
            if isinstance(item, Chunk):
                self._came += item.data if item.source == "stdout" else b""
            elif item.lost is not None:
                raise item.lost
            else:
                raise Refused


def _open(path: bytes) -> tuple[int, bytes]:
    return _OPEN, _text(path) + struct.pack(">II", _NEW_FILE, 0)


def _written(handles: Sequence[bytes], contents: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """The requests that write and close."""
    for handle, content in zip(handles, contents, strict=True):
        for at in range(0, len(content), _DATA_BYTES):
            yield _WRITE, _text(handle) + struct.pack(">Q", at) + _text(content[at : at + _DATA_BYTES])
        yield _CLOSE, _text(handle)


def _packet(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", len(body) + 1, kind) + body


def _text(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value
