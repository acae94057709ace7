"""Commands and files on a host that is logged in to.

Commands have no terminal. So their two outputs stay apart and bytes stay as they are; and **nothing that was started
ends because the connection does**, neither by `close` nor when the network is cut. A command that must end with the
client is started with `hold_stdin` and ends itself when its standard input ends; one that must not does not look at it.

The user's login shell may be any: zsh, fish, tcsh. All that it is told is to run bash, and the rest travels by standard
input, because these shells do not quote alike. What its start-up files print is passed over.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from topoplan.errors import HostError
from topoplan.remote import channel
from topoplan.remote.ssh_config import Target
from topoplan.remote.waiting import Deadline
from topoplan.units import in_seconds

if TYPE_CHECKING:
    import paramiko

Command = Sequence[str] | str
"""Words of one command, each passed on as it is; or the text of a bash script."""

Source = Literal["stdout", "stderr"]

KEEP_BYTES = 2**20
"""Of each output of `run`, what is kept: little enough for a hundred hosts at once."""
_OPEN_S = 15.0
"""Time for a host to start a command."""
_FIRST = 'read -r -t 60 x && until [ "$x" = : ]; do read -r -t 60 x || exit; done'
SHELL = f"bash --norc -c '{_FIRST} && exec bash --norc -s'"
"""Where the network is cut between this command and its input, the host does not learn of it: the first lines are
waited for, and not for ever. Start-up files that ask something take some of the empty ones."""
_OPENING = "\n\n\n\n:\n"
_IS_BASH = """[ "$BASH_VERSION" ] || { echo 'a start-up file of its login shell runs another shell' >&2; exit 1; }"""
_BEGIN = b"topoplan:begin\n"
"""The first output of ours."""
_GREETING_BYTES = 64 * 1024
"""Of what comes before that, what is kept: it says why, where nothing else comes."""
_CLOSING_S = 3.0
"""Time for a session that is closed here to be closed on the host."""
_AGAIN_S = 0.05
_READ_BYTES = 256 * 1024
_PACKET_BYTES = 32 * 1024
_WINDOW_BYTES = 512 * 1024
"""What a host may send of one output before it is read here: 50 MB/s over 10 ms, and little for many hosts."""
_FEED_S = 0.005
"""How often to look whether the host takes more standard input."""
_LOOK_S = 0.25
"""How often to look for what rings no bell: the exit code of a command that closed its outputs long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    code: int | None
    """Exit code; None: a signal ended it."""
    stdout: bytes
    stderr: bytes
    """Of either, what is over the limit is left out in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some output, as it came. Lines may be cut anywhere."""

    source: Source
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a stream; nothing follows."""

    code: int | None
    """Exit code; None: a signal ended the command, or `lost`."""
    lost: HostError | None = None
    """The connection ended first. The command may still be running."""


class Bell(threading.Event):
    """Wakes the one thread that reads several outputs: paramiko sets it when something came, or ended."""

    def clear(self) -> None:
        """Nothing: paramiko calls this when one output is empty, and there are others."""

    def listen(self, limit_s: float) -> None:
        """Wait until it rings, and turn it off. What comes after that rings it again."""
        self.wait(limit_s)
        super().clear()


class Stream:
    """A command that runs. Read it from one thread."""

    def __init__(self, host: str, session: paramiko.Channel, stdin: bytes, *, hold_stdin: bool) -> None:
        self.host = host
        self._greeting: bytearray | None = bytearray()
        self._channel = session
        self._stdin = memoryview(stdin)
        self._hold_stdin = hold_stdin
        self._stdin_open = True
        self._ended: Ended | None = None
        self.ring(Bell())
        self._feed()

    def ring(self, bell: Bell) -> None:
        """Ring this bell from now on, when there is something to read."""
        self.bell = bell
        self._channel.in_buffer.set_event(bell)
        self._channel.in_stderr_buffer.set_event(bell)

    def poll(self) -> list[Chunk | Ended]:
        """What has come since the last call, without waiting. After `Ended`, nothing."""
        if self._ended is not None:
            return []
        self._feed()
        source = self._channel
        # The order matters: an end that is seen here comes after all output that is read below.
        over = source.exit_status_ready() and (source.eof_received or source.closed)
        found: list[Chunk | Ended] = []
        while source.recv_ready() or source.recv_stderr_ready():
            if source.recv_stderr_ready():
                found.append(Chunk(source="stderr", data=source.recv_stderr(_READ_BYTES)))
            if source.recv_ready() and (data := self._without_greeting(source.recv(_READ_BYTES))):
                found.append(Chunk(source="stdout", data=data))
            if len(found) > 32 and not over:
                self.bell.set()  # leave the rest for the next call, so that others get their turn
                return found
        if over:
            if self._greeting:
                found.append(Chunk(source="stdout", data=bytes(self._greeting)))
            self._ended = self._end()
            found.append(self._ended)
        return found

    def __iter__(self) -> Iterator[Chunk | Ended]:
        """All that comes, as it comes; the last one is `Ended`."""
        return self.read(None)

    def read(self, deadline_s: float | None) -> Iterator[Chunk | Ended]:
        """As iterating, but not beyond the deadline: then it stops without `Ended`, and can be called again."""
        deadline = Deadline(deadline_s) if deadline_s is not None else None
        while self._ended is None:
            yield from self.poll()
            if self._ended is not None or (deadline and deadline.left_s <= 0):
                return
            look_s = _FEED_S if self.feeding else _LOOK_S
            self.bell.listen(min(look_s, deadline.left_s) if deadline else look_s)

    def write(self, data: bytes) -> None:
        """Send more to the command's standard input, which was held open. What does not go at once goes with the next
        `poll`."""
        self._stdin = memoryview(bytes(self._stdin) + data)
        self._feed()

    def end_stdin(self) -> None:
        """End the command's standard input, once all of it is sent."""
        self._hold_stdin = False
        self._feed()

    def close(self) -> None:
        """Read no more. The command goes on, unless it looks at its standard input; see the module's docstring."""
        if self._ended is None:
            self._ended = Ended(code=None)
        self._channel.close()

    @property
    def begun(self) -> bool:
        """Whether the host has got to what it was asked to run."""
        return self._greeting is None

    def _without_greeting(self, data: bytes) -> bytes:
        """What comes after the login shell's own words."""
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
        """Send as much of the standard input as the host takes now, and end it after that."""
        try:
            while self._stdin_open and self._stdin:
                sent = channel.send(self._channel, bytes(self._stdin[:_PACKET_BYTES]))
                if sent == 0:
                    break
                self._stdin = self._stdin[sent:]
            if self._stdin_open and not self._stdin and not self._hold_stdin:
                self._stdin_open = not channel.end(self._channel)
        except (OSError, EOFError):
            # The command has ended, or the connection has; `poll` says which.
            self._stdin_open = False

    @property
    def feeding(self) -> bool:
        """Whether there is standard input, or its end, that the host has not taken yet."""
        return self._stdin_open and (bool(self._stdin) or not self._hold_stdin)

    def _end(self) -> Ended:
        code = self._channel.recv_exit_status()
        if code >= 0:
            return Ended(code=code)
        transport = self._channel.transport
        alive = transport is not None and transport.is_active() and transport.saved_exception is None
        if self._channel.eof_received and alive:
            return Ended(code=None)
        return Ended(code=None, lost=lost_connection(self.host))


class Connection:
    """One host, logged in to. Several commands can run at the same time; methods may be called from any thread."""

    def __init__(self, target: Target, transport: paramiko.Transport, *, release: Callable[[], None]) -> None:
        """Made by `ssh.connect`. `release` is called after closing: it lets go of the jump host."""
        self.target = target
        self.transport = transport
        self._release = release
        self._closing = threading.Lock()
        self._closed = False
        self._sessions: list[paramiko.Channel] = []

    @property
    def name(self) -> str:
        """The name of its target."""
        return self.target.name

    @property
    def is_alive(self) -> bool:
        """Whether it still works, as far as is known: a host that has gone is noticed after some seconds."""
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
        """Run a command to its end. `args` are the words $1, $2 ... of a script; `stdin` is what it can read.

        As with ssh, that is when nobody holds its outputs open any more: what it leaves running needs others.
        `keep_bytes` of each output are kept at most, half from the start and half from the end. `late` is raised where
        it does not end by the deadline.

        Raises:
            HostError: `lost`, or `deadline`; then the command may still be running. `command`: the host runs no shell.
        """
        deadline = Deadline(deadline_s)
        stream = self.start(command, *args, stdin=stdin, deadline_s=deadline_s)
        kept = {"stdout": _Kept(keep_bytes), "stderr": _Kept(keep_bytes)}
        try:
            for item in stream.read(deadline.left_s):
                if isinstance(item, Chunk):
                    kept[item.source].add(item.data)
                elif item.lost is not None:
                    raise item.lost
                elif not stream.begun:
                    raise no_script(self.target, kept["stderr"].value() or kept["stdout"].value())
                else:
                    return Completed(code=item.code, stdout=kept["stdout"].value(), stderr=kept["stderr"].value())
        finally:
            stream.close()
        if not stream.begun:
            raise no_script_yet(self.target, deadline_s)
        if late is not None:
            raise late
        last = kept["stderr"].value() or kept["stdout"].value()
        raise self.target.error(
            "deadline",
            f"{_called(command)} did not end within {in_seconds(deadline_s)}{last_words(last)}",
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

        `stdin` is sent first; with `hold_stdin` the command's standard input stays open after that, until `end_stdin`,
        `close` or the end of this process or of the connection, whichever comes first.

        Raises:
            HostError: `lost`, `deadline`, or `command`: the host does not start commands.
        """
        script = _script(command, *args) if isinstance(command, str) else _script('exec "$@"', *command, *args)
        return Stream(self.name, self._open(_called(command), deadline_s), script + stdin, hold_stdin=hold_stdin)

    def _session(self, limit: Deadline) -> paramiko.Channel:
        """A new session. Where one of ours was the last that the host allows, that may be closed here and not there."""
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
        """A new session in which the host has started our shell."""
        from paramiko import ChannelException, SSHException

        limit = Deadline(min(deadline_s, _OPEN_S))
        session = None
        try:
            session = self._session(limit)
            # paramiko waits without an end for the answer.
            session.event = _event_within(limit)
            session.exec_command(SHELL)
            return session
        except (TimeoutError, SSHException, EOFError, OSError) as error:
            if session is not None:
                session.close()
            if not self.is_alive:
                raise lost_connection(self.name) from None
            if isinstance(error, ChannelException):
                raise self.target.error(
                    "command", f"it opens no session: {error.text}", "see MaxSessions in its sshd_config"
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
        """Close. Commands that run go on; see the module's docstring. Closing again does nothing."""
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


class _Kept:
    """The first and the last part of an output."""

    def __init__(self, most_bytes: int) -> None:
        self._half = max(1, most_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[: max(0, room)]
        self._tail += data[max(0, room) :]
        if len(self._tail) > 2 * self._half:  # now and then, since moving bytes costs
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
    """A script for the standard input of `SHELL`, with its words. The braces make bash read all of it before it starts;
    what comes after is the script's own standard input."""
    said = _BEGIN.decode().rstrip("\n")
    return f"{_OPENING}{{\n{_IS_BASH}\nset -- {shlex.join(words)}\necho {said}\n{text}\nexit\n}}\n".encode()


def _called(command: Command) -> str:
    return "the script" if isinstance(command, str) else f"`{shlex.join(command)}`"


def last_words(output: bytes) -> str:
    """`: ` and the last line, as the end of a message; empty where nothing was said."""
    lines = output.decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:300]}" if said else ""


def no_script(target: Target, output: bytes) -> HostError:
    """What is raised for a host that let us in and ended without running bash; `output` is what it said."""
    return target.error(
        "command", f"it ran no script of ours{last_words(output)}", f"see whether `{target.ssh} bash` works"
    )


def no_script_yet(target: Target, deadline_s: float) -> HostError:
    """What is raised for one that had not got to it by the deadline."""
    return target.error(
        "deadline",
        f"its login shell did not get to a script of ours within {in_seconds(deadline_s)}",
        f"see whether `{target.ssh} true` ends: a start-up file such as ~/.bashrc may wait",
    )


def lost_connection(host: str) -> HostError:
    """What is raised for a connection that has ended."""
    return HostError(
        "the connection was lost",
        host=host,
        problem="lost",
        remedy="check the machine and the network; what was started there may still be running",
    )
