r"""The small shell programs of `run/scripts` that start, follow, look at and stop the job of one node on its host.

A host needs bash, awk, coreutils, grep and util-linux, and no Python. Values are words of the command or standard
input, never part of a text. What is said on standard output for us are lines `topoplan:KEY=VALUE`, so that the
greetings of a shell do no harm.

A job is known by its first process, which leads a session of its own: its process id *with its start time*, in the boot
of the machine in which it was started, because process ids come back to life as other processes. What has left the
session is known by TOPOPLAN_RUN in its environment, which names run, process id and start time, or by its parents.
The client is told all that at the start and says it again, so that nothing depends on the run directory being there.
Where the client was not told, started.json has it; where that is lost too, the words of the first process, or the mark
of any other, whose name for the run no other run has.

A run directory is ours alone: made by us with mode 700 below directories of which the same is true. Nobody else can
then change what is in it, so that what is compared there is what runs. It is looked at from within, where no path can
be turned to another place meanwhile, and what it says counts only if it is ours.

A process that starts another and ends, again and again, is faster than any reading of /proc. But a signal to a group
reaches all that are in it at one moment, so groups get signals, and processes only where a group may have others in it.
What may still get away: one that leaves for a session of its own in *each* such step, and each time before it is seen;
and one in a group that nobody can prove to be the job's, because the first process has ended, the mark was dropped
(`env -i`) and its parents are gone. Neither gets a signal, because nobody can prove that it is the job's; but what
holds files of the run or a GPU is named.

In <run_dir>/.topoplan: `started.json`, there before the job does anything; `log`, both outputs; `exit`, the exit code,
there once the job has ended; `stopped`, which node failed, where that is why this one was ended without the client.
Each appears in one step. The job goes on when the client goes, at any moment.

Where a run has several nodes, each job has a supervisor beside it (`supervise.py`), in any Python that the host has: it
hears of the others' ends, and ends this job when one has failed and nobody else does it. It goes with the job.
"""

from __future__ import annotations

from enum import IntEnum
from importlib.resources import files

from topoplan.remote.programs import program
from topoplan.remote.upload import OURS


class ExitCode(IntEnum):
    """How these programs refuse. (A follower that got to work ends with the job's own code.)"""

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
    """The text of scripts, one behind the other; the last is the program, those before are its functions."""
    directory = files("topoplan").joinpath("run", "scripts")
    return "".join(directory.joinpath(f"{part}.sh").read_text(encoding="utf-8") for part in parts)


_CODES = "".join(f"{code.name}={code.value}\n" for code in ExitCode)

WHOLE = "# whole"
"""The last line of what a job is told: where the connection is lost before, nothing is started."""
KEEPER = f"WHOLE='{WHOLE}'\n" + _program("look_at", "keep")
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
