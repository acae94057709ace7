#!/usr/bin/env bash
# Node 3 of 4 (counted from 0): starts the 8 trainer processes of this machine.
# Run the scripts of all nodes, in any order; they wait for each other.
# Written by topoplan 0.1.0. README.md in the same directory explains how to use it.
set -euo pipefail
unset CDPATH

fail() {
  printf '%s: %s\n' node-03.sh "$*" >&2
  exit 2
}

bundle_dir="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
if grep -qs '^# INCOMPLETE BUNDLE' -- "$bundle_dir/train.yaml"; then
  fail "the bundle is incomplete: topoplan generate was interrupted, or is still writing it; write it again: \
topoplan generate --from '$bundle_dir/plan.json' -o '$bundle_dir', and copy the whole directory to each node"
fi
[[ -s "$bundle_dir/train.yaml" ]] || fail "train.yaml is missing or empty in $bundle_dir; copy the whole directory to each node"
workdir="$bundle_dir"
# The same paths as in train.yaml:
model_dir=models/Qwen/Qwen3-VL-8B-Instruct
dataset_dir=data
output_dir=saves/Qwen3-VL-8B-Instruct-tp2-pp1-dp16-mbs2-nosp-343ecbea

# The cluster spec names no hosts: the address of node 0 is given when the script is started.
master_addr="${1:-${MASTER_ADDR:-}}"
[[ -n "$master_addr" ]] ||
  fail "the address of node 0 is missing; start every node with it: MASTER_ADDR=10.0.0.1 bash node-03.sh"
master_port=21972

# Variables that an earlier job, a container or a scheduler may have set, and that torchrun or the trainer would obey.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC_PER_NODE RDZV_ID MIN_NNODES MAX_NNODES MAX_RESTARTS FORCE_TORCHRUN USE_RAY USE_KT USE_MEGATRON_BRIDGE ALLOW_EXTRA_ARGS
unset "${!PET_@}" "${!TORCHELASTIC_@}" "${!ACCELERATE_@}"

cd -- "$workdir" || fail "cannot enter the working directory $workdir"
python="$(command -v python3)" || fail "python3 is not on PATH; activate the trainer's environment first"

# Checks of what torchrun would report in a hundred lines, after hours, or never.
wrong="$("$python" - <<'PROGRAM'
import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec

# Package, imported module, required versions, what other versions do, arguments of pip.
WANTED = [
    ("torch", "torch", "<2.12", "with torch 2.12 and newer the first checkpoint ends in 'TypeError: can only join an iterable', as mcore_adapter returns True where torch now expects a list", "'torch<2.12'"),
    ("llamafactory", "llamafactory", "", "", "llamafactory==0.9.5"),
    ("megatron-core", "megatron.core", ">=0.15,<0.19", "mcore_adapter supports megatron-core 0.15 to 0.18", "megatron-core==0.16.1"),
    ("transformer-engine", "transformer_engine", "", "", "'transformer_engine[pytorch]'"),
    ("mcore_adapter", "mcore_adapter", ">=0.10.dev0", "0.0.1 on PyPI is an unrelated project of the same name", "'git+https://github.com/alibaba/ROLL.git@8eb27cc2dc34c4d1310b169d9b86d339004d811a#subdirectory=mcore_adapter'"),
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
    except ImportError:  # of the parent package
        return False

missing, to_install, wrong = [], [], []
for package, module, versions, why, pip in WANTED:
    if module and not is_there(module):
        missing.append(package)
        to_install.append(pip)
        continue
    try:
        have = version(package) if module else sys.version.split()[0]
    except Exception:  # importable, but not installed as a package
        continue
    if not all(fits(have, clause) for clause in versions.split(",") if clause):
        remedy = "pip install " + pip if module else "create the environment with another Python"
        wrong.append("has %s %s, but this run needs %s: %s; %s" % (package, have, versions, why, remedy))
words = []
if missing:
    words.append("lacks " + ", ".join(missing))
    words.append("pip install %s, or activate the trainer's environment first" % " ".join(to_install))
if wrong and not os.environ.get("TOPOPLAN_ANY_VERSIONS"):
    words += wrong
    words.append("to run with other versions anyway: TOPOPLAN_ANY_VERSIONS=1")
print("; ".join(words))
PROGRAM
)" || fail "cannot run $python"
[[ -z "$wrong" ]] || fail "$python $wrong"
if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  [[ "${#visible[@]}" -ge 8 ]] ||
    fail "CUDA_VISIBLE_DEVICES leaves ${#visible[@]} of the 8 GPUs that the layout needs; unset it"
elif command -v nvidia-smi >/dev/null; then
  gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  [[ "$gpus" -ge 8 ]] || fail "nvidia-smi lists $gpus GPUs, but the layout needs 8 on this machine; a GPU may have failed (\`dmesg | grep -i xid\`), or the plan is for another machine"
fi
if grep -q '^dataset: SET_ME\b' -- "$bundle_dir/train.yaml"; then
  fail "no data set is configured; set dataset in train.yaml on every node, or set job.dataset in the spec and generate again"
fi
[[ -f "$model_dir/config.json" || -f "$model_dir/mca_config.json" ]] ||
  fail "no model in $model_dir (from $PWD): config.json is missing; download it as README.md says"
index="$model_dir/model.safetensors.index.json"
if [[ -f "$index" ]]; then
  # Interrupted downloads.
  while IFS= read -r shard; do
    [[ -s "$model_dir/$shard" ]] || fail "$model_dir (from $PWD) lacks $shard, which is listed in its index; download it again"
  done < <(grep -o '"[^"]*\.safetensors"' -- "$index" | tr -d '"' | sort -u)
  # The adapter does not know the scales of quantized weights, and fails at the first one.
  if grep -qE '(weight_scale|weight_packed|qweight|absmax)[^"]*"' -- "$index"; then
    fail "the weights in $model_dir are quantized, which the trainer cannot read; convert them to bf16, or use an unquantized model"
  fi
fi
[[ -f "$dataset_dir/dataset_info.json" ]] || fail "no dataset_info.json in $dataset_dir (from $PWD)"
last_checkpoint=""
# Only the trainer's own names: not copies, or merged adapters.
checkpoints=()
for checkpoint in "$output_dir"/checkpoint-[0-9]*; do
  [[ ! -d "$checkpoint" || "${checkpoint##*/checkpoint-}" == *[!0-9]* ]] || checkpoints+=("$checkpoint")
done
# Whether a checkpoint is complete: the file that is written last exists and is not truncated; there are weights, with
# all files that their index lists; and none of them is empty, as can happen when a machine crashes.
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
  printf '%s: the trainer resumes from %s\n' node-03.sh "$last_checkpoint" >&2
fi

# train with Megatron-core, through mcore_adapter
export USE_MCA=1
# runs kernels in launch order, which the overlap of TP and CP needs before Blackwell
export CUDA_DEVICE_MAX_CONNECTIONS=1
# adds memory to trainer_log.jsonl, for `topoplan calibrate`
export RECORD_VRAM=1
# reduces fragmentation; llamafactory-cli sets it too
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# torchrun would set 1; the cluster spec has no cpu_cores
export OMP_NUM_THREADS=4
# threads of tokenizers do not survive the fork of data workers
export TOKENIZERS_PARALLELISM=false
# only errors, with their cause
export NCCL_DEBUG=WARN

# Raise limits where the system allows it: locked memory, for RDMA and data loading; the stack in KiB, as in NVIDIA's
# containers; open files, of which shared tensors and connections need many.
ulimit -l unlimited 2>/dev/null || true
ulimit -Ss 65536 2>/dev/null || true
ulimit -Sn 1048576 2>/dev/null || ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true
# No core dumps: that of a crashed rank is as large as its memory.
ulimit -Sc 0
[[ "$(ulimit -l)" == unlimited ]] ||
  printf '%s: note: memory locking is limited to %s KiB; RDMA may fail (memlock in limits.conf)\n' node-03.sh "$(ulimit -l)" >&2

# Each rank also writes its output to files in log_dir.
log_dir="$PWD"/logs/Qwen3-VL-8B-Instruct-tp2-pp1-dp16-mbs2-nosp-343ecbea/node-03
mkdir -p -- "$log_dir"

# torchrun starts the launcher module directly: `llamafactory-cli train` would start another torchrun in each process.
# exec, so that signals reach torchrun, which stops its workers.
resume=()
[[ -z "$last_checkpoint" ]] || resume=("resume_from_checkpoint='${last_checkpoint//\'/\'\'}'")
exec "$python" -m torch.distributed.run \
  --nnodes 4 --node_rank 3 --nproc_per_node 8 \
  --master_addr "$master_addr" --master_port "$master_port" \
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \
  -m llamafactory.launcher "$bundle_dir/train.yaml" ${resume[@]+"${resume[@]}"}
