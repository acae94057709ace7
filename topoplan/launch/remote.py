r"""The text of the small shell programs that start, follow, look at and stop the job of one node on its host.

A host needs bash, awk, coreutils, grep and util-linux, and no Python. Values are words of the command or standard
input, never part of a text. What is said on standard output for us are lines `topoplan:KEY=VALUE`, so that the
greetings of a shell do no harm.

A job is known by its first process, which leads a session of its own: its process id *with its start time*, in the boot
of the machine in which it was started, because process ids come back to life as other processes. What has left the
session is known by TOPOPLAN_RUN in its environment, which names run, process id and start time, or by its parents.

A process that starts another and ends, again and again, is faster than any reading of /proc. But a signal to a group
reaches all that are in it at one moment, so groups get signals, and processes only where a group may have others in it.
What may still get away: one that leaves for a session of its own in *each* such step, and each time before it is seen;
and one in a group that nobody can prove to be the job's, because the first process has ended, the mark was dropped
(`env -i`) and its parents are gone. Neither is reported as left, for the same reason.

In <run_dir>/.topoplan: `started.json`, there before the job does anything; `log`, both outputs; `exit`, the exit code,
there once the job has ended. Each appears in one step. The job goes on when the client goes, at any moment.
"""

from __future__ import annotations

NO_DIRECTORY, NO_SCRIPT, NO_SETSID, ALREADY, NOT_STARTED, DAMAGED, NEVER_STARTED = range(21, 28)
"""Exit codes of these programs, beside 0. (A follower that got to work ends with the job's own.)"""

# pid -> life (a letter), its_group, session, ticks (start time in ticks since boot): fields 3, 5, 6 and 22 of
# proc_pid_stat(5).
# Field 2 is the program's name and may hold spaces and parentheses; the kernel escapes its newlines.
_LOOK_AT = """\
look_at() {
    { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    set -- ${line##*) }
    life=$1 its_group=$3 session=$4 ticks=${20}
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

# Every process of the job, as `pid:ticks:group`: the session whose leader is alive to prove it; those with the mark,
# and the sessions that only they can have made, because nobody else leads them; and what these started, whose group
# is 0 where it may have others in it. Reading /proc takes a moment: what is there before or after the search for the
# mark counts. Field 20 is the number of threads: a zombie with more than one still works.
_MEMBERS = """\
members() {
    {
        cat /proc/[0-9]*/stat
        echo @ $(cd /proc && grep -slzxF -- "TOPOPLAN_RUN=$mark" [0-9]*/environ)
        cat /proc/[0-9]*/stat
    } 2>/dev/null | LC_ALL=C awk -v ours="$ours" '
        $1 == "@" {
            count = split($0, found, /[^0-9]+/)
            for (at = 1; at <= count; at++) marked[found[at]]
            after = 1
            next
        }
        {
            pid = $1; rest = $0; sub(/^.*\\) /, "", rest); split(rest, field, " ")
            if (pid <= 1 || (field[1] ~ /[ZX]/ && field[18] <= 1)) next
            parent[pid] = field[2]; group[pid] = field[3]; session[pid] = field[4]; ticks[pid] = field[20]
            if (after) alive[pid]
        }
        END {
            held[ours]
            for (pid in marked) if (pid in session) {
                mine[pid]
                leader = session[pid]
                if (leader in marked || !(leader in alive)) held[leader]
            }
            for (pid in session) if (session[pid] in held) mine[pid]
            do {
                more = 0
                for (pid in parent) if (!(pid in mine) && parent[pid] in mine) { mine[pid]; more = 1 }
            } while (more)
            for (pid in mine) print pid ":" ticks[pid] ":" (session[pid] in held ? group[pid] : 0)
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
    for one in $2; do pids="$pids ${one%%:*}"; done
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
# A signal to the whole group may end it.
mv .topoplan/ending .topoplan/exit || mv .topoplan/ending .topoplan/exit
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
# A process that starts another and ends, again and again, is not seen where reading /proc takes longer than it lives.
# So look at the newest only, and at each of them once and as a whole; upwards and beyond the number that was given out
# last, to meet the next one where one has just ended.
seek() {
    read -r one two three four newest </proc/loadavg
    at=$((newest > 100 ? newest - 100 : 1)) files=
    while [ "$at" -lt "$((newest + 200))" ]; do files="$files $at/stat $at/environ" at=$((at + 1)); done
    for one in $(
        cd /proc && LC_ALL=C grep -saHz -e "^TOPOPLAN_RUN=$mark\\$" -e '^[0-9]* (.*) [A-Z] [0-9]' $files |
            LC_ALL=C tr '\\0' '\\n' | LC_ALL=C awk '
                /^[0-9]+\\/stat:/ { pid = $0; sub(/\\/.*/, "", pid); sub(/^.*\\) /, ""); split($0, field, " "); next }
                index($0, pid "/environ:") == 1 { print pid ":" field[20] ":" field[3] ":" field[4] }'
    ); do
        leads_it=${one##*:} one=${one%:*} pid=${one%%:*}
        [ "$leads_it" = "$ours" ] || ! look_at "$leads_it" || [ "$life" = Z ] ||
            grep -qszxF -- "TOPOPLAN_RUN=$mark" "/proc/$leads_it/environ" || one=${one%:*}:0
        left="$left $one"
    done
}
# None at all is looked for again, and longer where the kernel knows the group of the first process and it is not that
# one itself, which waits for its parent.
see() {
    again=0
    while
        left=
        if [ "$((again % 6))" -eq 0 ]; then set -- $(members); left=$*; fi
        [ -n "$left" ] || seek
        again=$((again + 1))
        [ -z "$left" ] && { [ "$again" -lt 12 ] || { [ "$again" -lt 60 ] && lives_on; }; }
    do :; done
}
lives_on() { kill -s 0 -- "-$leader" 2>/dev/null && ! look_at "$leader"; }
now() { read -r up rest </proc/uptime; time_cs=${up%.*}${up#*.}; }
apart() { pid=${1%%:*} group=${1##*:} since=${1#*:} since=${since%:*}; }
signal() {
    look_at "$pid" && [ "$ticks" = "$since" ] && kill -s "$1" "$pid" 2>/dev/null
}
# A group as a whole: also those that were not seen, because a process cannot start another while this is done. Its
# number is that of a process, which is one of the job's or is no more.
signal_group() {
    if look_at "$group" && [ "$life" != Z ]; then
        case " $left " in *" $group:$ticks:"*) ;; *) return 1 ;; esac
    fi
    kill -s "$1" -- "-$group" 2>/dev/null
}
tell() {
    fresh=' '
    for one in $left; do
        apart "$one"
        [ "$group" != 0 ] || continue
        case $told in *" -$group "*) continue ;; esac
        told="$told-$group "
        # One that is stopped takes a signal only when it goes on.
        signal_group TERM && signal_group CONT && fresh="$fresh-$group "
    done
    for one in $left; do
        apart "$one"
        case $told in *" $one "*) continue ;; esac
        told="$told$one "
        case $fresh in *" -$group "*) continue ;; esac
        signal TERM && signal CONT
    done
}
# All but the first process, while it is there: it can still note how the script ended. Its group is stopped before, so
# that nobody in it starts another or ends; the rest of a group has no time to.
end() {
    keeper=none
    if [ "$rounds" -le 3 ] && leads; then
        keeper=$leader group=$leader
        signal_group STOP
        see
    fi
    for one in $left; do
        apart "$one"
        [ "$pid" != "$keeper" ] || continue
        [ "$group" != 0 ] && [ "$group" != "$keeper" ] && signal_group KILL || signal KILL
    done
    [ "$keeper" = none ] || kill -s CONT "$keeper"
    for again in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
        sleep 0.02
        [ "$keeper" != none ] && leads || break
    done
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
    tell
    sleep 0.05
    see
    now
done
end_cs=$((time_cs + settle_cs)) rounds=0
while [ -n "$left" ] && [ "$time_cs" -lt "$end_cs" ]; do
    rounds=$((rounds + 1))
    end
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
