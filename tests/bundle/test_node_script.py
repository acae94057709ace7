"""The node scripts, run by a real bash with a stub for Python that records how it was started."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.bundle.samples import CLUSTER, HOSTS, ONE_NODE, QWEN3_8B, QWEN3_30B, make_spec_and_plan
from tests.bundle.shell_scripts import assert_sound
from tests.sizes import examples
from topoplan.bundle.bundle import generate
from topoplan.bundle.node_script import master_port, script_name
from topoplan.bundle.write import write_bundle
from topoplan.errors import SpecError
from topoplan.specs.cluster import Cluster
from topoplan.specs.passed_on import HIJACKERS
from topoplan.trainers.llamafactory.mca import trainer_file

FAKE_PYTHON = r"""#!/bin/bash
if [[ "$1" == - || "$1" == -c ]]; then printf '%s' "${PROBE_MISSING:-}"; exit "${PROBE_IMPORT:-0}"; fi
printf '%s\0' "$@" > "$PROBE/argv"
env -0 > "$PROBE/env"
printf '%s' "$PWD" > "$PROBE/cwd"
printf '%s' "$$" > "$PROBE/pid"
"""


@dataclass
class Started:
    """What the stub saw, and how the script ended."""

    code: int
    stderr: str
    argv: list[str]
    env: dict[str, str]
    cwd: str

    def option(self, name: str) -> str:
        return self.argv[self.argv.index(name) + 1]


def make_python(venv: Path) -> None:
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (venv / "bin" / "python3").symlink_to("python")


def start(
    script: Path,
    probe: Path,
    *arguments: str,
    path: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Started:
    probe.mkdir(exist_ok=True)
    (probe / "argv").unlink(missing_ok=True)
    environment = {"PATH": f"{path}:{os.environ['PATH']}".lstrip(":"), "HOME": "/", "PROBE": str(probe), **(env or {})}
    process = subprocess.Popen(
        ["bash", str(script), *arguments],
        env=environment,
        cwd=cwd or probe,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, stderr = process.communicate(timeout=300)
    if not (probe / "argv").exists():
        return Started(code=process.returncode, stderr=stderr, argv=[], env={}, cwd="")
    assert int((probe / "pid").read_text()) == process.pid, "the script did not exec"
    return Started(
        code=process.returncode,
        stderr=stderr,
        argv=(probe / "argv").read_bytes().decode().split("\0")[:-1],
        env=dict(line.split("=", 1) for line in (probe / "env").read_bytes().decode().split("\0")[:-1]),
        cwd=(probe / "cwd").read_bytes().decode(),
    )


def fill(workdir: Path, *, model: str = "models/Qwen/Qwen3-VL-8B-Instruct", data: str = "data") -> None:
    """Create what a node must have: the model and the list of data sets."""
    for directory, name in ((workdir / model, "config.json"), (workdir / data, "dataset_info.json")):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")


def cluster_in(root: Path, **changes: Any) -> Cluster:
    """Return four hosts whose directories are all below `root`."""
    workdir, venv = root / "work", root / "venv"
    workdir.mkdir()
    make_python(venv)
    fill(workdir)
    hosts = tuple(replace(host, workdir=str(workdir), venv=str(venv)) for host in HOSTS)
    return replace(CLUSTER, hosts=hosts, **changes)


def bundle_at(root: Path, **what: Any) -> Path:
    write_bundle(generate(*make_spec_and_plan(**what)), root)
    return root


def test_the_script_becomes_one_torchrun_that_runs_the_launcher_module(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    started = start(bundle / "node-02.sh", tmp_path / "probe")
    assert started.code == 0, started.stderr
    launcher = started.argv.index("llamafactory.launcher")
    assert started.argv[:2] == ["-m", "torch.distributed.run"]
    assert started.argv[launcher - 1 :] == ["-m", "llamafactory.launcher", f"{bundle}/train.yaml"]
    assert started.option("--nnodes") == "4"
    assert started.option("--node_rank") == "2"
    assert started.option("--nproc_per_node") == "8"
    assert started.option("--master_addr") == "10.0.0.1"
    assert 20000 <= int(started.option("--master_port")) < 30000
    assert started.cwd == str(tmp_path / "work")
    log_dir = Path(started.option("--log_dir"))
    assert log_dir.is_dir()
    assert log_dir.name == "node-02"
    assert started.env["VIRTUAL_ENV"] == str(tmp_path / "venv")
    assert started.env["PATH"].startswith(f"{tmp_path}/venv/bin:")
    assert started.env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert started.env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert started.env["USE_MCA"] == "1"


def test_all_nodes_meet_at_one_port_that_belongs_to_the_plan(tmp_path: Path) -> None:
    spec, plan = make_spec_and_plan(cluster=cluster_in(tmp_path))
    files = generate(spec, plan)
    ports = {re.search(r"^master_port=(\d+)$", files[script_name(node)], re.MULTILINE)[1] for node in range(4)}  # type: ignore[index]
    assert ports == {str(master_port(spec, trainer_file(spec, plan.layout)))}
    other_spec, other = make_spec_and_plan(cluster=spec.cluster, tp=2)
    assert master_port(other_spec, trainer_file(other_spec, other.layout)) != int(ports.pop())


def test_variables_that_hijack_the_launcher_are_gone(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    poison = dict.fromkeys(HIJACKERS, "7") | {"PET_NNODES": "9", "PET_RDZV_BACKEND": "c10d", "TORCHELASTIC_RUN_ID": "x"}
    poison["ACCELERATE_USE_FSDP"] = "true"
    started = start(bundle / "node-01.sh", tmp_path / "probe", env={**poison, "CDPATH": "/", "PYTHONHOME": "/nowhere"})
    assert started.code == 0, started.stderr
    assert not set(poison) & set(started.env)
    assert "PYTHONHOME" not in started.env
    assert started.option("--node_rank") == "1"
    assert started.option("--master_addr") == "10.0.0.1"


@pytest.mark.parametrize("form", ["variable", "argument"])
def test_without_hosts_the_address_of_node_0_is_given_at_the_start(tmp_path: Path, form: str) -> None:
    bundle = bundle_at(tmp_path / "bundle")
    make_python(tmp_path / "env")
    fill(bundle)
    given = {"env": {"MASTER_ADDR": "10.9.9.9"}} if form == "variable" else {}
    arguments = ["10.9.9.9"] if form == "argument" else []
    started = start(bundle / "node-03.sh", tmp_path / "probe", *arguments, path=str(tmp_path / "env/bin"), **given)  # type: ignore[arg-type]
    assert started.code == 0, started.stderr
    assert started.option("--master_addr") == "10.9.9.9"
    assert started.cwd == str(bundle)


def test_without_an_address_there_is_one_line_that_says_how(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle")
    started = start(bundle / "node-01.sh", tmp_path / "probe")
    assert started.code == 2
    assert started.stderr.count("\n") == 1
    assert "MASTER_ADDR=10.0.0.1 bash node-01.sh" in started.stderr


def test_one_node_meets_itself(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=ONE_NODE)
    make_python(tmp_path / "env")
    fill(bundle)
    started = start(bundle / "node-00.sh", tmp_path / "probe", path=str(tmp_path / "env/bin"))
    assert started.code == 0, started.stderr
    assert started.option("--master_addr") == "127.0.0.1"
    assert not [name for name in started.env if name.startswith(("NCCL_IB", "NCCL_SOCKET", "GLOO"))]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("work/models", "download it as README.md says"),
        ("work/data", "no dataset_info.json in data"),
        ("venv", "no Python at"),
        ("bundle/train.yaml", "copy the whole directory"),
        ("work", "cannot enter the working directory"),
    ],
)
def test_what_is_missing_on_the_node_is_said_in_one_line(tmp_path: Path, broken: str, message: str) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    gone = tmp_path / broken
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    started = start(bundle / "node-00.sh", tmp_path / "probe")
    assert started.code == 2
    assert not started.argv
    lines = [line for line in started.stderr.splitlines() if line.startswith("node-00.sh: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_an_environment_without_the_trainer_is_said_in_one_line(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    for env, said in (
        ({"PROBE_MISSING": "lacks torch"}, "venv/bin/python lacks torch\n"),
        ({"PROBE_IMPORT": "127"}, "venv/bin/python"),
    ):
        started = start(bundle / "node-00.sh", tmp_path / "probe", env=env)
        assert started.code == 2
        assert said in started.stderr
        assert started.stderr.count("\n") == 1
        assert not started.argv


MODULES = {
    "torch": "torch",
    "llamafactory": "llamafactory",
    "megatron-core": "megatron/core",
    "transformer-engine": "transformer_engine",
    "mcore_adapter": "mcore_adapter",
}
VERSIONS = {"torch": "2.11.0+cu128", "megatron-core": "0.16.1", "mcore_adapter": "0.10.0.dev0"}
INTERLEAVED = {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 32}


def with_packages(root: Path, versions: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment whose real python3 finds the given package versions, and packages without a version."""
    modules = root / "modules"
    for name, version in versions.items():
        (modules / MODULES[name]).mkdir(parents=True)
        (modules / MODULES[name] / "__init__.py").touch()
        if version:
            about = modules / f"{name.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    binary = root / "bin"
    binary.mkdir()
    # -S hides the packages of this interpreter by leaving out its site-packages.
    (binary / "python3").write_text(f'#!/bin/bash\n[[ "$1" == - ]] || exit 77\nexec {sys.executable} -S "$@"\n')
    (binary / "python3").chmod(0o755)
    return {"PYTHONPATH": str(modules), "PATH": f"{binary}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("layout", "versions", "said"),
    [
        ({}, {}, ""),
        ({}, {"torch": "2.13.0", "megatron-core": "0.16.1"}, "has torch 2.13.0, but this run needs <2.12: with torch"),
        ({}, {"torch": ""}, ""),
        ({}, {"torch": "2.12.0a0+0291f960b6.nv26.4"}, "has torch 2.12.0a0"),
        ({}, {"megatron-core": "0.19.0"}, "has megatron-core 0.19.0, but this run needs >=0.15,<0.19: mcore_adapter"),
        (
            {},
            {"mcore_adapter": "0.0.1"},
            "needs >=0.10.dev0: 0.0.1 on PyPI is an unrelated project of the same name; pip",
        ),
        (INTERLEAVED, {}, "has megatron-core 0.16.1, but this run needs >=0.18,<0.19: megatron-core below 0.18"),
        (INTERLEAVED, {"megatron-core": "0.18.2"}, ""),
    ],
)
def test_versions_that_end_or_spoil_a_run_are_told_before_it_starts(
    tmp_path: Path, layout: dict[str, Any], versions: dict[str, str], said: str
) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=ONE_NODE, **layout)
    # The test's interpreter may be older than required; the required version is tested below.
    text = (bundle / "node-00.sh").read_text().replace('"", ">=3.12"', '"", ">=3.9"')
    (bundle / "node-00.sh").write_text(text)
    fill(bundle)
    env = with_packages(tmp_path, {**dict.fromkeys(MODULES, ""), **VERSIONS, **versions})
    started = start(bundle / "node-00.sh", tmp_path / "probe", env=env)
    if not said:
        assert started.code == 77, started.stderr  # the exit code of the command that starts the trainer
        return
    assert started.code == 2
    assert said in started.stderr
    assert started.stderr.count("\n") == 1
    assert "; to run with other versions anyway: TOPOPLAN_ANY_VERSIONS=1" in started.stderr
    again = start(bundle / "node-00.sh", tmp_path / "probe", env={**env, "TOPOPLAN_ANY_VERSIONS": "1"})
    assert again.code == 77, again.stderr


def test_the_python_that_a_package_needs_is_told_too(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=ONE_NODE, **INTERLEAVED)
    text = (bundle / "node-00.sh").read_text()
    assert '("python", "", ">=3.12", "megatron-core >=0.18,<0.19 needs it"' in text
    (bundle / "node-00.sh").write_text(text.replace('"", ">=3.12"', '"", ">=3.99"'))
    fill(bundle)
    env = with_packages(tmp_path, {**dict.fromkeys(MODULES, ""), **VERSIONS, "megatron-core": "0.18.2"})
    said = start(bundle / "node-00.sh", tmp_path / "probe", env=env).stderr
    assert f"has python {sys.version.split()[0]}, but this run needs >=3.99" in said


def test_packages_that_are_lacking_are_named_as_pip_gets_them(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=ONE_NODE)
    fill(bundle)
    env = with_packages(tmp_path, {"torch": "2.11.0", "llamafactory": ""})
    said = start(bundle / "node-00.sh", tmp_path / "probe", env=env).stderr
    assert "python3 lacks megatron-core, transformer-engine, mcore_adapter; pip install megatron-core==0.16.1 " in said
    assert "'transformer_engine[pytorch]' 'git+https://github.com/alibaba/ROLL.git@8eb27cc2" in said


def one_node(root: Path, **what: Any) -> Path:
    """Return a bundle for one fully equipped machine; `root/env/bin` must be on PATH."""
    bundle = bundle_at(root / "bundle", **{"cluster": ONE_NODE, **what})
    make_python(root / "env")
    fill(bundle)
    return bundle


def run_one(root: Path, **env: str) -> Started:
    return start(root / "bundle/node-00.sh", root / "probe", path=str(root / "env/bin"), env=env)


@pytest.mark.parametrize(
    ("visible", "left"), [("0,1", 2), ("", 0), ("0,1,2,3,4,5,6,7", None), ("0,1,2,3,4,5,6,7,8", None)]
)
def test_gpus_that_the_shell_hides_are_missed_before_the_start(tmp_path: Path, visible: str, left: int | None) -> None:
    one_node(tmp_path)
    started = run_one(tmp_path, CUDA_VISIBLE_DEVICES=visible)
    if left is None:
        assert started.code == 0, started.stderr
        assert started.env["CUDA_VISIBLE_DEVICES"] == visible
    else:
        assert started.code == 2
        assert f"CUDA_VISIBLE_DEVICES leaves {left} of the 8 GPUs" in started.stderr


@pytest.mark.parametrize(("gpus", "code"), [(7, 2), (8, 0), (0, 2)])
def test_gpus_that_the_machine_lacks_are_missed_before_the_start(tmp_path: Path, gpus: int, code: int) -> None:
    one_node(tmp_path)
    tool = tmp_path / "env/bin/nvidia-smi"
    lines = "".join(
        f"echo 'GPU {gpu}: NVIDIA H100'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-x)'\n" for gpu in range(gpus)
    )
    tool.write_text(f"#!/bin/bash\n{lines}" + ("" if gpus else "echo 'no driver' >&2; exit 9\n"))
    tool.chmod(0o755)
    started = run_one(tmp_path)
    assert started.code == code, started.stderr
    assert code == 0 or f"nvidia-smi lists {gpus} GPUs, but the layout needs 8" in started.stderr


def write_index(model: Path, *weights: str) -> None:
    shards = {name: f"model-{number:05d}-of-{len(weights):05d}.safetensors" for number, name in enumerate(weights, 1)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}, indent=2))
    for shard in shards.values():
        (model / shard).write_text("x")


def test_a_download_that_broke_off_is_said_with_the_file_that_is_missing(tmp_path: Path) -> None:
    model = one_node(tmp_path) / "models/Qwen/Qwen3-VL-8B-Instruct"
    write_index(model, "a.weight", "b.weight")
    assert run_one(tmp_path).code == 0
    (model / "model-00002-of-00002.safetensors").write_text("")
    started = run_one(tmp_path)
    assert started.code == 2
    assert "lacks model-00002-of-00002.safetensors" in started.stderr


@pytest.mark.parametrize(
    "name", ["q_proj.weight_scale_inv", "q_proj.weight_scale", "q_proj.qweight", "q_proj.weight.absmax"]
)
def test_quantized_weights_are_refused_before_the_start(tmp_path: Path, name: str) -> None:
    model = one_node(tmp_path) / "models/Qwen/Qwen3-VL-8B-Instruct"
    write_index(model, "q_proj.weight", name)
    started = run_one(tmp_path)
    assert started.code == 2
    assert "are quantized" in started.stderr


def test_a_port_that_is_taken_is_said_on_the_node_that_needs_it(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    port = int(re.search(r"^master_port=(\d+)$", (bundle / "node-00.sh").read_text(), re.MULTILINE)[1])  # type: ignore[index]
    with socket.create_server(("127.0.0.1", port)):
        assert f"port {port} is in use" in start(bundle / "node-00.sh", tmp_path / "probe").stderr
        assert start(bundle / "node-01.sh", tmp_path / "probe").code == 0
    assert start(bundle / "node-00.sh", tmp_path / "probe").code == 0


def test_a_checkpoint_that_is_resumed_is_said_and_one_that_cannot_be_stops_the_start(tmp_path: Path) -> None:
    trainer = {"trainer": {"output_dir": "saves/my run", "model_name_or_path": "models/mine"}}
    for folder, layout, code in (("whole", {"tp": 2, "etp": 2}, 0), ("resharded", {"tp": 2, "etp": 1}, 2)):
        root = tmp_path / folder
        bundle = one_node(root, model=QWEN3_30B, job=trainer, ep=2, **layout)
        fill(bundle, model="models/mine")
        assert "checkpoint" not in run_one(root).stderr
        saves = bundle / "saves/my run"
        # Files written last before a machine crashed are truncated or empty; weights were deleted to make room.
        states = {"90": "{}", "100": '{"global_step": 100}\n', "110": None, "120": "", "130": '{"global', "140": "{}"}
        states |= {"150": "{}", "160": "{}"}
        for name, state in {**states, "best": "{}", "100-copy": "{}"}.items():
            (saves / f"checkpoint-{name}").mkdir(parents=True)
            if state is not None:
                (saves / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
            (saves / f"checkpoint-{name}" / "model-00001-of-00002.safetensors").write_text("weights")
        (saves / "checkpoint-140" / "model-00002-of-00002.safetensors").touch()
        (saves / "checkpoint-150" / "model-00001-of-00002.safetensors").unlink()
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (saves / "checkpoint-160" / "model.safetensors.index.json").write_text(json.dumps(index))
        started = run_one(root)
        assert started.code == code
        if code == 0:
            assert "node-00.sh: the trainer resumes from saves/my run/checkpoint-100\n" in started.stderr
            assert started.argv[-1] == "resume_from_checkpoint='saves/my run/checkpoint-100'"
        else:
            assert "from which the trainer cannot resume" in started.stderr


def test_a_checkpoint_that_is_not_whole_is_kept_from_a_trainer_that_would_take_it(tmp_path: Path) -> None:
    bundle = one_node(tmp_path, job={"trainer": {"output_dir": "saves", "model_name_or_path": "models/mine"}})
    fill(bundle, model="models/mine")
    for name in ("checkpoint-100", "checkpoint-best"):
        (bundle / "saves" / name).mkdir(parents=True)
    started = run_one(tmp_path)
    assert (started.code, started.argv[-1]) == (0, f"{bundle}/train.yaml")
    kept, moved = sorted(path.name for path in (bundle / "saves").iterdir())
    assert (kept, moved.rpartition("-")[0]) == ("checkpoint-best", "incomplete-checkpoint-100")


def test_a_secret_is_in_no_file_and_comes_from_the_shell(tmp_path: Path) -> None:
    cluster = replace(ONE_NODE, secrets=("HF_TOKEN", "WANDB_API_KEY"))
    files = generate(*make_spec_and_plan(cluster=cluster))
    assert json.loads(files["plan.json"])["inputs"]["cluster"]["secrets"] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert "6. These environment variables: `HF_TOKEN` and `WANDB_API_KEY`." in files["README.md"]
    one_node(tmp_path, cluster=cluster)
    started = run_one(tmp_path, HF_TOKEN="a b")
    assert (started.code, started.argv) == (2, [])
    assert started.stderr.startswith("node-00.sh: WANDB_API_KEY is not set; export it in the shell that starts this")
    assert started.stderr.count("\n") == 1
    assert run_one(tmp_path, HF_TOKEN="a b", WANDB_API_KEY="c").env["HF_TOKEN"] == "a b"


@pytest.mark.parametrize("name", ["MASTER_ADDR", "OMP_NUM_THREADS", "NCCL_DEBUG"])
def test_what_the_scripts_set_themselves_is_no_secret(name: str) -> None:
    with pytest.raises(SpecError, match=f"secrets: {name} is set or unset by the scripts"):
        generate(*make_spec_and_plan(cluster=replace(ONE_NODE, secrets=(name,))))


def test_no_core_files_are_written_and_limits_are_raised(tmp_path: Path) -> None:
    one_node(tmp_path)
    python = tmp_path / "env/bin/python"
    python.write_text('#!/bin/bash\n[[ "$1" == - ]] || { ulimit -Sc; ulimit -Ss; } > "$PROBE/limits"\n')
    run_one(tmp_path)
    core, stack = (tmp_path / "probe/limits").read_text().split()
    assert core == "0"
    assert stack in ("unlimited", "65536") or int(stack) > 0


def test_a_data_set_that_was_never_named_stops_the_start_until_somebody_names_it(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path), job={"dataset": None})
    assert "no data set is configured" in start(bundle / "node-00.sh", tmp_path / "probe").stderr
    yaml = bundle / "train.yaml"
    yaml.write_text(yaml.read_text().replace("dataset: SET_ME", "dataset: mine"))
    assert start(bundle / "node-00.sh", tmp_path / "probe").code == 0


@pytest.mark.parametrize(
    "keys", [{"dataset_dir": "ONLINE"}, {"dataset_dir": "REMOTE:org/data"}, {"tokenized_path": "/t"}]
)
def test_data_from_elsewhere_needs_no_list_of_data_sets(tmp_path: Path, keys: dict[str, str]) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path), job={"trainer": keys})
    shutil.rmtree(tmp_path / "work/data")
    assert start(bundle / "node-00.sh", tmp_path / "probe").code == 0


@pytest.mark.parametrize("field", ["workdir", "venv"])
def test_a_relative_directory_is_refused(field: str) -> None:
    hosts = (replace(HOSTS[0], **{field: "~/run"}), *HOSTS[1:])
    with pytest.raises(SpecError, match=rf"hosts\[0\]\.{field}: '~/run' is not absolute"):
        generate(*make_spec_and_plan(cluster=replace(CLUSTER, hosts=hosts)))


def test_sigterm_to_the_script_reaches_the_trainer(tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "bundle", cluster=cluster_in(tmp_path))
    python = tmp_path / "venv/bin/python"
    python.write_text(
        '#!/bin/bash\n[[ "$1" == - ]] && exit 0\ntrap "exit 42" TERM\necho ready\nwhile :; do sleep 0.05; done\n'
    )
    process = subprocess.Popen(["bash", str(bundle / "node-00.sh")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.wait(timeout=300) == 42
    process.stdout.close()


# Every script is valid bash


CASES: dict[str, dict[str, Any]] = {
    "hosts": {"cluster": replace(CLUSTER, hosts=HOSTS)},
    "no hosts": {},
    "one node": {"cluster": ONE_NODE},
    "a secret": {"cluster": replace(ONE_NODE, secrets=("HF_TOKEN",))},
    "no data": {"job": {"dataset": None}},
    "online data": {"job": {"dataset_dir": "ONLINE"}},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "ep": 4},
    "odd names": {
        "cluster": replace(
            CLUSTER,
            hosts=tuple(replace(host, workdir="/a b/'c'/$(d)/`e`/\"f\"/ü", venv="/v v/$HOME") for host in HOSTS),
            env={"X": "a'b\"c $(d) `e` \\ \n !", "Y": "=z"},
        )
    },
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_script_passes_bash_and_shellcheck(case: str) -> None:
    files = generate(*make_spec_and_plan(**CASES[case]))
    # Scripts of further nodes differ only in a number.
    assert_sound(*(files[name] for name in ("node-00.sh", "node-01.sh") if name in files))


# Any valid file name, in any field


NASTY = [
    "$(touch PWNED)",
    "`touch PWNED`",
    "'; touch PWNED; '",
    '"; touch PWNED; "',
    "a b",
    "-x",
    "$HOME",
    "*",
    "ü漢",
    "\\",
    "!",
    "a:b",
]
# Control characters and unusual spaces are refused before anything is written (test_bundle.py).
PRINTABLE = st.characters(
    codec="utf-8", categories=["L", "M", "N", "P", "S"], exclude_characters="/", include_characters=" "
)
NAMES = st.lists(st.sampled_from(NASTY) | st.text(PRINTABLE, min_size=1, max_size=12), min_size=1, max_size=3).map(
    # OmegaConf would interpret `${` as a variable, and `.` and `..` are not names of their own.
    lambda parts: re.sub(r"^\.+$", "dots", "".join(parts).replace("${", "$("))
)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30) | st.sampled_from(NASTY)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory).resolve()


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=NAMES, workdir=NAMES, venv=NAMES, model=NAMES, data=NAMES, user=NAMES, value=VALUES, said=VALUES)
def test_no_name_can_break_a_script_or_run_a_command(
    place: str, workdir: str, venv: str, model: str, data: str, user: str, value: str, said: str
) -> None:
    with scratch() as root:
        inside, python = root / "work" / workdir, root / "venv" / venv
        inside.mkdir(parents=True)
        make_python(python)
        fill(inside, model=f"models/{model}", data=f"data/{data}")
        hosts = tuple(
            replace(host, address=user.strip() or "h", user=user, workdir=str(inside), venv=str(python))
            for host in HOSTS
        )
        (inside / "saves" / data / "checkpoint-1").mkdir(parents=True)
        for name in ("trainer_state.json", "adapter_model.safetensors"):
            (inside / "saves" / data / "checkpoint-1" / name).write_text("{}")
        said = said.replace("${", "$(")
        trainer = {
            "model_name_or_path": f"models/{model}",
            "output_dir": f"saves/{data}",
            "default_system": said,
            "run_name": user,
        }
        cluster = replace(CLUSTER, name=place, hosts=hosts, env={"MINE": value})
        bundle = bundle_at(
            root / "bundles" / place,
            cluster=cluster,
            job={"dataset": user, "dataset_dir": f"data/{data}", "template": place, "trainer": trainer},
        )
        read = yaml.safe_load((bundle / "train.yaml").read_text(encoding="utf-8"))
        assert {key: read[key] for key in trainer} == trainer
        assert (read["dataset"], read["dataset_dir"], read["template"]) == (user, f"data/{data}", place)
        started = start(bundle / "node-01.sh", root / "probe")
        assert started.code == 0, started.stderr
        assert started.cwd == str(inside)
        assert started.env["MINE"] == value
        assert started.env["VIRTUAL_ENV"] == str(python)
        assert started.argv[-2] == f"{bundle}/train.yaml"
        # The values as the trainer parses them from YAML.
        assert yaml.safe_load(started.argv[-1].partition("=")[2]) == f"saves/{data}/checkpoint-1"
        assert started.option("--master_addr") == (user.strip() or "h")
        obey_readme(bundle / "README.md", root / "probe")
        assert not list(root.rglob("PWNED"))


def blocks_of(readme: str) -> list[tuple[str, str]]:
    """Return language and text of each code block, as a Markdown parser sees them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(readme)
    assert not [token for token in tokens if token.type in ("html_block", "code_block")]
    return [(token.info, token.content) for token in tokens if token.type == "fence"]


def obey_readme(path: Path, folder: Path) -> None:
    """Run each command block as it is, with an `ssh` stub that passes the command to a shell, as sshd does."""
    tools = folder / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    for tool in ("tar", "hf", "bash", "mkdir", "pip"):
        (tools / tool).write_text("#!/bin/sh\n[ -t 0 ] || cat >/dev/null\n")
    (tools / "ssh").write_text('#!/bin/bash\nexec /bin/sh -c "${@: -1}" </dev/null\n')
    (tools / "cat").symlink_to("/bin/cat")
    for tool in tools.iterdir():
        tool.is_symlink() or tool.chmod(0o755)
    blocks = [text for language, text in blocks_of(path.read_text(encoding="utf-8")) if language == "bash"]
    assert blocks
    for text in blocks:
        ran = subprocess.run(
            ["/bin/bash", "-euc", text],
            env={"PATH": str(tools)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, (text, ran.stderr)


@settings(max_examples=examples(60), deadline=None)
@given(name=NAMES, path=NAMES)
def test_a_name_stays_where_it_is_in_the_readme(name: str, path: str) -> None:
    def readme(name: str, path: str) -> str:
        hosts = tuple(replace(host, address=name, venv=f"/v/{path}", workdir=None) for host in HOSTS)
        cluster = replace(CLUSTER, name=name, hosts=hosts)
        model = replace(QWEN3_8B, name=name, config_path=f"/m/{path}")
        job = {"dataset": name, "dataset_dir": f"d/{path}", "trainer": {"output_dir": f"s/{path}"}}
        return generate(*make_spec_and_plan(cluster=cluster, model=model, job=job))["README.md"]

    plain, odd = blocks_of(readme("name", "path")), blocks_of(readme(name, path))
    assert [language for language, _ in odd] == [language for language, _ in plain]
    info, record = (json.loads(text) for language, text in odd if language == "json")
    assert list(info) == [name.split(",")[0].strip() or "my_data"]
    assert record[0]["messages"][1]["role"] == "assistant"
