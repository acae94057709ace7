r"""The text of the small shell programs that start, follow, look at and stop the job of one node on its host.

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
there once the job has ended. Each appears in one step. The job goes on when the client goes, at any moment.
"""

from __future__ import annotations

_CODES = (
    "NO_DIRECTORY",
    "NO_SCRIPT",
    "NO_SETSID",
    "ALREADY",
    "NOT_STARTED",
    "DAMAGED",
    "NEVER_STARTED",
    "NOT_OURS",
    "CHANGED",
    "NO_PROC",
)
(
    NO_DIRECTORY,
    NO_SCRIPT,
    NO_SETSID,
    ALREADY,
    NOT_STARTED,
    DAMAGED,
    NEVER_STARTED,
    NOT_OURS,
    CHANGED,
    NO_PROC,
) = range(21, 31)
"""Exit codes of these programs, beside 0. (A follower that got to work ends with the job's own.)"""

# Whether the working directory is ours, and nobody else may write in it; owner and mode of it. Where it does not look
# so, a directory that we make in it shows who we are there (NFS may take root for nobody), and whether modes are kept:
# some file systems know none, and there nothing can be asked of them.
OURS = """\
made_here() {
    sample=$(mktemp -d ./.topoplan-XXXXXXXX 2>/dev/null) || return 1
    stat -c '%u %a' -- "$sample"
    rmdir -- "$sample"
}
is_ours() {
    owner=$(stat -c %u .) && mode=$(stat -c %a .) || return 1
    if [ -O . ] && [ "$((0$mode & 022))" -eq 0 ]; then return; fi
    sample=$(made_here) || return 1
    [ "${sample% *}" = "$owner" ] && [ "$((0$mode & 022 & ~0${sample#* }))" -eq 0 ]
}
whose() {
    if [ -O . ]; then echo "others can write in it (mode $mode)"
    else echo "it belongs to $(stat -c '%U (uid %u)' .)"
    fi
}
"""

# pid -> life (a letter), its parent, its_group, session, ticks (start time in ticks since boot): fields 3, 4, 5, 6 and
# 22 of proc_pid_stat(5).
# Field 2 is the program's name and may hold spaces and parentheses; the kernel escapes its newlines.
_LOOK_AT = """\
look_at() {
    { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    set -- ${line##*) }
    life=$1 its_parent=$2 its_group=$3 session=$4 ticks=${20}
}
"""

# leader, start and boot as started.json has them. Fails where there is none, or it is damaged.
_RECORDED = """\
take() {
    value=${text#*"\\"$1\\": "}
    value=${value#\\"}
    value=${value%%[!0-9a-f-]*}
    case $value in
        '' | $2) return 1 ;;
    esac
}
recorded() {
    text=
    { IFS= read -r text <.topoplan/started.json; } 2>/dev/null
    take pid '*[!0-9]*' && leader=$value &&
        take start_ticks '*[!0-9]*' && start=$value &&
        take boot_id '-*' && boot=$value
}
leads() {
    [ "$boot" = "$boot_now" ] && look_at "$leader" && [ "$ticks" = "$start" ] && [ "$life" != Z ]
}
"""

# Words of find_job: the run directory, and process id, start and boot where the client knows them. It says leader,
# start, boot and mark, how the directory is, and where files of ours are kept; it fails where there is no job to be
# seen. What processes say of themselves counts only if they are of this user: anybody can put a mark on his own.
_JOB = """\
by_name() {
    for pid in $(cd /proc && grep -slzxF -- "$run" [0-9]*/cmdline); do
        pid=${pid%/*}
        [ -O "/proc/$pid" ] && grep -qszxF topoplan "/proc/$pid/cmdline" || continue
        if look_at "$pid" && [ "$session" = "$pid" ] && [ "$life" != Z ]; then
            leader=$pid start=$ticks
            return
        fi
    done
    for pid in $(cd /proc && grep -slzF -- "TOPOPLAN_RUN=$run/" [0-9]*/environ); do
        pid=${pid%/*}
        [ -O "/proc/$pid" ] || continue
        its_mark=$(tr '\\0' '\\n' <"/proc/$pid/environ" | grep -m 1 '^TOPOPLAN_RUN=') || continue
        its_mark=${its_mark#"TOPOPLAN_RUN=$run/"}
        leader=${its_mark%%/*} start=${its_mark#*/}
        case $leader/$start in /* | */ | *[!0-9/]*) ;; *) return ;; esac
    done 2>/dev/null
    leader= start=0
    return 1
}
find_job() {
    IFS= read -r boot_now </proc/sys/kernel/random/boot_id && look_at $$ || exit @NO_PROC@
    directory=there leader= start=0 text= why=
    if ! cd -- "$1" 2>/dev/null; then
        directory=closed why=$(cd -- "$1" 2>&1)
        [ -e "$1" ] || directory=gone
    elif ! is_ours; then directory=foreign why=$(whose)
    elif recorded; then
        [ -z "$2" ] || [ "$leader/$start/$boot" = "$2/$3/$4" ] || directory=damaged
    elif [ -e .topoplan/started.json ] || [ -e .topoplan/log ]; then directory=damaged
    fi
    kept=.topoplan
    case $directory in closed | gone | foreign) kept=/dev/null/none; cd / ;; esac
    if [ -n "$2" ]; then leader=$2 start=$3 boot=$4
    elif [ "$directory" != there ] || [ -z "$leader" ]; then
        boot=$boot_now
        if ! by_name; then
            case $directory in
                closed) printf '%s\n' "$why" >&2; exit @NO_DIRECTORY@ ;;
                foreign) printf '%s\n' "$why" >&2; exit @NOT_OURS@ ;;
                damaged) exit @DAMAGED@ ;;
            esac
            return 1
        fi
        text=$(printf '{"pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}' \\
            "$leader" "$leader" "$start" "$boot" "$(began "$start")")
    fi
    mark=$run/$leader/$start
}
# The moment, in seconds since 1970, of a start time in ticks.
began() {
    LC_ALL=C awk -v ticks="$1" -v rate="$(getconf CLK_TCK || echo 100)" '
        $1 == "btime" { printf "%d", $2 + ticks / rate }' /proc/stat
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
    [ ! -e "$kept/exit" ] || read -r code <"$kept/exit"
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
    for name in _CODES:
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
"""Run by `sh -c` as the leader of a new session, with the script and the directory's name for the run. Standard input:
the environment."""

START = _program(
    OURS,
    """\
cd -- "$1" || exit @NO_DIRECTORY@
is_ours || { whose >&2; exit @NOT_OURS@; }
[ -f "$2" ] && [ -r "$2" ] || exit @NO_SCRIPT@
printf %s "$5" | while IFS= read -r line; do
    name=${line#*  }
    case $line in \\*) name=$2 ;; esac  # an odd name, which is not written as it is
    if [ ! -f "$name" ] || [ -L "$name" ]; then
        printf '%s\n' "$name" >&2
        exit 1
    fi
done || exit @CHANGED@
if [ -n "$5" ] && ! said=$(printf %s "$5" | LC_ALL=C sha256sum --check --strict --quiet 2>/dev/null); then
    printf '%s\n' "${said%%: FAILED*}" >&2
    exit @CHANGED@
fi
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
"""Words: run directory, script in it, its name for the run, `KEEPER`, and what `sha256sum --check` reads of the files
that were put there, or nothing. Standard input: shell text that exports the environment."""

STATE = _program(
    OURS,
    _LOOK_AT,
    _RECORDED,
    _JOB,
    _MEMBERS,
    _SAY,
    """\
run=$2
find_job "$1" "$3" "$4" "$5" || { say state never-started; say directory "$directory"; exit; }
say directory "$directory"
[ -z "$text" ] || say started "$text"
state=gone ours=none
if [ "$boot" != "$boot_now" ]; then state=rebooted
elif leads; then state=running ours=$leader
fi
# In this order: a job that ends meanwhile has its exit code by now.
if [ -e "$kept/exit" ]; then
    state=ended
    say ended_unix_s "$(date -r "$kept/exit" +%s.%N)"
fi
say state "$state"
say_code
[ ! -e "$kept/log" ] || say log_bytes "$(($(wc -c <"$kept/log")))"
say now_unix_s "$(date +%s.%N)"
[ "$boot" != "$boot_now" ] || say_pids pids "$(members)"
""",
)
"""Words: run directory, its name for the run; and process id, start and boot of the first process, or nothing."""

# bash, for its `read -t`: one call that notices the end of standard input and passes the time, without a new process.
FOLLOW = _program(
    OURS,
    _LOOK_AT,
    _RECORDED,
    """\
cd -- "$1" || exit @NO_DIRECTORY@
is_ours || exit @NOT_OURS@
recorded || exit @NEVER_STARTED@
IFS= read -r boot_now </proc/sys/kernel/random/boot_id
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

# Processes that may be of the job, which nobody can prove: they are of this user, were started after it, have the mark
# of no other run, and hold a file of this one, a deleted one too, or a GPU. What the programs of clients hold
# (`bash --norc -s`) and their children is not meant, this one's neither. What ends while it is looked at, or loses its
# parent, shows neither mark nor parent: so each is looked at until it has the same parent twice, and memory.
_HOLDERS = """\
is_looking() { [ "$1" = "$$" ] || [ "$(tr '\\0' ' ' <"/proc/$1/cmdline")" = 'bash --norc -s ' ]; }
is_nobodys() {
    [ -O "$pid" ] && look_at "$pid" && [ "$life" != Z ] && [ "$ticks" -ge "$start" ] || return 1
    ! is_looking "$pid" && ! is_looking "$its_parent" && ! grep -qsz '^TOPOPLAN_RUN=' "$pid/environ" &&
        read -r pages rest <"$pid/statm" && [ "$pages" != 0 ]
}
may_be() {
    before=
    while is_nobodys; do
        [ "$its_parent" != "$before" ] || return 0
        before=$its_parent
    done
    return 1
}
holders() {
    cd /proc
    links= maps=
    for pid in [0-9]*; do
        [ ! -O "$pid" ] || links="$links $pid/cwd $pid/fd" maps="$maps $pid/maps"
    done
    files=$(
        LC_ALL=C ls -lU $links | RUN=$run LC_ALL=C awk '
            /^[0-9]+\\/fd:$/ { pid = $1 + 0; next }
            (at = index($0, " -> ")) {
                place = substr($0, at + 4); sub(/ \\(deleted\\)$/, "", place)
                if (!index(place "/", "/" ENVIRON["RUN"] "/")) next
                sub(/ -> .*/, ""); sub(/.* /, "")
                print (sub(/\\/cwd$/, "") ? $0 : pid)
            }'
        grep -slF -- "/$run/" $maps | tr -dc '0-9\\n'
    )
    gpus=
    if [ "$start" -gt 0 ] && command -v nvidia-smi >/dev/null; then
        gpus=$(timeout 8 nvidia-smi --query-compute-apps=pid --format=csv,noheader) || say gpus_unseen "$?"
    fi
    seen=' '
    for one in $(printf '%s:file\\n' $files) $(printf '%s:GPU\\n' $gpus); do
        pid=${one%:*}
        case $pid in '' | *[!0-9]*) continue ;; esac
        case "$seen" in *" $pid "*) continue ;; esac
        seen="$seen$pid "
        case " $left " in *" $pid:"*) continue ;; esac
        ! may_be || say "may_be.$pid" "$(began "$ticks") ${one#*:} $(
            head -c 200 "$pid/cmdline" | LC_ALL=C tr '\\0' ' ' | LC_ALL=C tr -c '[:print:]' '?'
        )"
    done
} 2>/dev/null
"""

STOP = _program(
    OURS,
    _LOOK_AT,
    _RECORDED,
    _JOB,
    _MEMBERS,
    _SAY,
    _HOLDERS,
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
found= left= ours=none
if find_job "$1" "$5" "$6" "$7"; then
    if [ "$boot" != "$boot_now" ]; then
        say found ''
        say directory "$directory"
        say_code
        exit
    fi
    # As long as one process of a session lives, no other session gets its id; so this holds until we are done.
    if leads; then ours=$leader; fi
    see
    found=$left
fi
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
may_be=$(holders)
# Said at the end: writing to one who has gone would end this program.
say_pids found "$found"
say_pids left "$left"
say directory "$directory"
say_code
[ -z "$may_be" ] || printf '%s\n' "$may_be"
""",
)
"""Words: run directory, its name for the run, grace and the longest wait after SIGKILL in hundredths of a second; and
process id, start and boot of the first process, or nothing."""
