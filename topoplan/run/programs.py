r"""The shell programs in `run/scripts` that start, follow, inspect and stop the job of one node on its host.

A host needs bash, awk, coreutils, grep and util-linux, but no Python. Values are passed as arguments or on standard
input, never as part of a program's text. Results are lines `topoplan:KEY=VALUE` on standard output, so that the
greeting of a login shell does no harm.

A job is identified by its first process, which leads a session of its own: by process id *and start time*, in the boot
of the machine in which it was started, because process ids are reused. Processes that have left the session are
identified by TOPOPLAN_RUN in their environment, which names run, process id and start time, or by their parents. The
client is told all this at the start and passes it back, so that nothing depends on the run directory still being there.
If the client was not told, started.json has it; if that is lost too, the command line of the first process or the mark
of any other identifies the job, because the run's name is unique.

A run directory belongs to us alone: we create it with mode 700, below directories to which the same applies. Nobody
else can then change its contents, so what was verified there is what runs. It is inspected from within, where no path
can be redirected meanwhile, and its contents are trusted only if it is ours.

A process that starts another and ends, again and again, is faster than any reading of /proc. A signal to a group,
however, reaches all its members at one moment, so groups are signaled, and single processes only where a group may
contain processes of others. What may still get away: a process that leaves for a session of its own in *each* such
step, and each time before it is seen; and a process in a group that nothing proves to be the job's, because the first
process has ended, the mark was dropped (`env -i`) and its parents are gone. Neither gets a signal, for lack of proof;
but processes that hold files of the run or a GPU are listed.

In <run_dir>/.topoplan: `started.json`, written before the job does anything; `log`, both outputs; `exit`, the exit
code, present once the job has ended; `stopped`, the node that failed, if the job was therefore ended without the
client. Each file appears atomically. The job goes on when the client goes, at any moment.

If a run has several nodes, each job has a supervisor beside it (`supervise.py`), run by any Python on the host: it
learns of the ends of the other nodes' jobs, and ends this job if another has failed and nobody else ends it. It ends
with the job.
"""

from __future__ import annotations

from enum import IntEnum

from topoplan.remote.connection import program
from topoplan.remote.upload import OURS


class ExitCode(IntEnum):
    """Exit codes with which these programs refuse. (A follower that got to work ends with the job's own exit code.)"""

    NO_DIRECTORY = 21
    NO_SCRIPT = 22
    NO_SETSID = 23
    ALREADY = 24
    NOT_STARTED = 25
    DAMAGED = 26
    NEVER_STARTED = 27
    NOT_OURS = 28
    CHANGED = 29
    NO_PROC = 30


def _program(*parts: str) -> str:
    """Return the concatenated text of scripts; the last one is the program, the ones before it define its functions."""
    return "".join(program("run", f"{part}.sh") for part in parts)


_CODES = "".join(f"{code.name}={code.value}\n" for code in ExitCode)

WHOLE = "# whole"
"""Last line of a job's standard input: if the connection is lost before it arrives, nothing is started."""
LEADER = f"WHOLE='{WHOLE}'\n" + _program("look_at", "keep")
"""Run by `sh -c` as the leader of a new session."""
SUPERVISE = program("run", "supervise.py")
START = _CODES + OURS + _program("start")
STATE = _CODES + OURS + _program("look_at", "job", "members", "say", "state")
FOLLOW = _CODES + OURS + _program("look_at", "job", "follow")
STOP = _CODES + OURS + _program("look_at", "job", "members", "say", "holders", "stop")
FULL_DISKS = OURS + _program("say", "full_disks")
STACKS = _CODES + OURS + _program("look_at", "job", "members", "say", "stacks")
STRAIN = _program("say", "strain")
TAIL_BYTES = _program("tail_bytes")
REMOVE = _program("remove")
