# How the ranks of the job are: whether the system has stopped them, where they are in their programs, as py-spy says
# where it is on their PATH, and how much the job writes meanwhile. Words: those of state.sh.
# A rank is the first of the processes to which torchrun has given its number; they may have others in which it is too.
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
        # For a moment all wait for a disk now and then.
        [ "$how" != D ] || { sleep 0.2; look_at "$pid" && how=$life; }
        say life "$how"
        spy=$(PATH=$(told "$pid" PATH) command -v py-spy) || continue
        timeout 10 "$spy" dump --nonblocking --pid "$pid"
    done
    wait
    say written "$(($(written) - before))"
} 2>/dev/null
exit 0
