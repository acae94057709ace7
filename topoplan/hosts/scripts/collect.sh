# Prints facts about this machine as sections: a header line `@@topoplan NAME CODE BYTES`, followed by that many bytes.
# Only reads, and needs nothing but a POSIX shell. The output of tools is passed on unchanged and parsed by the client.
# shellcheck shell=sh

LC_ALL=C
export LC_ALL
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/wsl/lib
sys=/sys
proc=/proc
most=200000

if timeout -k 1 5 true 2>/dev/null; then
    within() { limit=$1; shift; timeout -k 1 "$limit" "$@"; }
else
    within() { shift; "$@"; }
fi

# section NAME SECONDS COMMAND...
# The command writes to a pipe, in the background: neither a process that cannot be killed (a dead file server, a stuck
# driver) nor one that ignores signals can block this shell or the connection, since only `cat` is waited for. `exec`
# closes the session's own outputs for good; a redirection of the group would keep a copy of them.
section() {
    name=$1 seconds=$2
    shift 2
    said=$({ (exec </dev/null 2>/dev/null; "$@"; printf '\n@@code %s' "$?") & } | within "$seconds" cat | head -c "$most")
    case $said in
        *'@@code '*) code=${said##*@@code } said=${said%@@code *} ;;
        *) code=124 ;;
    esac
    printf '@@topoplan %s %s %s\n%s\n' "$name" "$code" "${#said}" "$said"
}

# file NAME PATH: a section with the contents of a small file.
file() { section "$1" 3 cat "$2"; }

# line LABEL PATH: a label and the first line of a file, if it can be read. Starts no process.
line() {
    value=
    # shellcheck disable=SC2162 # nothing here has a backslash
    { read value <"$2"; } 2>/dev/null
    [ -n "$value" ] && printf '%s\t%s\n' "$1" "$value"
}

gpus() {
    command -v nvidia-smi >/dev/null || return 127
    fields=index,name,uuid,memory.total,memory.used,pci.bus_id,pcie.link.gen.max,pcie.link.width.max
    fields=$fields,utilization.gpu,driver_version
    # Drivers before 450 do not support MIG, and reject the whole query.
    within 20 nvidia-smi "--query-gpu=$fields,mig.mode.current" --format=csv ||
        within 20 nvidia-smi "--query-gpu=$fields" --format=csv
}

gpu_processes() {
    command -v nvidia-smi >/dev/null || return 127
    found=$(within 20 nvidia-smi --query-compute-apps=pid,gpu_uuid,used_memory,process_name --format=csv) || return
    printf '%s\n' "$found"
    pids=
    while IFS=, read -r pid _; do
        case $pid in '' | *[!0-9]*) ;; *) pids="$pids${pids:+,}$pid" ;; esac
    done <<END
$found
END
    [ -z "$pids" ] || { echo '@owners'; within 3 ps -o pid=,user=,etimes= -p "$pids"; } || true
}

nvidia_smi() { command -v nvidia-smi >/dev/null || return 127; within 20 nvidia-smi "$@"; }

gpu_places() {
    for place in "$sys"/bus/pci/drivers/nvidia/*:*; do
        line "${place##*/}" "$place/numa_node"
    done
}

adapters() {
    [ -d "$sys/class" ] || return 127
    for device in "$sys"/class/infiniband/*; do
        [ -d "$device" ] || continue
        name=${device##*/}
        where=$(readlink -f "$device/device") && printf '%s pci\t%s\n' "$name" "${where##*/}"
        line "$name numa_node" "$device/device/numa_node"
        for net in "$device"/device/net/*; do
            [ -e "$net" ] || continue
            number=0
            { read -r number <"$net/dev_port"; } 2>/dev/null
            printf '%s net %s\t%s\n' "$name" "$number" "${net##*/}"
        done
        for port in "$device"/ports/*; do
            which="$name ${port##*/}"
            printf '%s port\t%s\n' "$which" "${port##*/}"
            line "$which state" "$port/state"
            line "$which rate" "$port/rate"
            line "$which link_layer" "$port/link_layer"
            line "$which traffic_class" "$device/tc/${port##*/}/traffic_class"
            for gid in "$port"/gids/*; do
                value=
                { read -r value <"$gid"; } 2>/dev/null
                case $value in '' | 0000:0000:0000:0000:0000:0000:0000:0000 | fe80:0000:0000:0000:0000:0000:0000:0000)
                    continue ;;
                esac
                index=${gid##*/}
                printf '%s gid %s\t%s\n' "$which" "$index" "$value"
                line "$which gid_type $index" "$port/gid_attrs/types/$index"
                line "$which gid_net $index" "$port/gid_attrs/ndevs/$index"
            done
        done
    done
}

adapter_mtus() { command -v ibv_devinfo >/dev/null || return 127; within 5 ibv_devinfo; }

addresses() {
    command -v ip >/dev/null || return 127
    within 3 ip -j addr show
}

speeds() {
    for net in "$sys"/class/net/*; do
        line "${net##*/}" "$net/speed"
    done
}

default_route() {
    command -v ip >/dev/null || return 127
    within 3 ip -j route show default
}

# route ADDRESS
route() {
    printf 'asked\t%s\n' "$1"
    case $1 in
        *:*) found=$1 ;;
        *)
            names=$(within 4 getent ahostsv4 "$1" || within 4 getent ahosts "$1")
            printf '%s\n' "$names"
            found=${names%% *}
            ;;
    esac
    case $found in '' | *[!0-9a-fA-F.:]*) return 1 ;; esac
    command -v ip >/dev/null || return 127
    echo '@route'
    within 3 ip -j route get "$found"
}

cpus() { command -v lscpu >/dev/null || return 127; within 3 lscpu; }

listening() {
    # 0A is TCP_LISTEN; a machine without IPv6 lacks one of the two.
    # shellcheck disable=SC2016 # it is a program of awk
    cat "$proc/net/tcp" "$proc/net/tcp6" | within 5 awk '$4 == "0A" { print $2 }'
}

# shellcheck disable=SC3045 # bash, dash and busybox have these limits
limits() {
    # The limit after raising it, as a node script does; root and some others may do that.
    memlock=$({ ulimit -l unlimited && ulimit -l; } 2>/dev/null) || memlock=$(ulimit -l)
    printf 'memlock\t%s\nopen_files\t%s\n' "$memlock" "$(ulimit -n)"
}

shared_memory() { within 3 df -Pk /dev/shm; }

cgroup_memory() {
    while IFS=: read -r _ controllers group; do
        case $controllers in
            '') top=$sys/fs/cgroup value=memory.max ;;
            *memory*) top=$sys/fs/cgroup/memory value=memory.limit_in_bytes ;;
            *) continue ;;
        esac
        # Limits of parent groups count too. Seen from inside a container the path may not exist.
        while :; do
            line limit "$top$group/$value"
            [ -n "${group%/}" ] || break
            group=${group%/*}
        done
    done <"$proc/self/cgroup"
}

container() {
    [ -e /.dockerenv ] && echo docker
    [ -e /run/.containerenv ] && echo podman
    [ -n "${container:-}${SINGULARITY_NAME:-}${APPTAINER_NAME:-}${KUBERNETES_SERVICE_HOST:-}" ] && echo environment
    while read -r group; do
        case $group in *docker* | *kubepods* | *containerd* | *libpod* | *lxc*) echo cgroup; break ;; esac
    done <"$proc/1/cgroup"
    true
}

nccl_settings() {
    env | grep '^NCCL_'
    for settings in /etc/nccl.conf ~/.nccl.conf "${NCCL_CONF_FILE:-}"; do
        [ -f "$settings" ] && printf '@file %s\n' "$settings" && within 3 cat "$settings" && echo
    done
    true
}

system() {
    printf 'hostname\t%s\nkernel\t%s\n' "$(uname -n)" "$(uname -r)"
    # Not with `line`: dash reads byte by byte, and these files end after the first one.
    printf 'boot_id\t%s\n' "$(cat "$proc/sys/kernel/random/boot_id")"
    printf 'port_range\t%s\n' "$(cat "$proc/sys/net/ipv4/ip_local_port_range")"
    if [ -r "$proc/modules" ]; then
        peermem=no
        while read -r module _; do
            case $module in nvidia_peermem | nv_peer_mem) peermem=yes ;; esac
        done <"$proc/modules"
        printf 'peermem\t%s\n' "$peermem"
    fi
}

machine() {
    for name in sys_vendor product_name chassis_asset_tag; do
        line "$name" "$sys/class/dmi/id/$name"
    done
    for device in "$sys"/bus/pci/devices/*; do
        vendor='' kind=''
        { read -r vendor <"$device/vendor" && read -r kind <"$device/device"; } 2>/dev/null
        [ -n "$kind" ] && printf 'pci\t%s:%s\n' "${vendor#0x}" "${kind#0x}"
    done
    # RxDM of Google's GPUDirect-TCPXO; the kernel truncates names to 15 characters.
    grep -qs '^fastrak_gpumem_$' "$proc"/[0-9]*/comm && printf 'daemon\tfastrak_gpumem_manager\n'
    true
}

# Arguments: the path, and `files` if the files in it matter. The quick facts come first: what takes too long is cut.
# shellcheck disable=SC2016 # it is a program for another shell
path_program='
path=$1
printf "path\t%s\n" "$path"
near=$path
if [ -e "$path" ]; then echo "exists	yes"; else
    echo "exists	no"
    while [ ! -e "$near" ]; do
        case $near in */?*) near=${near%/*}; near=${near:-/} ;; *) near=. ;; esac
    done
fi
if [ -w "$near" ]; then echo "writable	yes"; else echo "writable	no"; fi
df -PkT "$near" | tail -n 1 | { read -r words; printf "df\t%s\n" "$words"; }
[ "$2" = files ] && [ -e "$path" ] || exit 0
if [ -d "$path" ]; then
    cd "$path/" || exit 1
    names=$(find -L . -mindepth 1 -name ".*" -prune -o -type f -printf "%P\t%s\n") && names=$(printf "%s\n" "$names" | sort) || exit 1
    small=$(find -L . -mindepth 1 -maxdepth 3 -name ".*" -prune -o -type f -size -2048k \
        \( -name config.json -o -name "*.index.json" -o -name dataset_info.json -o -name tokenizer_config.json \) -print |
        sort | while read -r one; do sha256sum "./$one"; done)
else
    cd "$(dirname "$path")" || exit 1
    names=$(find -L "./${path##*/}" -printf "%f\t%s\n") || exit 1
    small=$(find -L "./${path##*/}" -size -16384k -exec sha256sum {} +)
fi
printf "%s\n" "$names" | awk -F "\t" "NF > 1 { n++; s += \$NF } END { printf \"files\t%d\nsize\t%.0f\n\", n, s }"
printf "fingerprint\t%s\n" "$(printf "%s\n%s\n" "$names" "$small" | sha256sum)"
# Directories named as checkpoints are, with a number at the end.
printf "numbered\t%s\n" "$(printf "%s\n" "$names" |
    awk -F / "NF > 1 && \$1 ~ /^[A-Za-z_-]+[0-9]+\$/ && !seen[\$1]++ && n++ < 1000 { printf \"%s \", \$1 }")"
'
path() { within 20 sh -c "$path_program" sh "$1" "$2"; }

# versions PYTHON PROGRAM; an empty PYTHON means the one on PATH.
versions() {
    for python in "$1" ${1:-python3 python}; do
        [ -n "$python" ] || continue
        command -v "$python" >/dev/null || continue
        within 15 "$python" -c "$2"
        return
    done
    return 127
}

# ask WORD...: any number of `machine`, `gpus`, `route ADDRESS`, `path PATH files|-`, `versions PYTHON PROGRAM`. Each
# step writes its sections and then passes on those of the steps after it; so all run concurrently, and no two write at
# the same time.
ask() {
    [ $# -gt 0 ] || return 0
    what=$1
    shift
    case $what in
        machine) ask always adapters adapter_mtus "$@" ;;
        gpus) ask cards gpu_processes topology nvlink "$@" ;;
        always)
            ask "$@" | {
                section system 3 system
                section addresses 8 addresses
                section speeds 3 speeds
                section default-route 8 default_route
                section cpus 8 cpus
                file meminfo "$proc/meminfo"
                section shared-memory 4 shared_memory
                section limits 3 limits
                section cgroup 3 cgroup_memory
                section container 3 container
                section machine 4 machine
                section nccl 5 nccl_settings
                section listening 6 listening
                cat
            }
            ;;
        adapters) ask "$@" | { section adapters 10 adapters; cat; } ;;
        adapter_mtus) ask "$@" | { section adapter-mtus 6 adapter_mtus; cat; } ;;
        cards) ask "$@" | { section gpu-places 3 gpu_places; section gpus 30 gpus; cat; } ;;
        gpu_processes) ask "$@" | { section gpu-processes 25 gpu_processes; cat; } ;;
        topology) ask "$@" | { section topology 22 nvidia_smi topo -m; cat; } ;;
        nvlink) ask "$@" | { section nvlink 22 nvidia_smi nvlink -s; cat; } ;;
        route)
            address=$1
            shift
            ask "$@" | { section route 14 route "$address"; cat; }
            ;;
        path)
            place=$1 how=$2
            shift 2
            ask "$@" | { section path 22 path "$place" "$how"; cat; }
            ;;
        versions)
            wanted=$1 program=$2
            shift 2
            ask "$@" | { section versions 18 versions "$wanted" "$program"; cat; }
            ;;
    esac
}

clock=$(date +%s.%N)
printf '@@topoplan clock 0 %s\n%s\n' "${#clock}" "$clock"
ask "$@"
printf '@@topoplan end 0 0\n\n'
