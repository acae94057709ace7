# The first process of a job, which leads a session of its own. Words: the script, and what the run is called here.
# Standard input: the environment, as shell text.
# It records itself and says so on its outputs, which are the starter's until then; then it runs the script and waits
# for it. A signal to the whole session ends the script, not this: a trap that does something is not inherited, unlike
# one that ignores. The exit code goes into a file that has its room on the disk already.
script=$1 run=$2
environment=$(cat)
trap : HUP INT QUIT TERM USR1 USR2 ALRM
look_at $$ && IFS= read -r boot </proc/sys/kernel/random/boot_id || exit 1
# Not the shell's own printf: that of dash does not say why it cannot write.
env printf '%30s\n' '' >.topoplan/ending &&
    : >>.topoplan/log &&
    env printf '{"schema": "%s", "pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}\n' \
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
# And when: by the time since boot, which nobody sets, unlike the clock.
read -r up rest </proc/uptime
printf '%d %s' "$code" "$up" 1<>.topoplan/ending
# A signal to the whole group may end it.
mv .topoplan/ending .topoplan/exit || mv .topoplan/ending .topoplan/exit
