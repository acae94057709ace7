# Reports what may slow this machine down: load on its CPUs, waits for I/O and memory, and the clocks of its GPUs.
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/wsl/lib
say cpus "$(getconf _NPROCESSORS_ONLN)"
say load "$(cat /proc/loadavg)"
for what in io memory; do
    { read -r some <"/proc/pressure/$what"; } 2>/dev/null && say "$what" "$some"
done
command -v nvidia-smi >/dev/null || exit 0
# A clock may be low between two kernels, but not at each of three moments.
for look in 1 2 3; do
    [ "$look" = 1 ] || sleep 1
    timeout -k 1 10 nvidia-smi --query-gpu=index,clocks.sm,clocks_throttle_reasons.active,temperature.gpu \
        --format=csv,noheader,nounits | while IFS=', ' read -r index rest; do say "gpu.$index.$look" "$rest"; done
done 2>/dev/null
exit 0
