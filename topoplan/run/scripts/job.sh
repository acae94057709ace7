# Sets leader, start and boot from started.json. Fails if there is none, or it is damaged.
take() {
    value=${text#*"\"$1\": "}
    value=${value#\"}
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

# Arguments of find_job: the run directory; and process id, start and boot if the client knows them. Sets leader, start,
# boot and mark, the condition of the directory, and where our files are kept; fails if there is no job to be seen. What
# processes claim counts only if they belong to this user: anybody can put a mark on his own.
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
        its_mark=$(tr '\0' '\n' <"/proc/$pid/environ" | grep -m 1 '^TOPOPLAN_RUN=') || continue
        its_mark=${its_mark#"TOPOPLAN_RUN=$run/"}
        leader=${its_mark%%/*} start=${its_mark#*/}
        case $leader/$start in /* | */ | *[!0-9/]*) ;; *) return ;; esac
    done 2>/dev/null
    leader= start=0
    return 1
}
find_job() {
    IFS= read -r boot_now </proc/sys/kernel/random/boot_id && look_at $$ || exit "$NO_PROC"
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
                closed) printf '%s\n' "$why" >&2; exit "$NO_DIRECTORY" ;;
                foreign) printf '%s\n' "$why" >&2; exit "$NOT_OURS" ;;
                damaged) exit "$DAMAGED" ;;
            esac
            return 1
        fi
        text=$(printf '{"pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}' \
            "$leader" "$leader" "$start" "$boot" "$(began "$start")")
    fi
    mark=$run/$leader/$start
}
# Converts a start time in ticks to seconds since 1970.
began() {
    LC_ALL=C awk -v ticks="$1" -v rate="$(getconf CLK_TCK || echo 100)" '
        $1 == "btime" { printf "%d", $2 + ticks / rate }' /proc/stat
}
