# Whether the working directory is ours, and nobody else may write in it; sets its owner and mode. If it does not look
# so, a directory that we create in it shows who we are there (NFS may map root to nobody), and whether modes are kept:
# some file systems have none, and cannot be asked for them.
# shellcheck shell=bash
made_here() {
    sample=$(mktemp -d ./.topoplan-XXXXXXXX 2>/dev/null) || return 1
    stat -c '%u %a' -- "$sample"
    rmdir -- "$sample"
}
is_ours() {
    owner=$(stat -c %u .) && mode=$(stat -c %a .) || return 1
    if [ -O . ] && [ "$((0$mode & 022))" -eq 0 ]; then return; fi
    sample=$(made_here) || return 1
    [ "${sample% *}" = "$owner" ] && [ "$((0$mode & 022 & ~0${sample#* }))" -eq 0 ]
}
whose() {
    if [ -O . ]; then echo "others can write in it (mode $mode)"
    else echo "it belongs to $(stat -c '%U (uid %u)' .)"
    fi
}
