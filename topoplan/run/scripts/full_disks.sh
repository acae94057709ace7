# Reports the file systems of the run on which nothing more can be written. Arguments: run directory. For each file
# system it reports what it lacks, its size in KiB or inodes, and its mount point. The other places are read from the
# node script. The run directory itself was writable when the files were uploaded.
cd -- "$1" 2>/dev/null && is_ours || exit 0
trial=$(LC_ALL=C mktemp .topoplan/trial-XXXXXXXX 2>&1) && rm -- "$trial"
case $trial in *'Read-only file system') say full "writes 0 $PWD" ;; esac
eval "$(grep -hE '^(output_dir|export (HF_HOME|TMPDIR))=' ./*.sh)" 2>/dev/null
for place in . .. "$output_dir" "$HF_HOME" "${TMPDIR:-/tmp}" "$HOME" /dev/shm; do
    case $place in . | .. | /*) ;; *) continue ;; esac
    timeout 3 df -Pk -- "$place" | LC_ALL=C awk 'NR > 1 && $4 < 65536 && $4 * 100 < $2 { print "space", $0 }'
    timeout 3 df -Pi -- "$place" | LC_ALL=C awk 'NR > 1 && $2 > 0 && $4 == 0 { print "files", $0 }'
done 2>/dev/null | LC_ALL=C sort -u | while read -r lacks device size used free share mount; do
    say full "$lacks $size $mount"
done
