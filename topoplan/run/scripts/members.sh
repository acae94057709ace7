# Prints every process of the job as `pid:ticks:group`: those in the session whose leader is alive to prove it; those
# with the mark, and the sessions that only they can have created, because nobody else leads them; and the descendants
# of these, whose group is 0 if it may contain processes of others. Reading /proc takes a while: what is there before or
# after the search for the mark counts. Field 20 is the number of threads: a zombie with more than one still works.
members() {
    {
        cat /proc/[0-9]*/stat
        echo @ $(cd /proc && grep -slzxF -- "TOPOPLAN_RUN=$mark" [0-9]*/environ)
        cat /proc/[0-9]*/stat
    } 2>/dev/null | LC_ALL=C awk -v ours="$ours" '
        $1 == "@" {
            count = split($0, found, /[^0-9]+/)
            for (at = 1; at <= count; at++) marked[found[at]]
            after = 1
            next
        }
        {
            pid = $1; rest = $0; sub(/^.*\) /, "", rest); split(rest, field, " ")
            if (pid <= 1 || (field[1] ~ /[ZX]/ && field[18] <= 1)) next
            parent[pid] = field[2]; group[pid] = field[3]; session[pid] = field[4]; ticks[pid] = field[20]
            if (after) alive[pid]
        }
        END {
            held[ours]
            for (pid in marked) if (pid in session) {
                mine[pid]
                leader = session[pid]
                if (leader in marked || !(leader in alive)) held[leader]
            }
            for (pid in session) if (session[pid] in held) mine[pid]
            do {
                more = 0
                for (pid in parent) if (!(pid in mine) && parent[pid] in mine) { mine[pid]; more = 1 }
            } while (more)
            for (pid in mine) print pid ":" ticks[pid] ":" (session[pid] in held ? group[pid] : 0)
        }'
}
