# Reports on the ranks of the job: whether the system has stopped them, their stacks according to py-spy if that is on
# their PATH, and how much the job writes meanwhile. Arguments: as for state.sh. A rank is the topmost of the processes
# to which torchrun has given its number; the number is inherited by its children.
run=$2
find_job "$1" "$3" "$4" "$5" || exit 0
ours=none
! leads || ours=$leader
told() { tr '\0' '\n' <"/proc/$1/environ" | sed -n "s/^$2=//p"; }
written() {
    cat $(members | sed 's|:.*|/io|; s|^|/proc/|') /dev/null | LC_ALL=C awk '$1 == "wchar:" { sum += $2 } END { printf "%d", sum }'
}
{
    before=$(written)
    sleep 3 &
    for one in $(members); do
        pid=${one%%:*}
        rank=$(told "$pid" RANK)
        case $rank in '' | *[!0-9]*) continue ;; esac
        look_at "$pid" && how=$life && [ "$(told "$its_parent" RANK)" != "$rank" ] || continue
        say rank "$rank"
        # Waiting for a disk for a moment is normal, so look twice.
        [ "$how" != D ] || { sleep 0.2; look_at "$pid" && how=$life; }
        say life "$how"
        spy=$(PATH=$(told "$pid" PATH) command -v py-spy) || continue
        timeout 10 "$spy" dump --nonblocking --pid "$pid"
    done
    wait
    say written "$(($(written) - before))"
} 2>/dev/null
exit 0
