"""Commands and files on a host over an established SSH connection.

Commands have no terminal, so their two outputs stay separate and bytes are not altered; and **nothing that was started
ends because the connection does**, neither by `close` nor when the network is cut. A command that must end with the
client is started with `hold_stdin` and ends itself when its standard input ends; a command that must outlive the client
ignores its standard input.

The user's login shell may be any: zsh, fish, tcsh. It is only told to run bash, and the rest travels over standard
input, because these shells quote differently. Output of its start-up files is skipped.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from topoplan.errors import HostError
from topoplan.remote import channel
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import Deadline
from topoplan.units import in_seconds

if TYPE_CHECKING:
    import paramiko

Command = Sequence[str] | str
"""The words of one command, each passed on unchanged; or the text of a bash script."""

Source = Literal["stdout", "stderr"]

KEEP_BYTES = 2**20
"""How much of each output of `run` is kept: little enough for a hundred hosts at once."""
_OPEN_S = 15.0
_FIRST = 'read -r -t 60 x && until [ "$x" = : ]; do read -r -t 60 x || exit; done'
SHELL = f"bash --norc -c '{_FIRST} && exec bash --norc -s'"
"""Shell command that reads a script from standard input. If the network is cut between this command and its input, the
host does not learn of it, so the wait for the first lines is limited. Start-up files that ask a question consume some
of the leading empty lines.
"""
_OPENING = "\n\n\n\n:\n"
_IS_BASH = """[ "$BASH_VERSION" ] || { echo 'a start-up file of its login shell runs another shell' >&2; exit 1; }"""
_BEGIN = b"topoplan:begin\n"
_GREETING_BYTES = 64 * 1024
"""How much of the output before the marker is kept: it gives the reason if the marker never arrives."""
_CLOSING_S = 3.0
"""Time for a session that was closed here to be closed on the host."""
_AGAIN_S = 0.05
_READ_BYTES = 256 * 1024
_PACKET_BYTES = 32 * 1024
_WINDOW_BYTES = 512 * 1024
"""How much of one output a host may send before it is read here: 50 MB/s over 10 ms, and little for many hosts."""
_FEED_S = 0.005
"""Interval at which to check whether the host accepts more standard input."""
_LOOK_S = 0.25
"""Interval at which to check for what rings no bell: the exit code of a command that closed its outputs long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    code: int | None
    """Exit code; None if a signal ended the command."""
    stdout: bytes
    stderr: bytes
    """Both outputs lack their middle if they exceed the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of output, as it arrived. Lines may be cut anywhere."""

    source: Source
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The end of a stream; nothing follows."""

    code: int | None
    """Exit code; None if a signal ended the command, or `lost` is set."""
    lost: HostError | None = None
    """Set if the connection ended first. The command may still be running."""


class Bell(threading.Event):
    """Wakes the single thread that reads several outputs: paramiko sets it on data and at the end of an output."""

    def clear(self) -> None:
        """Do nothing: paramiko calls this when one output is empty, but there are others."""

    def listen(self, limit_s: float) -> None:
        """Wait until the bell rings, and reset it. What arrives afterwards rings it again."""
        self.wait(limit_s)
        super().clear()


class Stream:
    """A running command. To be read from one thread."""

    def __init__(self, host: str, session: paramiko.Channel, stdin: bytes, *, hold_stdin: bool) -> None:
        self.host = host
        self._greeting: bytearray | None = bytearray()
        self._channel = session
        self._stdin = memoryview(stdin)
        self._hold_stdin = hold_stdin
        self._stdin_open = True
        self._ended: StreamEnd | None = None
        self.ring(Bell())
        self._feed()

    def ring(self, bell: Bell) -> None:
        """Ring `bell` from now on when there is something to read."""
        self.bell = bell
        self._channel.in_buffer.set_event(bell)
        self._channel.in_stderr_buffer.set_event(bell)

    def poll(self) -> list[Chunk | StreamEnd]:
        """Return what has arrived since the last call, without waiting. After `StreamEnd`, nothing more comes."""
        if self._ended is not None:
            return []
        self._feed()
        source = self._channel
        # The order matters: an end that is seen here comes after all output that is read below.
        over = source.exit_status_ready() and (source.eof_received or source.closed)
        found: list[Chunk | StreamEnd] = []
        while source.recv_ready() or source.recv_stderr_ready():
            if source.recv_stderr_ready():
                found.append(Chunk(source="stderr", data=source.recv_stderr(_READ_BYTES)))
            if source.recv_ready() and (data := self._without_greeting(source.recv(_READ_BYTES))):
                found.append(Chunk(source="stdout", data=data))
            if len(found) > 32 and not over:
                self.bell.set()  # leave the rest for the next call, so that other streams get their turn
                return found
        if over:
            if self._greeting:
                found.append(Chunk(source="stdout", data=bytes(self._greeting)))
            self._ended = self._end()
            found.append(self._ended)
        return found

    def __iter__(self) -> Iterator[Chunk | StreamEnd]:
        """Iterate over everything as it arrives; the last item is `StreamEnd`."""
        return self.read(None)

    def read(self, deadline_s: float | None) -> Iterator[Chunk | StreamEnd]:
        """Iterate until the deadline at most; then stop without `StreamEnd`, so that `read` can be called again."""
        deadline = Deadline(deadline_s) if deadline_s is not None else None
        while self._ended is None:
            yield from self.poll()
            if self._ended is not None or (deadline and deadline.left_s <= 0):
                return
            look_s = _FEED_S if self.feeding else _LOOK_S
            self.bell.listen(min(look_s, deadline.left_s) if deadline else look_s)

    def write(self, data: bytes) -> None:
        """Send more to the command's standard input, which was held open; the next `poll` sends what is left."""
        self._stdin = memoryview(bytes(self._stdin) + data)
        self._feed()

    def end_stdin(self) -> None:
        """End the command's standard input once all of it is sent."""
        self._hold_stdin = False
        self._feed()

    def close(self) -> None:
        """Stop reading. The command goes on unless it reads its standard input; see the module's docstring."""
        if self._ended is None:
            self._ended = StreamEnd(code=None)
        self._channel.close()

    @property
    def begun(self) -> bool:
        """Whether the host has begun the script."""
        return self._greeting is None

    def _without_greeting(self, data: bytes) -> bytes:
        """Return the output without what the login shell printed before the script."""
        if self._greeting is None:
            return data
        self._greeting += data
        at = self._greeting.find(_BEGIN)
        if at < 0:
            del self._greeting[:-_GREETING_BYTES]
            return b""
        data = bytes(self._greeting[at + len(_BEGIN) :])
        self._greeting = None
        return data

    def _feed(self) -> None:
        """Send as much of the standard input as the host accepts now, and then end it."""
        try:
            while self._stdin_open and self._stdin:
                sent = channel.send(self._channel, bytes(self._stdin[:_PACKET_BYTES]))
                if sent == 0:
                    break
                self._stdin = self._stdin[sent:]
            if self._stdin_open and not self._stdin and not self._hold_stdin:
                self._stdin_open = not channel.end(self._channel)
        except (OSError, EOFError):
            # The command or the connection has ended; `poll` tells which.
            self._stdin_open = False

    @property
    def feeding(self) -> bool:
        """Whether there is standard input, or its end, that the host has not accepted yet."""
        return self._stdin_open and (bool(self._stdin) or not self._hold_stdin)

    def _end(self) -> StreamEnd:
        code = self._channel.recv_exit_status()
        if code >= 0:
            return StreamEnd(code=code)
        transport = self._channel.transport
        alive = transport is not None and transport.is_active() and transport.saved_exception is None
        if self._channel.eof_received and alive:
            return StreamEnd(code=None)
        return StreamEnd(code=None, lost=connection_lost_error(self.host))


class Connection:
    """An SSH connection to one host. Several commands can run concurrently; methods may be called from any thread."""

    def __init__(self, target: Target, transport: paramiko.Transport, *, release: Callable[[], None]) -> None:
        """Used by `ssh.connect`. `release` is called after closing and releases the jump host."""
        self.target = target
        self.transport = transport
        self._release = release
        self._closing = threading.Lock()
        self._closed = False
        self._sessions: list[paramiko.Channel] = []

    @property
    def name(self) -> str:
        """The name of the connection's target."""
        return self.target.name

    @property
    def is_alive(self) -> bool:
        """Whether the connection still works, as far as is known: a host that is gone is noticed after some seconds."""
        return bool(self.transport.is_active())

    def run(
        self,
        command: Command,
        *args: str,
        stdin: bytes = b"",
        deadline_s: float,
        keep_bytes: int = KEEP_BYTES,
        late: HostError | None = None,
    ) -> Completed:
        """Run a command to its end. `args` are the arguments $1, $2 ... of a script; `stdin` is its standard input.

        As with ssh, the command has ended once no process holds its outputs open: processes that it leaves running need
        other outputs. At most `keep_bytes` of each output are kept, half from the start and half from the end. `late`
        is raised if the command does not end by the deadline.

        Raises HostError: `lost`, or `deadline`; the command may then still be running. `command`: the host runs no
        shell.
        """
        deadline = Deadline(deadline_s)
        stream = self.start(command, *args, stdin=stdin, deadline_s=deadline_s)
        kept = {"stdout": _HeadAndTail(keep_bytes), "stderr": _HeadAndTail(keep_bytes)}
        try:
            for item in stream.read(deadline.left_s):
                if isinstance(item, Chunk):
                    kept[item.source].add(item.data)
                elif item.lost is not None:
                    raise item.lost
                elif not stream.begun:
                    raise no_shell_error(self.target, kept["stderr"].value() or kept["stdout"].value())
                else:
                    return Completed(code=item.code, stdout=kept["stdout"].value(), stderr=kept["stderr"].value())
        finally:
            stream.close()
        if not stream.begun:
            raise self.target.error(
                "deadline",
                f"its login shell did not start topoplan's script within {in_seconds(deadline_s)}",
                f"check whether `{self.target.ssh} true` returns: a start-up file such as ~/.bashrc may be waiting",
            )
        if late is not None:
            raise late
        last = kept["stderr"].value() or kept["stdout"].value()
        raise self.target.error(
            "deadline",
            f"{_called(command)} did not end within {in_seconds(deadline_s)}{last_line(last)}",
            "it may still be running there",
        )

    def start(
        self,
        command: Command,
        *args: str,
        stdin: bytes = b"",
        hold_stdin: bool = False,
        deadline_s: float = _OPEN_S,
    ) -> Stream:
        """Start a command and return while it runs.

        `stdin` is sent first. With `hold_stdin` the command's standard input then stays open until `end_stdin`, `close`
        or the end of this process or of the connection, whichever comes first.

        Raises HostError: `lost`, `deadline`, or `command`: the host does not start commands.
        """
        script = _script(command, *args) if isinstance(command, str) else _script('exec "$@"', *command, *args)
        return Stream(self.name, self._open(_called(command), deadline_s), script + stdin, hold_stdin=hold_stdin)

    def _session(self, limit: Deadline) -> paramiko.Channel:
        """Open a new session; retried, because one of ours may be closed here but not yet on the host (MaxSessions)."""
        from paramiko import ChannelException

        closing = Deadline(min(limit.left_s, _CLOSING_S))
        while True:
            self._sessions = [one for one in self._sessions if not one.closed]
            try:
                session = self.transport.open_session(window_size=_WINDOW_BYTES, timeout=limit.left_s)
            except ChannelException:
                if self._sessions or closing.left_s <= 0:
                    raise
                time.sleep(_AGAIN_S)
            else:
                self._sessions.append(session)
                return session

    def _open(self, called: str, deadline_s: float) -> paramiko.Channel:
        """Open a new session in which the host has started our shell."""
        from paramiko import ChannelException, SSHException

        limit = Deadline(min(deadline_s, _OPEN_S))
        session = None
        try:
            session = self._session(limit)
            # paramiko would wait for the answer without a time limit.
            session.event = _event_within(limit)
            session.exec_command(SHELL)
            return session
        except (TimeoutError, SSHException, EOFError, OSError) as error:
            if session is not None:
                session.close()
            if not self.is_alive:
                raise connection_lost_error(self.name) from None
            if isinstance(error, ChannelException):
                raise self.target.error(
                    "command", f"it refuses to open a session: {error.text}", "see MaxSessions in its sshd_config"
                ) from None
            if limit.left_s <= 0:
                raise self.target.error(
                    "deadline",
                    f"{called} was not started within {in_seconds(limit.total_s)}",
                    "check that the machine is not overloaded",
                ) from None
            what = f"it does not start commands: {error}"
            raise self.target.error("command", what, "see its sshd_config") from None

    def close(self) -> None:
        """Close the connection. Running commands go on; see the module's docstring. Further calls do nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.transport.close()
        self._release()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HeadAndTail:
    def __init__(self, most_bytes: int) -> None:
        self._half = max(1, most_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[: max(0, room)]
        self._tail += data[max(0, room) :]
        if len(self._tail) > 2 * self._half:  # only now and then, because moving bytes is expensive
            del self._tail[: -self._half]

    def value(self) -> bytes:
        return bytes(self._head + self._tail[-self._half :])


def _event_within(limit: Deadline) -> threading.Event:
    class Bounded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not super().wait(limit.left_s if timeout is None else timeout):
                raise TimeoutError
            return True

    return Bounded()


def _script(text: str, *words: str) -> bytes:
    """Return a script with its arguments for the standard input of `SHELL`; the rest of that is the script's own.

    The braces make bash read all of the script before it starts.
    """
    said = _BEGIN.decode().rstrip("\n")
    return f"{_OPENING}{{\n{_IS_BASH}\nset -- {shlex.join(words)}\necho {said}\n{text}\nexit\n}}\n".encode()


def _called(command: Command) -> str:
    return "the script" if isinstance(command, str) else f"`{shlex.join(command)}`"


def last_line(output: bytes) -> str:
    """Return `: ` and the last line of an output, as the end of a message; empty if there was no output."""
    lines = output.decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:300]}" if said else ""


def no_shell_error(target: Target, output: bytes) -> HostError:
    """Return the error for a host that accepted the login but ran no bash; `output` is what it printed."""
    return target.error(
        "command", f"it did not run topoplan's script{last_line(output)}", f"check whether `{target.ssh} bash` works"
    )


def connection_lost_error(host: str) -> HostError:
    """Return the error for a connection that has ended."""
    return HostError(
        "the connection was lost",
        host=host,
        problem="lost",
        remedy="check the machine and the network; what was started there may still be running",
    )


@cache
def program(room: str, name: str) -> str:
    """Return the text of a program, such as `program("hosts", "collect.sh")`."""
    return files("topoplan").joinpath(room, "scripts", name).read_text(encoding="utf-8")
