# How many bytes the last so many lines of a log take. Words: the log, how much of it, and numbers of lines.
log=$1 size=$2 found=
shift 2
for lines; do found="$found $(head -c "$size" -- "$log" | tail -n "$lines" | wc -c)"; done
printf 'topoplan:tail_bytes=%s\n' "$found"
