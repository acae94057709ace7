# Where the ranks of the job are in their programs, as py-spy says, where it is on their PATH. Words: those of state.sh.
# A rank is the first of the processes to which torchrun has given its number; they may have others in which it is too.
run=$2
find_job "$1" "$3" "$4" "$5" || exit 0
ours=none
! leads || ours=$leader
told() { tr '\0' '\n' <"/proc/$1/environ" | sed -n "s/^$2=//p"; }
for one in $(members); do
    pid=${one%%:*}
    rank=$(told "$pid" RANK)
    case $rank in '' | *[!0-9]*) continue ;; esac
    look_at "$pid" && [ "$(told "$its_parent" RANK)" != "$rank" ] || continue
    spy=$(PATH=$(told "$pid" PATH) command -v py-spy) || continue
    say rank "$rank"
    timeout 10 "$spy" dump --nonblocking --pid "$pid"
done 2>/dev/null
exit 0
