#!/usr/bin/env bash
# Node 0 of 4 (counted from 0): starts the 8 trainer processes of this machine.
# Run the script of every node, in any order; they wait for each other.
# Written by topoplan 0.1.0. README.md, beside this file, says how to use it.
set -euo pipefail
unset CDPATH

fail() {
  printf '%s: %s\n' node-00.sh "$*" >&2
  exit 2
}

bundle_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
if grep -qs '^# INCOMPLETE BUNDLE' -- "$bundle_dir/train.yaml"; then
  fail "the bundle is not whole: topoplan generate was ended while it wrote it, or is writing it now; write it again: \
topoplan generate --from '$bundle_dir/plan.json' -o '$bundle_dir', and copy the whole directory to each node"
fi
[[ -s "$bundle_dir/train.yaml" ]] || fail "train.yaml is not beside this script, or empty; copy the whole directory to each node"
workdir="$bundle_dir"
# As in train.yaml:
model_dir=models/Qwen/Qwen3-VL-8B-Instruct
dataset_dir=data
output_dir=saves/Qwen3-VL-8B-Instruct-tp2-pp1-dp16-mbs2-nosp-343ecbea

# The cluster spec names no hosts: node 0 is named when the script is started.
master_addr="${1:-${MASTER_ADDR:-}}"
[[ -n "$master_addr" ]] ||
  fail "the address of node 0 is missing; start every node with it: MASTER_ADDR=10.0.0.1 bash node-00.sh"
master_port=21972

# What an earlier job, a container or a scheduler may have left behind, and torchrun or the trainer would obey.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC_PER_NODE RDZV_ID MIN_NNODES MAX_NNODES MAX_RESTARTS FORCE_TORCHRUN USE_RAY USE_KT USE_MEGATRON_BRIDGE ALLOW_EXTRA_ARGS
unset "${!PET_@}" "${!TORCHELASTIC_@}" "${!ACCELERATE_@}"

cd -- "$workdir" || fail "cannot enter the working directory $workdir"
python="$(command -v python3)" || fail "python3 is not on PATH; activate the trainer's environment first"

# What torchrun would report in a hundred lines, only after hours, or never.
wrong="$("$python" - <<'PROGRAM'
import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec

# Package, what is imported of it, versions, what others do, what pip is given.
WANTED = [
    ("torch", "torch", "<2.12", "with torch 2.12 and newer the first checkpoint ends in 'TypeError: can only join an iterable', as mcore_adapter answers True in place of torch, where a list is wanted now", "'torch<2.12'"),
    ("llamafactory", "llamafactory", "", "", "llamafactory==0.9.5"),
    ("megatron-core", "megatron.core", ">=0.15,<0.19", "mcore_adapter is written for megatron-core from 0.15 to 0.18", "megatron-core==0.16.1"),
    ("transformer-engine", "transformer_engine", "", "", "'transformer_engine[pytorch]'"),
    ("mcore_adapter", "mcore_adapter", ">=0.10.dev0", "0.0.1 is another project of that name on PyPI", "'git+https://github.com/alibaba/ROLL.git@8eb27cc2dc34c4d1310b169d9b86d339004d811a#subdirectory=mcore_adapter'"),
]

def numbers(text):
    found = [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", text)[0])]
    return (found + [0] * 6)[:6]

def fits(have, clause):
    operator, bound = re.match("([<>=!]+)(.*)", clause).groups()
    a, b = numbers(have), numbers(bound)
    return {"<": a < b, "<=": a <= b, ">=": a >= b, "==": a == b, "!=": a != b}[operator]

def is_there(module):
    try:
        return find_spec(module) is not None
    except ImportError:  # of what it is a part of
        return False

lacks, gives, wrong = [], [], []
for package, module, versions, why, pip in WANTED:
    if module and not is_there(module):
        lacks.append(package)
        gives.append(pip)
        continue
    try:
        have = version(package) if module else sys.version.split()[0]
    except Exception:  # on the path, and not installed
        continue
    if not all(fits(have, clause) for clause in versions.split(",") if clause):
        remedy = "pip install " + pip if module else "make the environment with another Python"
        wrong.append("has %s %s, and this run wants %s: %s; %s" % (package, have, versions, why, remedy))
said = []
if lacks:
    said.append("lacks " + ", ".join(lacks))
    said.append("pip install %s, or activate the trainer's environment first" % " ".join(gives))
if wrong and not os.environ.get("TOPOPLAN_ANY_VERSIONS"):
    said += wrong
    said.append("with other versions all the same: TOPOPLAN_ANY_VERSIONS=1")
print("; ".join(said))
PROGRAM
)" || fail "$python does not run"
[[ -z "$wrong" ]] || fail "$python $wrong"
if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  [[ "${#visible[@]}" -ge 8 ]] ||
    fail "CUDA_VISIBLE_DEVICES leaves ${#visible[@]} of the 8 GPUs that the layout needs; unset it"
elif command -v nvidia-smi >/dev/null; then
  gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  [[ "$gpus" -ge 8 ]] || fail "nvidia-smi lists $gpus GPUs, and the layout needs 8 on this machine; one may have fallen out (\`dmesg | grep -i xid\`), or the plan is of another machine"
fi
if grep -q '^dataset: SET_ME\b' -- "$bundle_dir/train.yaml"; then
  fail "no data set is named; set dataset in train.yaml on every node, or job.dataset in the spec and generate again"
fi
[[ -f "$model_dir/config.json" || -f "$model_dir/mca_config.json" ]] ||
  fail "no model in $model_dir (from $PWD): config.json is missing; download it as README.md says"
index="$model_dir/model.safetensors.index.json"
if [[ -f "$index" ]]; then
  # A download that broke off.
  while IFS= read -r shard; do
    [[ -s "$model_dir/$shard" ]] || fail "$model_dir (from $PWD) lacks $shard, which its index names; download it again"
  done < <(grep -o '"[^"]*\.safetensors"' -- "$index" | tr -d '"' | sort -u)
  # The adapter has no place for the scales of quantized weights, and ends at the first one.
  if grep -qE '(weight_scale|weight_packed|qweight|absmax)[^"]*"' -- "$index"; then
    fail "the weights in $model_dir are quantized, and the trainer reads none such; convert them to bf16, or take an unquantized model"
  fi
fi
[[ -f "$dataset_dir/dataset_info.json" ]] || fail "no dataset_info.json in $dataset_dir (from $PWD)"
if (: <"/dev/tcp/127.0.0.1/$master_port") 2>/dev/null; then
  fail "port $master_port is taken on this machine; is an earlier run still there (\`topoplan runs\`, \`topoplan runs stop\`)? else find who has it: ss -ltnp | grep $master_port"
fi
last_checkpoint=""
# Without what lies beside them under other names, such as a copy, or adapters that were merged.
checkpoints=()
for checkpoint in "$output_dir"/checkpoint-[0-9]*; do
  [[ ! -d "$checkpoint" || "${checkpoint##*/checkpoint-}" == *[!0-9]* ]] || checkpoints+=("$checkpoint")
done
# Written to its end: the file that comes last is there, and not cut off; there are weights, and all that an index of
# them names; and none are empty, as some are after a crash of the machine.
is_whole() {
  local last="$1/trainer_state.json"
  [[ -s "$last" ]] || return 1
  [[ "$(tail -c 4 -- "$last" | tr -d '\0')" == *'}'* ]] || return 1
  local weights=(-name '*.safetensors' -o -name '*.bin' -o -name '*.pt' -o -name '*.distcp')
  [[ "$(find -L "$1" \( "${weights[@]}" \))" && -z "$(find -L "$1" -size 0 \( "${weights[@]}" \))" ]] || return 1
  local shard
  for shard in $(grep -oEhs '"[^" ]+\.(safetensors|bin)"' "$1"/*.index.json | sort -u | tr -d '"'); do
    [[ -e "$1/$shard" ]] || return 1
  done
}
last_step=-1
for checkpoint in ${checkpoints[@]+"${checkpoints[@]}"}; do
  step="$((10#${checkpoint##*[!0-9]}))"
  if [[ "$step" -gt "$last_step" ]] && is_whole "$checkpoint"; then
    last_checkpoint="$checkpoint" last_step="$step"
  fi
done
if [[ -n "$last_checkpoint" ]]; then
  printf '%s: the trainer goes on from %s\n' node-00.sh "$last_checkpoint" >&2
else
  # Of those that are not whole the trainer would take one unasked.
  for checkpoint in ${checkpoints[@]+"${checkpoints[@]}"}; do
    mv -- "$checkpoint" "$output_dir/incomplete-${checkpoint##*/}-$(date +%s)"
  done
fi

# LLaMA-Factory trains with Megatron-core, through mcore_adapter
export USE_MCA=1
# kernels start in the order of their launch: before Blackwell, TP and CP overlap needs it
export CUDA_DEVICE_MAX_CONNECTIONS=1
# trainer_log.jsonl then has the memory too, which `topoplan calibrate` learns from
export RECORD_VRAM=1
# less fragmentation; llamafactory-cli sets it too
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# torchrun would set 1; cpu_cores is not in the cluster spec
export OMP_NUM_THREADS=4
# tokenizers' threads do not survive forked data workers
export TOKENIZERS_PARALLELISM=false
# errors with their cause, and nothing else
export NCCL_DEBUG=WARN

# Limits of this shell, raised where the system lets us: pinned memory, which RDMA and data loading take; stack in KiB,
# as NVIDIA starts its containers; open files, of which shared tensors and connections take many.
ulimit -l unlimited 2>/dev/null || true
ulimit -Ss 65536 2>/dev/null || true
ulimit -Sn 1048576 2>/dev/null || ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true
# No core files: each of a rank that crashes is as large as the rank.
ulimit -Sc 0
[[ "$(ulimit -l)" == unlimited ]] ||
  printf '%s: note: memory locking is limited to %s KiB; RDMA may fail (memlock in limits.conf)\n' node-00.sh "$(ulimit -l)" >&2

# Each rank writes its own files below log_dir, beside what is shown here.
log_dir="$PWD"/logs/Qwen3-VL-8B-Instruct-tp2-pp1-dp16-mbs2-nosp-343ecbea/node-00
mkdir -p -- "$log_dir"

# The launcher module under one torchrun: `llamafactory-cli train` would start a second one in each process.
# exec, so that signals reach torchrun, which ends its workers.
resume=()
[[ -z "$last_checkpoint" ]] || resume=("resume_from_checkpoint='${last_checkpoint//\'/\'\'}'")
exec "$python" -m torch.distributed.run \
  --nnodes 4 --node_rank 0 --nproc_per_node 8 \
  --master_addr "$master_addr" --master_port "$master_port" \
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \
  -m llamafactory.launcher "$bundle_dir/train.yaml" ${resume[@]+"${resume[@]}"}
