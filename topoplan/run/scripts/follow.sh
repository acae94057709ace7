# Prints the log as it grows, until the job or standard input ends. Arguments: run directory, where to begin, as an
# option of tail. Uses bash for its `read -t`: a single call that notices the end of standard input and passes the time,
# without a new process.
cd -- "$1" || exit "$NO_DIRECTORY"
is_ours || exit "$NOT_OURS"
recorded || exit "$NEVER_STARTED"
IFS= read -r boot_now </proc/sys/kernel/random/boot_id
watch() {
    while [ ! -e .topoplan/exit ] && leads; do
        read -r -t 0.04
        [ $? -ne 1 ] || return
    done
}
exec 3<&0 </dev/null
watch <&3 &
# Once the watcher has ended, tail prints the rest and ends.
tail "$2" -f -s 0.04 --pid=$! .topoplan/log
if [ -e .topoplan/exit ]; then
    read -r code ended <.topoplan/exit
    exit "$code"
fi
exit 1
