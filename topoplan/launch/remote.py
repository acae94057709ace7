r"""The text of the small shell programs that start, follow, look at and stop the job of one node on its host.

A host needs bash, awk, coreutils, grep and util-linux, and no Python. Values are words of the command or standard
input, never part of a text. What is said on standard output for us are lines `topoplan:KEY=VALUE`, so that the
greetings of a shell do no harm.

A job is known by its first process, which leads a session of its own: its process id *with its start time*, in the boot
of the machine in which it was started, because process ids come back to life as other processes. What has left the
session is known by TOPOPLAN_RUN in its environment, which names run, process id and start time, or by its parents.

In <run_dir>/.topoplan: `started.json`, there before the job does anything; `log`, both outputs; `exit`, the exit code,
there once the job has ended. Each appears in one step. The job goes on when the client goes, at any moment.
"""

from __future__ import annotations

NO_DIRECTORY, NO_SCRIPT, NO_SETSID, ALREADY, NOT_STARTED, DAMAGED, NEVER_STARTED = range(21, 28)
"""Exit codes of these programs, beside 0. (A follower that got to work ends with the job's own.)"""

# pid -> life (a letter), session, ticks (start time in ticks since boot): fields 3, 6 and 22 of proc_pid_stat(5).
# Field 2 is the program's name and may hold spaces and parentheses; the kernel escapes its newlines.
_LOOK_AT = """\
look_at() {
    { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    set -- ${line##*) }
    life=$1 session=$4 ticks=${20}
}
"""

# What was recorded: leader, start, boot; and the mark. Fails where nothing was.
_RECORDED = """\
take() {
    value=${text#*"\\"$1\\": "}
    value=${value#\\"}
    value=${value%%[!0-9a-f-]*}
    case $value in
        '' | $2) echo "started.json is damaged" >&2; exit @DAMAGED@ ;;
    esac
}
recorded() {
    [ -e .topoplan/started.json ] || return 1
    text=
    IFS= read -r text <.topoplan/started.json
    take pid '*[!0-9]*'; leader=$value
    take start_ticks '*[!0-9]*'; start=$value
    take boot_id '-*'; boot=$value
    IFS= read -r boot_now </proc/sys/kernel/random/boot_id
    mark=$run/$leader/$start
}
leads() {
    [ "$boot" = "$boot_now" ] && look_at "$leader" && [ "$ticks" = "$start" ] && [ "$life" != Z ]
}
"""

# Every process of the job, as `pid:ticks`: the session's while it is known to be the job's, those with the mark, and
# what these have started. Field 20 is the number of threads: a zombie with more than one still works.
_MEMBERS = """\
members() {
    marked=$(cd /proc && grep -slzxF -- "TOPOPLAN_RUN=$mark" [0-9]*/environ)
    cat /proc/[0-9]*/stat 2>/dev/null | LC_ALL=C MARKED=$marked awk -v ours="$ours" '
        {
            pid = $1; rest = $0; sub(/^.*\\) /, "", rest); split(rest, field, " ")
            if (pid <= 1 || (field[1] ~ /[ZX]/ && field[18] <= 1)) next
            parent[pid] = field[2]; ticks[pid] = field[20]
            if (field[4] == ours) mine[pid]
        }
        END {
            count = split(ENVIRON["MARKED"], found, /[^0-9]+/)
            for (at = 1; at <= count; at++) if (found[at] in parent) mine[found[at]]
            do {
                more = 0
                for (pid in parent) if (!(pid in mine) && parent[pid] in mine) { mine[pid]; more = 1 }
            } while (more)
            for (pid in mine) print pid ":" ticks[pid]
        }'
}
"""

_SAY = """\
say() { printf 'topoplan:%s=%s\\n' "$1" "$2"; }
say_code() {
    code=
    [ ! -e .topoplan/exit ] || read -r code <.topoplan/exit
    say code "$code"
}
say_pids() {
    pids=
    for one in $2; do pids="$pids ${one%:*}"; done
    say "$1" "$pids"
}
"""


def _program(*parts: str) -> str:
    text = "".join(parts)
    for name in ("NO_DIRECTORY", "NO_SCRIPT", "NO_SETSID", "ALREADY", "NOT_STARTED", "DAMAGED", "NEVER_STARTED"):
        text = text.replace(f"@{name}@", str(globals()[name]))
    return text


# The first process of a job. It records itself and says so on its outputs, which are the starter's until then; then it
# runs the script and waits for it. A signal to the whole session ends the script, not this: a trap that does something
# is not inherited, unlike one that ignores. The exit code goes into a file that has its room on the disk already.
KEEPER = _program(
    _LOOK_AT,
    """\
script=$1 run=$2
environment=$(cat)
trap : HUP INT QUIT TERM USR1 USR2 ALRM
look_at $$ && IFS= read -r boot </proc/sys/kernel/random/boot_id || exit 1
# Not the shell's own printf: that of dash does not say why it cannot write.
env printf '      \\n' >.topoplan/ending &&
    : >>.topoplan/log &&
    env printf '{"schema": "%s", "pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}\\n' \\
        topoplan.started/1 $$ "$session" "$ticks" "$boot" "$(date +%s)" >.topoplan/starting &&
    mv .topoplan/starting .topoplan/started.json || exit 1
exec >>.topoplan/log 2>&1 </dev/null
(
    export TOPOPLAN_RUN="$run/$$/$ticks"
    eval "$environment"
    unset environment
    exec bash -- "$script"
)
code=$?
printf '%6d' "$code" 1<>.topoplan/ending
mv .topoplan/ending .topoplan/exit
""",
)
"""Run by `sh -c` as the leader of a new session, with the script and the run's id. Standard input: the environment."""

START = _program(
    """\
cd -- "$1" || exit @NO_DIRECTORY@
[ -f "$2" ] && [ -r "$2" ] || exit @NO_SCRIPT@
command -v setsid >/dev/null || exit @NO_SETSID@
if ! said=$(mkdir -m 700 .topoplan 2>&1); then
    [ ! -e .topoplan ] || exit @ALREADY@
    printf '%s\\n' "$said" >&2
    exit @NOT_STARTED@
fi
# --fork and not `&`, which makes a shell without job control ignore SIGINT and SIGQUIT in what it starts, for good.
said=$(setsid --fork sh -c "$4" topoplan "$2" "$3" 2>&1)
if [ ! -e .topoplan/started.json ]; then
    rm -rf .topoplan
    printf '%s\\n' "$said" >&2
    exit @NOT_STARTED@
fi
cat .topoplan/started.json
""",
)
"""Words: run directory, script in it, run id, `KEEPER`. Standard input: shell text that exports the environment."""

STATE = _program(
    _LOOK_AT,
    _RECORDED,
    _MEMBERS,
    _SAY,
    """\
run=$2
if [ ! -e "$1" ]; then say state never-started; exit; fi
cd -- "$1" || exit @NO_DIRECTORY@
recorded || { say state never-started; exit; }
say started "$text"
state=gone ours=none
if [ "$boot" != "$boot_now" ]; then state=rebooted
elif leads; then state=running ours=$leader
fi
# In this order: a job that ends meanwhile has its exit code by now.
if [ -e .topoplan/exit ]; then
    state=ended
    say ended_unix_s "$(date -r .topoplan/exit +%s)"
fi
say state "$state"
say_code
say log_bytes "$(($(wc -c <.topoplan/log)))"
say now_unix_s "$(date +%s)"
[ "$boot" != "$boot_now" ] || say_pids pids "$(members)"
""",
)
"""Words: run directory, run id."""

# bash, for its `read -t`: one call that notices the end of standard input and passes the time, without a new process.
FOLLOW = _program(
    _LOOK_AT,
    _RECORDED,
    """\
run=
cd -- "$1" || exit @NO_DIRECTORY@
recorded || exit @NEVER_STARTED@
watch() {
    while [ ! -e .topoplan/exit ] && leads; do
        read -r -t 0.04
        [ $? -ne 1 ] || return
    done
}
exec 3<&0 </dev/null
watch <&3 &
# Once the watcher has ended, tail reads what is there and ends.
tail "$2" -f -s 0.04 --pid=$! .topoplan/log
if [ -e .topoplan/exit ]; then
    read -r code <.topoplan/exit
    exit "$code"
fi
exit 1
""",
)
"""Words: run directory, where in the log to begin, as an option of tail. Ends with the job, or with standard input."""

STOP = _program(
    _LOOK_AT,
    _RECORDED,
    _MEMBERS,
    _SAY,
    """\
run=$2 grace_cs=$3 settle_cs=$4
# Reading /proc takes a moment, in which one process can start another and end: none at all is looked for again.
see() {
    for again in 1 2 3 4; do
        left=$(members)
        [ -z "$left" ] || return
    done
}
now() { read -r up rest </proc/uptime; time_cs=${up%.*}${up#*.}; }
signal() {
    look_at "${1%:*}" && [ "$ticks" = "${1#*:}" ] && kill -s "$2" "${1%:*}" 2>/dev/null
}
if [ ! -e "$1" ]; then say found ''; exit; fi
cd -- "$1" || exit @NO_DIRECTORY@
recorded && [ "$boot" = "$boot_now" ] || { say found ''; say_code; exit; }
ours=none
# As long as one process of a session lives, no other session gets its id; so this holds until we are done.
if leads; then ours=$leader; fi
see
found=$left
told=' '
now
end_cs=$((time_cs + grace_cs))
while [ -n "$left" ] && [ "$time_cs" -lt "$end_cs" ]; do
    for one in $left; do
        case $told in *" $one "*) continue ;; esac
        told="$told$one "
        # One that is stopped takes a signal only when it goes on.
        signal "$one" TERM && signal "$one" CONT
    done
    sleep 0.05
    see
    now
done
# The leader goes last, so that it can note how the script ended.
last_cs=$((time_cs + 50)) end_cs=$((time_cs + settle_cs))
while [ -n "$left" ] && [ "$time_cs" -lt "$end_cs" ]; do
    for one in $left; do
        [ "$one" = "$leader:$start" ] && [ "$time_cs" -lt "$last_cs" ] || signal "$one" KILL
    done
    sleep 0.02
    see
    now
done
# Said at the end: writing to one who has gone would end this program.
say_pids found "$found"
say_pids left "$left"
say_code
""",
)
"""Words: run directory, run id, grace and the longest wait after SIGKILL in hundredths of a second."""
