# Reports the state of the job. Arguments: run directory, the name of the run here; and process id, start and boot of
# the first process, or nothing.
run=$2
find_job "$1" "$3" "$4" "$5" || { say state never-started; say directory "$directory"; exit; }
say directory "$directory"
[ -z "$text" ] || say started "$text"
state=gone ours=none
if [ "$boot" != "$boot_now" ]; then state=rebooted
elif leads; then state=running ours=$leader
fi
# The order matters: a job that ends meanwhile has its exit code by now.
[ ! -e "$kept/exit" ] || state=ended
say state "$state"
say_code
[ ! -e "$kept/stopped" ] || say stopped "$(head -c 200 "$kept/stopped" | head -n 1)"
# Uses the time since boot, which cannot be set. For an end in an earlier boot, only the clock tells how long ago it
# was.
read -r up rest </proc/uptime
ago=
if [ "$state" = ended ] && { [ "$boot" != "$boot_now" ] || [ -z "$ended" ]; }; then
    ago=$(($(date +%s) - $(date -r "$kept/exit" +%s)))
fi
LC_ALL=C awk -v state="$state" -v up="$up" -v ended="$ended" -v start="$start" -v ago="$ago" \
    -v rate="$(getconf CLK_TCK || echo 100)" 'BEGIN {
        if (state == "ended") printf "topoplan:ended_s_ago=%.2f\n", ago == "" ? up - ended : ago
        if (state == "running") ended = up
        if (ended != "") printf "topoplan:elapsed_s=%d\n", ended - start / rate
    }'
[ ! -e "$kept/log" ] || say log_bytes "$(($(wc -c <"$kept/log")))"
[ "$boot" != "$boot_now" ] || say_pids pids "$(members)"
