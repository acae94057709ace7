# Removes the uploaded files, unless something was started in the directory. Arguments: run directory.
[ -e "$1/.topoplan" ] || rm -rf -- "$1"
rmdir -- "${1%/*}" 2>/dev/null || true
