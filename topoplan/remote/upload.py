"""Files to a host: by SFTP into a new directory of their own, compared there, and only then put in place.

One command on the host owns that directory: it makes it, waits until the files are there, compares them with their
SHA-256, sets their modes and renames it. When its standard input ends before, it removes what there is: so nothing is
left behind by a client that was killed or a cable that was cut, and SFTP alone could not promise that.

Others may use the place too, and mean no good. The directory is made fresh, for us alone, and so are those above it up
to the one that was given; those that are there already are refused if they are links, somebody else's, or others can
write in them. The given one itself may be anybody's, as /tmp is, but must not let anybody rename what is in it.

Some hosts have no SFTP, or one that reads only, sees other directories, or greets with a line of a shell; and SFTP has
no word for a full disk. So whatever it refuses goes to the same command as a tar stream, which works or says why.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import secrets
import shlex
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping

from topoplan.errors import HostError
from topoplan.remote.connection import (
    Chunk,
    Connection,
    Ended,
    File,
    Stream,
    last_words,
    no_script,
    no_script_yet,
)
from topoplan.remote.sftp import Refused, Writer
from topoplan.remote.waiting import Deadline, Overtime
from topoplan.run.programs import OURS

_GREETING_S = 10.0
"""How long an SFTP server may take for its first word."""
_CUT_OFF_S = 5.0
"""How long after our deadline the command on the host gives up."""
_READY = b"topoplan:staging="
_SAID_BYTES = 64 * 1024
"""Of each output of the command, what is kept."""

# The new directory is beside the one that is to be, and becomes it in one step. All happens from within directories
# that have been looked at, where no path can be turned to another place meanwhile. The name ends at a NUL on standard
# output.
_PUT = """\
set -eu
refuse() {{ printf '%s\\n' "$1" >&2; exit 1; }}
mkdir -p -- "$1"
cd -- "$1"
umask 077
mode=$(stat -c %a .)
if [ "$((0$mode & 01002))" -eq 2 ]; then
    sample=$(made_here) && [ "$((0${{sample#* }} & 2))" -ne 0 ] ||
        refuse "$PWD: anybody can rename what is in it (mode $mode)"
fi
rest=$2
while [ "${{rest#*/}}" != "$rest" ]; do
    part=${{rest%%/*}} rest=${{rest#*/}}
    [ -e "./$part" ] || [ -L "./$part" ] || mkdir -m 700 -- "./$part" || [ -d "./$part" ]
    [ ! -L "./$part" ] || refuse "$PWD/$part: it is a link"
    cd -- "./$part"
    is_ours || refuse "$PWD: $(whose)"
done
[ ! -e "./$rest" ] && [ ! -L "./$rest" ] || refuse "$PWD/$rest: File exists"
mkdir -m 700 -- "./$3"
trap 'rm -rf -- "./$3"' EXIT
( cd -- "./$3" && mkdir -p -- {folders} && printf '{ready}%s\\0' "$(pwd -P)" )
read -r -t "$4" way
if [ "$way" = tar ]; then
    ( cd -- "./$3" && tar -x -m --no-same-owner -f - )
fi
( cd -- "./$3" && printf %s {sums} | sha256sum --check --strict --quiet && {modes} )
mv -T -- "./$3" "./$rest"
"""


def put_script(files: Mapping[str, File]) -> str:
    """What runs on the host. Words: a directory that may be anybody's, the path in it of the one that is to be, the
    name of the new one, and how long to wait for files in seconds."""
    modes: dict[int, list[str]] = defaultdict(list)
    for name, file in files.items():
        modes[file.mode].append(name)
    return OURS + _PUT.format(
        ready=_READY.decode(),
        folders=shlex.join(sorted({f"./{posixpath.dirname(name)}" for name in files})),
        sums=shlex.quote(sums(files)),
        modes=" && ".join(f"chmod {mode:04o} -- {shlex.join(names)}" for mode, names in sorted(modes.items())),
    )


def sums(files: Mapping[str, File | bytes]) -> str:
    """What `sha256sum --check` reads of them."""
    return "".join(_sum_line(name, entry.data if isinstance(entry, File) else entry) for name, entry in files.items())


def waiting_s(deadline_s: float) -> str:
    """The last of its words."""
    return f"{deadline_s + _CUT_OFF_S:.0f}"


def with_modes(files: Mapping[str, bytes]) -> dict[str, File]:
    """The files of a bundle: scripts can be run."""
    return {name: File(data=data, mode=0o755 if name.endswith(".sh") else 0o644) for name, data in files.items()}


def upload(
    connection: Connection,
    files: Mapping[str, File | bytes],
    directory: str,
    *,
    own_parts: int = 1,
    deadline_s: float,
) -> None:
    """Put files under a new `directory`, by their relative names; it appears in one step with all that is in it.

    A relative `directory` is in the user's home. The last `own_parts` of its path are directories of ours alone; the
    one that they are in is made where it is not there, and may be used by others.

    Raises:
        ValueError: a name that is not relative, or leads out of the directory; a part of our own that is no name.
        HostError: `command` with what the host said, `lost` or `deadline`. There is then no directory, or all of it.
    """
    whole = {_relative(name): entry if isinstance(entry, File) else File(data=entry) for name, entry in files.items()}
    if not whole:
        return
    parts = directory.rstrip("/").split("/")
    own = parts[-own_parts:]
    if len(own) < own_parts or {"", ".", ".."} & {*own}:
        raise ValueError(f"the last {own_parts} parts of {directory!r} are no names")
    base = "/".join([*([] if directory.startswith("/") else ["."]), *parts[:-own_parts], ""])
    deadline = Deadline(deadline_s)
    name = f".topoplan-{secrets.token_hex(6)}"
    # A host that was cut off does not see the end of standard input.
    words = (base, "/".join(own), name, waiting_s(deadline_s))
    command = connection.start(put_script(whole), *words, hold_stdin=True, deadline_s=deadline_s)
    said = _Said(command, deadline)
    writer = None
    try:
        writer = _writer(connection, deadline)
        staging = said.staging()
        if staging is not None:
            written = writer is not None and _written(writer, staging, whole)
            command.write(b"sftp\n" if written else b"tar\n" + _tar(whole))
            command.end_stdin()
        code = said.end()
    except Overtime:
        if not command.begun:
            raise no_script_yet(connection.target, deadline_s) from None
        raise HostError(
            f"files were not put into {directory} within {deadline_s:g} s",
            host=connection.name,
            problem="deadline",
            remedy="check the network, and the disk there; what is not whole is removed",
        ) from None
    finally:
        if writer is not None:
            writer.close()
        command.close()
    if not command.begun:
        raise no_script(connection.target, said.all())
    if code != 0:
        why = said.last_words()
        raise HostError(
            f"files could not be put into {directory}{why}",
            host=connection.name,
            problem="command",
            remedy=next((remedy for reason, remedy in _REMEDIES.items() if reason in why), ""),
        )


_ELSEWHERE = "or name another `workdir` for the host in the spec"
_REMEDIES = {
    "No space left": f"make room there, {_ELSEWHERE}",
    "Wrote only": f"make room there, {_ELSEWHERE}",  # tar, of a disk that is full
    "quota exceeded": f"make room there, {_ELSEWHERE}",
    "Permission denied": f"let the user write there, {_ELSEWHERE}",
    "Read-only file system": f"see why it is, {_ELSEWHERE}",
    "No such file": f"make the directory above it, {_ELSEWHERE}",
    "Not a directory": f"move the file that is in the way, {_ELSEWHERE}",
    "File exists": f"move the file that is in the way, {_ELSEWHERE}",
    "non-directory": f"move the file that is in the way, {_ELSEWHERE}",
    "command not found": "install coreutils and tar on it",
    "it is a link": f"remove it, {_ELSEWHERE}",
    "it belongs to": f"have it removed, {_ELSEWHERE}",
    "others can write in it": f"take that from them with `chmod go-w`, {_ELSEWHERE}",
    "anybody can rename": "put a stop to it with `chmod +t`, or name a directory of your own as `workdir` in the spec",
}
"""By what the system says, in English; in another language there is no remedy."""


def _writer(connection: Connection, deadline: Deadline) -> Writer | None:
    """Someone to write by SFTP, if the host has it."""
    try:
        stream = connection.start_subsystem("sftp", deadline_s=deadline.left_s)
    except HostError as error:
        if error.problem == "lost":
            raise
        return None
    writer = Writer(stream, deadline)
    try:
        writer.greet(_GREETING_S)
    except (Refused, Overtime):
        writer.close()
        return None
    except BaseException:
        writer.close()
        raise
    return writer


def _written(writer: Writer, staging: bytes, files: Mapping[str, File]) -> bool:
    try:
        writer.put(staging, {name: file.data for name, file in files.items()})
    except Refused:
        return False
    return True


class _Said:
    """What the command says."""

    def __init__(self, command: Stream, deadline: Deadline) -> None:
        self._items = _until(command, deadline)
        self._outputs = {"stdout": b"", "stderr": b""}
        self._ended: Ended | None = None

    def staging(self) -> bytes | None:
        """The directory that it has made; None: it has ended."""
        while self._ended is None:
            place, end, _ = self._outputs["stdout"].partition(_READY)[2].partition(b"\0")
            if end:
                return place
            self._take()
        return None

    def end(self) -> int | None:
        """The exit code."""
        while self._ended is None:
            self._take()
        return self._ended.code

    def all(self) -> bytes:
        """What it said, and first what is not an error."""
        return self._outputs["stdout"] + self._outputs["stderr"]

    def last_words(self) -> str:
        """Why it failed."""
        # tar ends with a line that says only that there were others.
        lines = [line for line in self._outputs["stderr"].splitlines() if not line.endswith(b"due to previous errors")]
        return last_words(b"\n".join(lines))

    def _take(self) -> None:
        item = next(self._items, None)
        if item is None:
            raise Overtime
        if isinstance(item, Chunk):
            self._outputs[item.source] = (self._outputs[item.source] + item.data)[-_SAID_BYTES:]
        elif item.lost is not None:
            raise item.lost
        else:
            self._ended = item


def _until(command: Stream, deadline: Deadline) -> Iterator[Chunk | Ended]:
    yield from command.read(deadline.left_s)  # what is left when the first is asked for


def _relative(name: str) -> str:
    tidy = posixpath.normpath(name)
    if tidy.startswith(("/", "../")) or tidy in (".", "..") or "\n" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the relative name of a file")
    return tidy


def _tar(files: Mapping[str, File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(file.data)
            tar.addfile(entry, io.BytesIO(file.data))
    return buffer.getvalue()


def _sum_line(name: str, data: bytes) -> str:
    """As sha256sum writes it: a backslash in a name is doubled, and one before the line says so."""
    escaped = name.replace("\\", "\\\\")
    return f"{chr(92) if escaped != name else ''}{hashlib.sha256(data).hexdigest()}  {escaped}\n"
