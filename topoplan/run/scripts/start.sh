# Starts the job. Arguments: run directory, script in it, the name of the run here, the text of keep.sh, the SHA-256 and
# names of the uploaded files, or nothing, and the last argument of keep.sh, which also inherits the standard input.
cd -- "$1" || exit "$NO_DIRECTORY"
is_ours || { whose >&2; exit "$NOT_OURS"; }
[ -f "$2" ] && [ -r "$2" ] || exit "$NO_SCRIPT"
printf %s "$5" | while IFS= read -r line; do
    name=${line#*  }
    case $line in \*) name=$2 ;; esac  # an odd name, which is not written as it is
    if [ ! -f "$name" ] || [ -L "$name" ]; then
        printf '%s\n' "$name" >&2
        exit 1
    fi
done || exit "$CHANGED"
if [ -n "$5" ] && ! said=$(printf %s "$5" | LC_ALL=C sha256sum --check --strict --quiet 2>/dev/null); then
    printf '%s\n' "${said%%: FAILED*}" >&2
    exit "$CHANGED"
fi
command -v setsid >/dev/null || exit "$NO_SETSID"
if ! said=$(mkdir -m 700 .topoplan 2>&1); then
    [ ! -e .topoplan ] || exit "$ALREADY"
    printf '%s\n' "$said" >&2
    exit "$NOT_STARTED"
fi
# --fork instead of `&`: without job control, a shell makes background processes ignore SIGINT and SIGQUIT for good.
said=$(setsid --fork sh -c "$4" topoplan "$2" "$3" "$6" 2>&1)
if [ ! -e .topoplan/started.json ]; then
    rm -rf .topoplan
    printf '%s\n' "$said" >&2
    exit "$NOT_STARTED"
fi
cat .topoplan/started.json
