# The first process of a job, which leads a session of its own. Words: the script, what the run is called here, and a
# Python where there is no python3. Standard input: supervise.py as a string of JSON, and a line for it, both empty where
# there is nothing to supervise; then the environment, as shell text, and a line that says that this is all.
# It records itself and says so on its outputs, which are the starter's until then; then it runs the script and waits
# for it. A signal to the whole session ends the script, not this: a trap that does something is not inherited, unlike
# one that ignores. The exit code goes into a file that has its room on the disk already.
script=$1 run=$2 python=$3 supervisor=
IFS= read -r supervise
IFS= read -r peers
environment=$(timeout 60 cat)
case $environment in *"$WHOLE") ;; *) exit 1 ;; esac
trap : HUP INT QUIT TERM USR1 USR2 ALRM
look_at $$ && IFS= read -r boot </proc/sys/kernel/random/boot_id || exit 1
# Not the shell's own printf: that of dash does not say why it cannot write.
env printf '%30s\n' '' >.topoplan/ending &&
    : >>.topoplan/log &&
    env printf '{"schema": "%s", "pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}\n' \
        topoplan.started/1 $$ "$session" "$ticks" "$boot" "$(date +%s)" >.topoplan/starting &&
    mv .topoplan/starting .topoplan/started.json || exit 1
exec >>.topoplan/log 2>&1 </dev/null
export TOPOPLAN_RUN="$run/$$/$ticks"
[ "$python" ] && ! command -v python3 >/dev/null || python=python3
if [ "$peers" ] && command -v "$python" >/dev/null; then
    # Not as a word, which everybody would see among the processes.
    supervisor=$(
        printf '%s\n' "$supervise" "$peers" |
            timeout 40 "$python" -I -c 'import json; PROGRAM = input(); exec(json.loads(PROGRAM))' $$ "$ticks" "$boot"
    )
fi
code=$?
# 143: somebody ended it before the script was begun.
if [ "$code" -ne 143 ]; then
    (
        eval "$environment"
        unset environment
        exec bash -- "$script"
    )
    code=$?
fi
# And when: by the time since boot, which nobody sets, unlike the clock.
read -r up rest </proc/uptime
printf '%d %s' "$code" "$up" 1<>.topoplan/ending
# A signal to the whole group may end it.
mv .topoplan/ending .topoplan/exit || mv .topoplan/ending .topoplan/exit
# Under its number another process may be by now.
if [ "$supervisor" ] && grep -qszxF -- "TOPOPLAN_RUN=$TOPOPLAN_RUN" "/proc/$supervisor/environ"; then
    if [ "$code" -eq 0 ]; then kill -s USR1 "$supervisor"; else kill -s USR2 "$supervisor"; fi
fi
