# The first process of a job, which leads a session of its own. Arguments: the script, the name of the run here, and a
# Python to use if there is no python3. Standard input: supervise.py as a JSON string, and a line for it, both empty if
# there is nothing to supervise; then the environment as shell text, and a line that marks the end. It records itself
# and reports that on its outputs, which are the starter's until then; then it runs the script and waits for it. A
# signal to the whole session ends the script but not this process: a trap with a command is not inherited, unlike an
# ignored signal. The exit code goes into a file whose disk space is already allocated.
script=$1 run=$2 python=$3 supervisor= signaled=
IFS= read -r supervise
IFS= read -r peers
environment=$(timeout 60 cat)
case $environment in *"$WHOLE") ;; *) exit 1 ;; esac
trap : HUP INT QUIT USR1 USR2 ALRM
# `stop` ends all but this process with SIGTERM, or with SIGKILL, after which it lets this process continue.
trap signaled=yes TERM CONT
look_at $$ && IFS= read -r boot </proc/sys/kernel/random/boot_id || exit 1
# Not the shell's own printf: dash's does not say why it cannot write.
env printf '%30s\n' '' >.topoplan/ending &&
    : >>.topoplan/log &&
    env printf '{"schema": "%s", "pid": %s, "session": %s, "start_ticks": %s, "boot_id": "%s", "unix_s": %s}\n' \
        topoplan.started/1 $$ "$session" "$ticks" "$boot" "$(date +%s)" >.topoplan/starting &&
    mv .topoplan/starting .topoplan/started.json || exit 1
exec >>.topoplan/log 2>&1 </dev/null
export TOPOPLAN_RUN="$run/$$/$ticks"
[ "$python" ] && ! command -v python3 >/dev/null || python=python3
if [ "$peers" ] && command -v "$python" >/dev/null; then
    # Not passed as an argument, which everybody would see in the process list.
    supervisor=$(
        printf '%s\n' "$supervise" "$peers" |
            timeout 40 "$python" -I -c 'import json; PROGRAM = input(); exec(json.loads(PROGRAM))' $$ "$ticks" "$boot"
    )
fi
code=$?
# 143, 137: the job was ended before the script began, unless only the supervisor was, by hand or for its memory.
if [ ! "$signaled" ] || { [ "$code" -ne 143 ] && [ "$code" -ne 137 ]; }; then
    [ "$code" -eq 0 ] ||
        echo "topoplan: the supervisor ended with code $code; if a node fails, the others may not notice by themselves"
    (
        eval "$environment"
        unset environment
        exec bash -- "$script"
    )
    code=$?
fi
# The exit code comes with the time since boot, which cannot be set, unlike the clock.
read -r up rest </proc/uptime
printf '%d %s' "$code" "$up" 1<>.topoplan/ending
# A signal to the whole group may end mv.
mv .topoplan/ending .topoplan/exit || mv .topoplan/ending .topoplan/exit
# The process id may have been reused by now.
if [ "$supervisor" ] && grep -qszxF -- "TOPOPLAN_RUN=$TOPOPLAN_RUN" "/proc/$supervisor/environ"; then
    if [ "$code" -eq 0 ]; then kill -s USR1 "$supervisor"; else kill -s USR2 "$supervisor"; fi
fi
