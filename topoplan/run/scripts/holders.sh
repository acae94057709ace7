# Processes that may belong to the job, without proof: they belong to this user, were started after the job, do not have
# the mark of another run, and hold a file of this run (also a deleted one) or a GPU. The programs of clients (`bash
# --norc -s`) and their children are excluded, and so is this program. A process that ends or loses its parent while it
# is inspected shows neither mark nor parent; so each is inspected until it has the same parent twice, and memory.
is_looking() { [ "$1" = "$$" ] || [ "$(tr '\0' ' ' <"/proc/$1/cmdline")" = 'bash --norc -s ' ]; }
is_nobodys() {
    [ -O "$pid" ] && look_at "$pid" && [ "$life" != Z ] && [ "$ticks" -ge "$start" ] || return 1
    ! is_looking "$pid" && ! is_looking "$its_parent" && ! grep -qsz '^TOPOPLAN_RUN=' "$pid/environ" &&
        read -r pages rest <"$pid/statm" && [ "$pages" != 0 ]
}
may_be() {
    before=
    while is_nobodys; do
        [ "$its_parent" != "$before" ] || return 0
        before=$its_parent
    done
    return 1
}
holders() {
    cd /proc
    links= maps=
    for pid in [0-9]*; do
        [ ! -O "$pid" ] || links="$links $pid/cwd $pid/fd" maps="$maps $pid/maps"
    done
    files=$(
        LC_ALL=C ls -lU $links | RUN=$run LC_ALL=C awk '
            /^[0-9]+\/fd:$/ { pid = $1 + 0; next }
            (at = index($0, " -> ")) {
                place = substr($0, at + 4); sub(/ \(deleted\)$/, "", place)
                if (!index(place "/", "/" ENVIRON["RUN"] "/")) next
                sub(/ -> .*/, ""); sub(/.* /, "")
                print (sub(/\/cwd$/, "") ? $0 : pid)
            }'
        grep -slF -- "/$run/" $maps | tr -dc '0-9\n'
    )
    gpus=
    if [ "$start" -gt 0 ] && command -v nvidia-smi >/dev/null; then
        gpus=$(timeout 8 nvidia-smi --query-compute-apps=pid --format=csv,noheader) || say gpus_unseen "$?"
    fi
    seen=' '
    for one in $(printf '%s:file\n' $files) $(printf '%s:GPU\n' $gpus); do
        pid=${one%:*}
        case $pid in '' | *[!0-9]*) continue ;; esac
        case "$seen" in *" $pid "*) continue ;; esac
        seen="$seen$pid "
        case " $left " in *" $pid:"*) continue ;; esac
        ! may_be || say "may_be.$pid" "$(began "$ticks") ${one#*:} $(
            head -c 200 "$pid/cmdline" | LC_ALL=C tr '\0' ' ' | LC_ALL=C tr -c '[:print:]' '?'
        )"
    done
} 2>/dev/null
