"""The writer of Trinity-RFT: FSDP2 layouts, started on a Ray cluster of the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.operators.params import parameter_count
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.requirements import requirements_of
from topoplan.trainers.trainer import ReadmeWords, TrainerRun, Writer
from topoplan.trainers.trinity.document import output_directory, training_steps, trinity_files
from topoplan.trainers.trinity.refusals import TRINITY, VERL
from topoplan.trainers.trinity.support import ROPE_THETA, rope_scaling

_EXPANDABLE = EnvVar(
    name="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:True",
    reason="less fragmentation; Ray's workers inherit it from here, so before ray start",
)
_DATA_NOTE = """\
It is read with `datasets.load_dataset`: each sample has `messages`, a list of
   `{"role": ..., "content": ...}`. Name another key in `format`. A sample longer than `max_model_len` stops the run."""
_PROGRESS = """\
From then on every step prints a line `Step N: {...}` with
`actor/sft_loss`. What TensorBoard shows lies in `monitor` below `output_dir`, the trainer's own log in `log`."""
_TOKEN = """
   Ray asks for a token where the user of node 0 has one (`~/.ray/auth_token`); then all nodes need the same."""
_RESUME = """\
start the same again: the trainer takes the newest whole checkpoint in `output_dir`."""

# verl_legacy/fsdp_workers.py imports vllm, though nothing is generated here.
_PACKAGES = ("torch", "ray", "trinity-rft", "verl", "vllm", "flash-attn", "omegaconf")

# What their metadata leaves out: SQLAlchemy 2.1 has its asyncio part with greenlet alone, and pyarrow 26 needs NumPy 2,
# which verl does not allow.
_INSTALL = (
    f"pip install 'trinity-rft[vllm]=={TRINITY}' 'pyarrow<26' greenlet",
    f"pip install --no-deps verl=={VERL}",
    "pip install flash-attn --no-build-isolation",
)


def trinity_run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    """What a run with these keys wants of a node."""
    data = values["buffer"]["trainer_input"]["experience_buffer"]
    dataset = str(data["path"])
    return TrainerRun(
        model_dir=str(values["model"]["model_path"]),
        output_dir=output_directory(values),
        dataset=dataset,
        dataset_files=(dataset,) if dataset.startswith((".", "/")) else (),
        to_fill_in="      path",
        requirements=requirements_of(spec, layout, "trinity", dict.fromkeys(_PACKAGES, "")),
        environment=(_EXPANDABLE,) if layout.expandable_segments else (),
        refuses_quantized=(
            "Weights that are quantized cannot be trained themselves.",
            "are quantized; take an unquantized model",
        ),
        checkpoint=_checkpoint(spec, values),
        checkpoint_dirs="global_step_*",  # trainer/verl/trainer.py, save_checkpoint
        steps=training_steps(spec.job),
        readme=ReadmeWords(
            engine=f"Trinity-RFT {TRINITY} (verl, FSDP2)",
            packages="Trinity-RFT, verl, vLLM and FlashAttention",
            install=_INSTALL,
            data_note=_DATA_NOTE + (_TOKEN if spec.cluster.nodes > 1 else ""),
            dataset_words="to a directory, or to a dataset id of the hub",
            progress=_PROGRESS,
            resume=_RESUME,
        ),
    )


def _checkpoint(spec: Spec, values: Mapping[str, Any]) -> CheckpointSize:
    """fp32 shards of the weights and two moments; the model for Hugging Face, saved in bf16, at the end.

    Source: `trainer/verl_legacy/fsdp_checkpoint_manager.py`, save_checkpoint.
    """
    parameters, trainer = parameter_count(spec.model), values["trainer"]
    kept = int(trainer.get("max_checkpoints_to_keep") or 0)
    return CheckpointSize(
        megatron_bytes=0,
        hf_bytes=2 * parameters if trainer.get("save_hf_checkpoint") != "never" else 0,
        optimizer_bytes=12 * parameters,
        at_once=kept + 1 if kept else None,
    )


_YARN = """\
# verl 0.8 and later leave rope_scaling out of training (Trinity-RFT trainer/verl/config.py, _build_model_config).
"$python" -c 'import sys; from importlib.metadata import version
sys.exit(tuple(map(int, version("verl").split(".")[:2])) >= (0, 8))' ||
  fail "rope_scaling in train.yaml needs verl below 0.8; pip install verl==VERL_VERSION"
# transformers 5 wants rope_theta beside the factor.
THETA="$("$python" -c 'import json, sys
config = json.load(open(sys.argv[1], encoding="utf-8"))
rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
if rope.get("rope_type", rope.get("type", "default")) != "default":
    sys.exit("its positions are scaled already")
print(float(config.get("rope_theta") or rope["rope_theta"]))' "$model_dir/config.json")" ||
  fail "no rope_theta to scale in $model_dir/config.json"
export THETA
"""

_RAY = """\
# A Ray cluster of this run's own, node 0 its head. Both ends are children of this script, and end with it.
children=()
end_children() {
  trap '' TERM INT
  ((${#children[@]} == 0)) || kill -TERM "${children[@]}" 2>/dev/null || true
  wait
}
trap end_children EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# `ray start` asks for a token where it finds one, and what connects to it gives one only when told.
if [[ -z "${RAY_AUTH_MODE:-}" ]] &&
  [[ -n "${RAY_AUTH_TOKEN:-}" || -s "${RAY_AUTH_TOKEN_PATH:-${HOME:-}/.ray/auth_token}" ]]; then
  export RAY_AUTH_MODE=token
fi
# exec: a signal reaches Ray itself. Called with & alone.
ray_start() { exec "$python" -m ray.scripts.scripts start --num-gpus GPUS --disable-usage-stats --block "$@"; }
"""

_HEAD = """ray_start --head --node-ip-address "$master_addr" --port "$master_port" --include-dashboard false \\
  >"$log_dir/ray.log" 2>&1 &
children+=("$!")
export RAY_ADDRESS="$master_addr:$master_port"
"$python" -c 'import sys, time
import ray
end, want = time.monotonic() + WAIT, int(sys.argv[1])
have = 0
while have < want:
    if time.monotonic() > end:
        sys.exit(f"{have} of {want} GPUs are in the Ray cluster")
    time.sleep(2)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        have = int(ray.cluster_resources().get("GPU", 0))
    except ConnectionError:
        pass' WORLD || fail "not all nodes have joined; see $log_dir/ray.log, and what the others print"
"$python" -m trinity.cli.launcher run --config "$bundle_dir/train.yaml" > >(tee "$log_dir/train.log") 2>&1 &
children+=("$!")
wait "$!"
# The launcher ends with 0 however the trainer ended. tee may have its last lines to write still.
sleep 1 &
wait "$!"
! grep -qE '\\] (Error in Trainer|Trainer failed):' "$log_dir/train.log" ||
  fail "the trainer failed; the first error in $log_dir/train.log is the cause"
"""

_WORKER = """head_is_there() { (: <"/dev/tcp/$master_addr/$master_port") 2>/dev/null; }
for ((waited = 0; ; waited += 5)); do
  ! head_is_there || break
  ((waited < WAIT)) || fail "node 0 does not answer at $master_addr:$master_port"
  sleep 5 &
  wait "$!"
done
ray_start --address "$master_addr:$master_port" > >(tee "$log_dir/ray.log") 2>&1 &
children+=("$!")
wait "$!" || true
# It ends with the head, which tells how the run went.
sleep 10 &
wait "$!"
! head_is_there || fail "Ray ended here while node 0 goes on; see $log_dir/ray.log"
"""

_WAIT_S = 900
"""As long as the rendezvous of torchrun."""


def _start(spec: Spec, layout: Layout, node: int) -> str:
    cluster = spec.cluster
    text = _RAY + (_HEAD if node == 0 else _WORKER)
    if node == 0 and rope_scaling(spec.model, spec.job.seq_len) is not None:
        text = _YARN + text
    words = {
        "GPUS": cluster.gpus_per_node,
        "WORLD": layout.world_size,
        "VERL_VERSION": VERL,
        "WAIT": _WAIT_S,
        "THETA": ROPE_THETA,
    }
    for word, value in words.items():
        text = text.replace(word, str(value))
    return text


def _versions() -> Mapping[str, Any]:
    return {"trinity-rft": TRINITY, "verl": VERL}


WRITER = Writer(
    trainer="trinity",
    backends=("fsdp2",),
    files=trinity_files,
    run=trinity_run,
    start=_start,
    versions=_versions,
)
