# How the job is. Words: run directory, what the run is called here; and process id, start and boot of the first
# process, or nothing.
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
