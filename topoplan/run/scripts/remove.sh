# Removes what was put there, unless something was started in it. Words: run directory.
[ -e "$1/.topoplan" ] || rm -rf -- "$1"
rmdir -- "${1%/*}" 2>/dev/null || true
