"""The bundle in generated/ is up to date."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import topoplan
from tests.bundle.samples import (
    CLUSTER,
    HOSTS,
    ONE_NODE,
    QWEN3_8B,
    QWEN3_30B,
    make_layout,
    make_plan,
    make_spec_and_plan,
)
from topoplan.bundle.bundle import generate
from topoplan.bundle.draft import Scheduler, draft_of
from topoplan.bundle.warnings import warnings_of
from topoplan.bundle.write import MANIFEST
from topoplan.errors import SpecError
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.specs.cluster import Cluster
from topoplan.specs.lengths import Lengths
from topoplan.specs.load import load_spec

ROOT = Path(__file__).parents[2]
WITH_HOSTS = replace(CLUSTER, hosts=HOSTS)


def bundle(**what: Any) -> dict[str, str]:
    return generate(*make_spec_and_plan(**what))


def test_a_bundle_has_its_files_and_one_script_a_node() -> None:
    assert list(bundle()) == [
        "train.yaml",
        "node-00.sh",
        "node-01.sh",
        "node-02.sh",
        "node-03.sh",
        "hosts.json",
        "plan.json",
        "README.md",
    ]
    many = replace(CLUSTER, nodes=128)
    files = bundle(cluster=many)
    assert "node-127.sh" in files
    assert len(files["README.md"].splitlines()) < 120


def test_the_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import hashlib; from tests.bundle.samples import make_spec_and_plan;"
        "from topoplan.bundle.bundle import generate;"
        "print(hashlib.sha256(repr(generate(*make_spec_and_plan())).encode()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_every_file_ends_with_one_line_break_and_has_no_trailing_space() -> None:
    for name, text in bundle(cluster=WITH_HOSTS).items():
        assert text.endswith("\n"), name
        assert not text.endswith("\n\n"), name
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), name
        assert "\n\n\n" not in text, name


def test_readme_and_plan_json_say_which_versions_are_free_of_known_faults() -> None:
    plain, interleaved = bundle(), bundle(tp=2, pp=2, vpp=2, dp=8)
    assert "pip install 'torch<2.12'\n   pip install llamafactory==0.9.5 megatron-core==0.16.1\n" in plain["README.md"]
    assert json.loads(plain["plan.json"])["trainer_versions"]["torch"] == "<2.12"
    assert json.loads(plain["plan.json"])["trainer_versions"]["megatron_core"] == "0.16.1"
    assert "A Python environment (Python 3.12 and newer) with" in interleaved["README.md"]
    assert "pip install llamafactory==0.9.5 'megatron-core>=0.18,<0.19'\n" in interleaved["README.md"]
    versions = json.loads(interleaved["plan.json"])["trainer_versions"]
    assert (versions["megatron_core"], versions["python"]) == (">=0.18,<0.19", ">=3.12")


def test_plan_json_holds_inputs_layout_and_prediction() -> None:
    spec, plan = make_spec_and_plan(cluster=WITH_HOSTS, model=QWEN3_30B, tp=2, pp=4, ep=4)
    document = json.loads(generate(spec, plan)["plan.json"])
    assert document["schema"] == "topoplan.plan/1"
    assert document["version"] == topoplan.__version__
    assert document["id"] == plan.id
    assert document["inputs"]["cluster"]["gpu"]["name"] == "h100-sxm-80gb"
    assert document["inputs"]["cluster"]["hosts"][1]["address"] == "10.0.0.2"
    assert document["inputs"]["model"]["num_layers"] == 48
    assert document["inputs"]["job"]["global_batch_size"] == 64
    assert document["layout"]["tp"] == 2
    assert document["layout"]["dp"] == plan.layout.dp
    assert document["prediction"]["memory"]["device_gib"] == 60.125
    assert document["prediction"]["time"]["step_s"] == 2.0
    assert document["prediction"]["mfu"] == 0.212346


def test_hosts_json_says_which_script_belongs_where() -> None:
    document = json.loads(bundle(cluster=WITH_HOSTS)["hosts.json"])
    assert document["schema"] == "topoplan.hosts/1"
    assert document["master"]["address"] == "10.0.0.1"
    assert document["nodes"][2] == {
        "node": 2,
        "address": "10.0.0.3",
        "user": "ada",
        "port": None,
        "workdir": "/data/run",
        "venv": "/opt/trainer",
        "script": "node-02.sh",
    }


def test_hosts_json_without_hosts_leaves_the_addresses_open() -> None:
    document = json.loads(bundle()["hosts.json"])
    assert document["master"]["address"] is None
    assert [node["address"] for node in document["nodes"]] == [None] * 4
    assert json.loads(bundle(cluster=ONE_NODE)["hosts.json"])["master"]["address"] == "127.0.0.1"


def test_all_files_name_the_same_run() -> None:
    files = bundle(cluster=WITH_HOSTS)
    run = json.loads(files["plan.json"])["run"]
    assert json.loads(files["hosts.json"])["run"] == run
    assert yaml.safe_load(files["train.yaml"])["output_dir"] == f"saves/{run}"
    assert f"/logs/{run}/node-01" in files["node-01.sh"]
    assert f"`logs/{run}`" in files["README.md"]


def test_the_readme_says_what_to_expect() -> None:
    readme = bundle()["README.md"]
    assert "60.1 GiB of 79.7 GiB" in readme
    assert "2 s, between 1.8 and 2.3 s, for 64 sequences of 4096 tokens" in readme
    assert "4,096 tokens/s per GPU, 131,072 in total; 21% MFU" in readme
    assert "4686 steps, 2.68 hours, 85.8 GPU-hours" in readme
    assert "the spec has no `samples`" in bundle(job={"samples": None})["README.md"]
    assert re.search(r"for \d+ sequences of", readme)
    pairs = bundle(model=QWEN3_8B, job={"stage": "dpo", "packing": False})["README.md"]
    assert re.search(r"for \d+ pairs of sequences of", pairs)


def test_the_readme_says_what_every_node_needs() -> None:
    readme = bundle()["README.md"]
    assert "hf download Qwen/Qwen3-VL-8B-Instruct --local-dir models/Qwen/Qwen3-VL-8B-Instruct" in readme
    assert "`dataset_info.json` must be in `data`" in readme
    local = bundle(model=replace(QWEN3_8B, name="/data/my model", config_path="/data/my model"))["README.md"]
    assert "hf download" not in local
    assert "`/data/my model`" in local
    assert "**The spec does not name one**" in bundle(job={"dataset": None})["README.md"]


def test_the_readme_names_the_address_that_is_missing() -> None:
    assert "MASTER_ADDR=10.0.0.1 bash node-03.sh" in bundle()["README.md"]
    assert "MASTER_ADDR" not in bundle(cluster=WITH_HOSTS)["README.md"]
    assert "\nbash node-00.sh\n" in bundle(cluster=ONE_NODE)["README.md"]
    without_workdir = replace(CLUSTER, hosts=tuple(replace(host, workdir=None) for host in HOSTS))
    assert "bash node-01.sh   # on 10.0.0.2" in bundle(cluster=without_workdir)["README.md"]


@pytest.mark.parametrize(
    ("cluster", "scheduler"),
    [(CLUSTER, None), (WITH_HOSTS, None), (ONE_NODE, None), (CLUSTER, "slurm"), (ONE_NODE, "slurm")],
)
def test_the_readme_says_where_its_commands_are_to_be_called(cluster: Cluster, scheduler: Scheduler | None) -> None:
    spec, plan = make_spec_and_plan(cluster=cluster, tp=2)
    start = generate(spec, plan, scheduler)["README.md"].partition("## Start")[2].partition("```")[0]
    assert "in this directory" in start.lower()


def test_the_start_commands_of_the_readme_survive_two_shells() -> None:
    workdir = "/a b/$(touch x)/'c'"
    hosts = tuple(replace(host, workdir=workdir, port=2222) for host in HOSTS)
    files = bundle(cluster=replace(CLUSTER, hosts=hosts))
    start = [line for line in files["README.md"].splitlines() if line.startswith("ssh -t")]
    assert len(start) == 4
    argv = shlex.split(start[1])
    assert argv[:-1] == ["ssh", "-t", "-p", "2222", "ada@10.0.0.2"]
    run = json.loads(files["plan.json"])["run"]
    assert shlex.split(argv[-1]) == ["bash", f"{workdir}/bundles/{run}/node-01.sh"]


def test_warnings_of_the_plan_and_of_the_trainer_are_in_the_readme() -> None:
    spec, _ = make_spec_and_plan(job={"seq_len": 4000})
    plan = make_plan(make_layout(), warnings=("EP crosses nodes.",))
    readme = generate(spec, plan)["README.md"]
    assert "- EP crosses nodes." in readme
    assert "4032 tokens" in readme
    assert warnings_of(draft_of(spec, plan))[0] == "EP crosses nodes."
    assert "Mind these" not in bundle()["README.md"]


def test_no_file_has_a_date_or_a_path_of_this_machine() -> None:
    for name, text in bundle(cluster=WITH_HOSTS).items():
        assert not re.search(r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b", text), name
        assert "/home/" not in text, name


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ({"cluster": replace(CLUSTER, name="a\nb")}, "name"),
        (
            {"cluster": replace(WITH_HOSTS, hosts=(replace(HOSTS[0], workdir="/a\nb"), *HOSTS[1:]))},
            r"hosts\[0\]\.workdir",
        ),
        (
            {"cluster": replace(WITH_HOSTS, hosts=(*HOSTS[:3], replace(HOSTS[3], address="h\x00")))},
            r"hosts\[3\]\.address",
        ),
        ({"model": replace(QWEN3_8B, name="a\x1b[2J")}, "model"),
        ({"job": {"dataset": "a\tb"}}, r"job\.dataset"),
        ({"job": {"trainer": {"output_dir": "a\nb"}}}, r"job\.trainer\.output_dir"),
    ],
)
def test_a_line_break_or_a_control_character_in_a_name_is_refused(what: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError, match=rf"^{where}: .*control character"):
        bundle(**what)


def test_hosts_that_do_not_match_the_nodes_are_refused() -> None:
    with pytest.raises(SpecError, match="3 hosts for 4 nodes"):
        bundle(cluster=replace(CLUSTER, hosts=HOSTS[:3]))


def test_a_data_set_that_is_a_file_and_its_padding_are_said() -> None:
    lengths = Lengths(counts=((128, 9000),), samples=9000, source="mine.json")
    spec, plan = make_spec_and_plan(job={"lengths": lengths, "dataset": "mine.json", "samples": 9000})
    readme = generate(spec, replace(plan, padding_share=0.25))["README.md"]
    assert "| padding | 25.0% of a step's positions" in readme
    assert "add mine.json to dataset\\_info.json" in readme or "add mine.json to dataset_info.json" in readme


EXAMPLE = ROOT / "generated" / "h100-4x8"


def test_the_committed_example_is_what_generate_writes() -> None:
    spec = load_spec(ROOT / "cluster_specs" / "h100-4x8.yaml")
    files = generate(spec, rank(spec).plans[0])
    committed = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.iterdir() if path.name != MANIFEST}
    assert committed == files, "make readme writes it again"


def test_its_margin_for_a_run_out_of_memory_rules_its_plan_out() -> None:
    spec = load_spec(ROOT / "cluster_specs" / "h100-4x8.yaml")
    layout = rank(spec).plans[0].layout
    (percent,) = re.findall(r"`--margin (\d+)%`", (EXAMPLE / "README.md").read_text(encoding="utf-8"))
    for margin, fits in ((int(percent), False), (int(percent) - 1, True)):
        narrow = replace(spec, cluster=replace(spec.cluster, margin=margin / 100))
        assert predict(narrow, layout).fits is fits


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLE.glob("node-*.sh")))
def test_its_scripts_are_executable(script: str) -> None:
    assert (EXAMPLE / script).stat().st_mode & 0o111
