# Prints results for the client as lines `topoplan:KEY=VALUE`.
say() { printf 'topoplan:%s=%s\n' "$1" "$2"; }
say_code() {
    code= ended=
    [ ! -e "$kept/exit" ] || read -r code ended <"$kept/exit"
    say code "$code"
}
say_pids() {
    pids=
    for one in $2; do pids="$pids ${one%%:*}"; done
    say "$1" "$pids"
}
