import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, make_spec_and_plan
from tests.bundle.shell_scripts import assert_sound
from topoplan.bundle.bundle import generate
from topoplan.bundle.plan_file import recorded_plan, written_again
from topoplan.bundle.write import write_bundle
from topoplan.planner.predict import predict
from topoplan.specs.json_source import parse_json
from topoplan.specs.known import model
from topoplan.trainers.registry import written_by


def bundle(**job: Any) -> dict[str, str]:
    spec, plan = make_spec_and_plan(
        cluster=replace(CLUSTER, nodes=2, hosts=HOSTS[:2], host_memory_bytes=2**41),
        model=model("Qwen3-8B"),
        job={"packing": False, "seq_len": 8192, **job},
        backend="fsdp2",
        ulysses=2,
        expandable_segments=True,
    )
    return generate(spec, plan, trainer="trinity")


def test_it_is_taken_for_fsdp2_where_it_is_asked_for() -> None:
    assert written_by("fsdp2", "trinity")[0].name == "trinity"
    assert written_by("fsdp2")[0].name == "llamafactory"


@pytest.mark.parametrize("named", [True, False], ids=["named in the spec", "taken for the layout"])
def test_its_plan_is_predicted_as_it_computes_and_is_read_back_the_same(named: bool) -> None:
    spec, plan = make_spec_and_plan(
        cluster=replace(CLUSTER, nodes=2, hosts=HOSTS[:2]),
        model=model("Qwen3-8B"),
        job={"packing": False, "seq_len": 2048},
        backend="fsdp2",
        sharding="hybrid",
    )
    named_spec = replace(spec, trainer="trinity")
    own = predict(named_spec, plan.layout)
    assert own.memory.device_bytes < predict(spec, plan.layout).memory.device_bytes
    files = generate(named_spec, own) if named else generate(spec, plan)
    device_gib = json.loads(files["plan.json"])["prediction"]["memory"]["device_gib"]
    assert device_gib == pytest.approx(own.memory.device_bytes / 2**30, rel=1e-4)
    recorded = recorded_plan(parse_json(files["plan.json"], name="plan.json"))
    assert recorded.notes == ()
    assert written_again(recorded) == files


def test_node_0_is_the_head_and_the_others_join_it() -> None:
    files = bundle()
    head, worker = files["node-00.sh"], files["node-01.sh"]
    assert 'ray_start --head --node-ip-address "$master_addr" --port "$master_port"' in head
    assert 'trinity.cli.launcher run --config "$bundle_dir/train.yaml"' in head
    assert 'ray_start --address "$master_addr:$master_port"' in worker
    assert "trinity.cli" not in worker


def test_the_environment_is_set_before_ray_whose_workers_inherit_it() -> None:
    head = bundle()["node-00.sh"]
    assert head.index("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") < head.index("ray_start --head")


def test_yarn_is_checked_on_the_node_that_starts_the_trainer() -> None:
    assert "ROPE_THETA" not in bundle()["node-00.sh"]
    files = bundle(seq_len=81920)
    assert "export ROPE_THETA" in files["node-00.sh"]
    assert "needs verl below 0.8" in files["node-00.sh"]
    assert "ROPE_THETA" not in files["node-01.sh"]


def test_every_script_passes_bash_and_shellcheck() -> None:
    files = bundle(seq_len=81920)
    assert_sound(files["node-00.sh"], files["node-01.sh"])


def test_a_bundle_without_data_says_where_it_goes() -> None:
    files = bundle(dataset=None)
    assert "\n      path: SET_ME" in files["train.yaml"]
    assert "grep -q '^      path: SET_ME" in files["node-00.sh"]
    assert "`path` in `train.yaml`" in files["README.md"]


# Stands in for Python: has every module and all GPUs; Ray runs until stopped, the launcher prints OUTPUT and exits 0.
PYTHON = """#!/bin/bash
case "$*" in
  "-m ray.scripts.scripts"*) echo "$@" >> "$PROBE/ray"; trap 'echo ended >> "$PROBE/ray"; exit' TERM
    while :; do /bin/sleep 0.05; done ;;
  "-m trinity.cli.launcher"*) echo "$@" > "$PROBE/launcher"; echo "${RAY_AUTH_MODE:-unset}" > "$PROBE/auth"
    printf '%s\n' "$OUTPUT"; exit "${CODE:-0}" ;;
esac
"""


def plan_name(bundle: Path) -> str:
    """Return the run's name, which Trinity-RFT uses for its directory."""
    return str(json.loads((bundle / "plan.json").read_text())["run"])


def run_head(
    root: Path, output: str, code: int = 0, earlier: str = "log", noted: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the script of node 0 alone, with a stand-in for Python."""
    inside, python = root / "work", root / "venv" / "bin" / "python"
    for directory in (inside / "models" / "Qwen" / "Qwen3-8B", inside / "chats", python.parent):
        directory.mkdir(parents=True)
    (inside / "models" / "Qwen" / "Qwen3-8B" / "config.json").write_text("{}")
    python.write_text(PYTHON)
    # Shortens the script's wait for tee to finish writing.
    (python.parent / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.2\n")
    for program in (python, python.parent / "sleep"):
        program.chmod(0o755)
    host = replace(HOSTS[0], workdir=str(inside), venv=str(root / "venv"))
    spec, plan = make_spec_and_plan(
        cluster=replace(CLUSTER, nodes=1, hosts=(host,)),
        model=model("Qwen3-8B"),
        job={"packing": False, "seq_len": 8192, "dataset": "./chats"},
        backend="fsdp2",
    )
    write_bundle(generate(spec, plan, trainer="trinity"), root / "bundle")
    words = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(root),
        "PROBE": str(root),
        "OUTPUT": output,
        "CODE": str(code),
    }
    saves = inside / "saves/topoplan" / plan_name(root / "bundle")
    (saves / earlier).mkdir(parents=True)
    (saves / "latest_checkpointed_iteration.txt").write_text(noted)
    script = ["bash", str(root / "bundle" / "node-00.sh")]
    return subprocess.run(script, env=words, text=True, capture_output=True, check=False, timeout=300)


def test_a_run_starts_ray_and_the_launcher_and_ends_both(tmp_path: Path) -> None:
    done = run_head(tmp_path, "INFO 11-21 15:42:44 [monitor.py:113] Step 1: {'actor/sft_loss': 1.95}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "actor/sft_loss" in done.stdout
    started, ended = (tmp_path / "ray").read_text().splitlines()
    assert shlex.split(started)[2:5] == ["start", "--num-gpus", "8"]
    assert ended == "ended"
    assert f"run --config {tmp_path}/bundle/train.yaml" in (tmp_path / "launcher").read_text()


def test_a_checkpoint_that_the_run_would_go_on_from_is_told(tmp_path: Path) -> None:
    done = run_head(tmp_path / "one", "", earlier="global_step_625")
    assert (done.returncode, "resumes from" in done.stderr) == (0, False)
    done = run_head(tmp_path / "two", "", earlier="global_step_625", noted="625")
    assert done.returncode == 0
    assert re.search(r"node-00\.sh: the trainer resumes from .*/global_step_625\n", done.stderr)


@pytest.mark.parametrize("what", ["Error in Trainer", "Trainer failed"])
def test_a_trainer_that_failed_fails_the_script_though_the_launcher_ends_with_0(tmp_path: Path, what: str) -> None:
    done = run_head(tmp_path, f"(Trainer pid=7) ERROR 11-21 15:42:44 [trainer.py:156] {what}:\r\nTraceback")
    assert done.returncode == 2
    assert "the trainer failed; the first error in" in done.stderr


@pytest.mark.parametrize("token", [False, True])
def test_a_token_of_ray_is_given_where_ray_would_ask_for_it(tmp_path: Path, token: bool) -> None:
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("abc")
    assert run_head(tmp_path, "").returncode == 0
    assert (tmp_path / "auth").read_text() == ("token\n" if token else "unset\n")


def test_the_exit_code_of_the_launcher_is_that_of_the_script(tmp_path: Path) -> None:
    assert run_head(tmp_path, "", code=7).returncode == 7


def test_the_install_commands_name_what_the_packages_leave_out() -> None:
    readme = bundle()["README.md"]
    assert "pip install 'trinity-rft[vllm]==0.6.0' 'pyarrow<26' greenlet" in readme
    assert "pip install --no-deps verl==0.7.1" in readme
    assert "torchrun" not in readme
