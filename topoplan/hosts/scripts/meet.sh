# Starts ports.py with the first Python that works: the venv's, or the system's. Arguments: the program, its task, and
# the venv's Python.
# shellcheck shell=bash
program=$1 task=$2 python=$3
for python in "$python" python3 python; do
    [ -n "$python" ] && command -v "$python" >/dev/null 2>&1 &&
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' </dev/null 2>/dev/null &&
        exec "$python" -I -c "$program" "$task"
done
echo '{"lacks": "python3"}'
