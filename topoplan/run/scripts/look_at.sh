# Reads the state of a process into life (a letter), its_parent, its_group, session and ticks (start time in ticks since
# boot): fields 3, 4, 5, 6 and 22 of proc_pid_stat(5). Field 2 is the program's name, which may contain spaces and
# parentheses; the kernel escapes its newlines.
look_at() {
    { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    set -- ${line##*) }
    life=$1 its_parent=$2 its_group=$3 session=$4 ticks=${20}
}
