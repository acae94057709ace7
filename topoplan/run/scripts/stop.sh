# Ends the job, and reports what is left of it. Arguments: run directory, the name of the run here, the grace period and
# the longest wait after SIGKILL in hundredths of a second; and process id, start and boot of the first process, or
# nothing.
run=$2 grace_cs=$3 settle_cs=$4
# A process that starts another and ends, again and again, is not seen if reading /proc takes longer than it lives. So
# only the newest processes are examined, each of them once and as a whole; in ascending order and beyond the last
# assigned number, to meet the next one if one has just ended.
seek() {
    read -r one two three four newest </proc/loadavg
    eval "set -- {$((newest > 100 ? newest - 100 : 1))..$((newest + 200))}/{stat,environ}"
    for one in $(
        cd /proc && LC_ALL=C grep -saHz -e "^TOPOPLAN_RUN=$mark\$" -e '^[0-9]* (.*) [A-Z] [0-9]' "$@" |
            LC_ALL=C tr '\0' '\n' | LC_ALL=C awk '
                /^[0-9]+\/stat:/ { pid = $0; sub(/\/.*/, "", pid); sub(/^.*\) /, ""); split($0, field, " "); next }
                index($0, pid "/environ:") == 1 { print pid ":" field[20] ":" field[3] ":" field[4] }'
    ); do
        leads_it=${one##*:} one=${one%:*} pid=${one%%:*}
        [ "$leads_it" = "$ours" ] || ! look_at "$leads_it" || [ "$life" = Z ] ||
            grep -qszxF -- "TOPOPLAN_RUN=$mark" "/proc/$leads_it/environ" || one=${one%:*}:0
        left="$left $one"
    done
}
# If no process is found, the search is repeated; and longer if the kernel still knows the group of the first process,
# and that is not because of the first process itself, waiting for its parent.
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
# Signals a whole group, including processes that were not seen, because none can start another meanwhile. The number of
# the group is that of a process which is one of the job's or no longer exists.
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
        # A stopped process handles a signal only once it continues.
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
# Kills all but the first process, as long as it is there: it can still record how the script ended, for which it and
# its `mv` get most of the time. Its group is stopped before, so that nobody in it starts another or ends; the processes
# of other groups have no time to.
records() {
    look_at "$pid" && [ "$its_parent" = "$keeper" ] && { IFS= read -r called <"/proc/$pid/comm"; } 2>/dev/null &&
        [ "$called" = mv ]
}
end() {
    keeper=none
    if [ "$last" -eq 0 ] && leads; then
        keeper=$leader group=$leader
        signal_group STOP
        see
    fi
    for one in $left; do
        apart "$one"
        [ "$pid" != "$keeper" ] && ! records || continue
        [ "$group" != 0 ] && [ "$group" != "$keeper" ] && signal_group KILL || signal KILL
    done
    [ "$keeper" = none ] || kill -s CONT -- "-$keeper"
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
    # As long as one process of a session lives, no other session gets its id; so this holds until the end.
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
end_cs=$((time_cs + settle_cs)) spare_cs=$((time_cs + settle_cs * 4 / 5)) rounds=0 last=0
# On a busy machine a single round may take that long: a few spare the first process, and a few do not.
while [ -n "$left" ] && { [ "$last" -lt 3 ] || [ "$time_cs" -lt "$end_cs" ]; }; do
    rounds=$((rounds + 1))
    [ "$rounds" -le 3 ] || [ "$time_cs" -lt "$spare_cs" ] || last=$((last + 1))
    end
    see
    now
done
may_be=$(holders)
# Printed at the end: writing to a client that has gone would end this program.
say_pids found "$found"
say_pids left "$left"
say directory "$directory"
say_code
[ -z "$may_be" ] || printf '%s\n' "$may_be"
