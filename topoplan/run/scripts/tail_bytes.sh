# Prints the sizes of the last N lines of a log. Arguments: the log, how much of it counts, and values of N.
log=$1 size=$2 found=
shift 2
for lines; do found="$found $(head -c "$size" -- "$log" | tail -n "$lines" | wc -c)"; done
printf 'topoplan:tail_bytes=%s\n' "$found"
