"""The Slurm job script: its text, and runs with stubs for Slurm's commands (tests/verify has a real Slurm)."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bundle.samples import CLUSTER, HOSTS, ONE_NODE, QWEN3_30B, make_spec_and_plan
from tests.bundle.shell_scripts import assert_sound
from tests.bundle.test_node_script import NAMES, NASTY, fill, make_python, scratch
from tests.sizes import examples
from topoplan.bundle.bundle import generate
from topoplan.bundle.draft import draft_of
from topoplan.bundle.slurm import JOB_SCRIPT, time_limit_s
from topoplan.bundle.warnings import warnings_of
from topoplan.bundle.write import write_bundle
from topoplan.errors import InputError, SpecError
from topoplan.specs.cluster import Cluster

NAMED_HOSTS = tuple(replace(host, address=f"gpu{9 - node}", workdir=None) for node, host in enumerate(HOSTS))
WITH_HOSTS = replace(CLUSTER, hosts=NAMED_HOSTS)


def with_options(**options: str | bool) -> Cluster:
    return replace(CLUSTER, slurm={name.replace("_", "-"): value for name, value in options.items()})


def script(**what: Any) -> str:
    return generate(*make_spec_and_plan(**what), "slurm")[JOB_SCRIPT]


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


# The bundle


def test_a_bundle_has_a_job_script_only_when_it_is_asked_for() -> None:
    spec, plan = make_spec_and_plan()
    without, files = generate(spec, plan), generate(spec, plan, "slurm")
    assert set(files) - set(without) == {JOB_SCRIPT}
    assert {name for name in without if without[name] != files[name]} == {"plan.json", "README.md"}
    assert "scheduler" not in json.loads(without["plan.json"])
    assert json.loads(files["plan.json"])["scheduler"] == "slurm"
    assert generate(spec, plan, "slurm") == files


def test_a_slurm_block_in_the_spec_is_a_request_for_one() -> None:
    spec, plan = make_spec_and_plan(cluster=with_options(partition="gpu"))
    assert "#SBATCH --partition=gpu" in generate(spec, plan)[JOB_SCRIPT]
    assert generate(spec, plan) == generate(spec, plan, "slurm")
    assert JOB_SCRIPT not in generate(spec, plan, "none")


def test_another_scheduler_is_refused() -> None:
    with pytest.raises(InputError, match="'pbs' is not a scheduler; expected slurm or none"):
        generate(*make_spec_and_plan(), "pbs")


def test_the_readme_says_how_to_submit_watch_and_cancel() -> None:
    readme = generate(*make_spec_and_plan(), "slurm")["README.md"]
    assert "| `job.sbatch` | starts all nodes" in readme
    for command in ("\nsbatch job.sbatch ", "\nsqueue --me ", "\ntail -f slurm-JOBID.out ", "\nscancel JOBID "):
        assert command in readme
    assert "Slurm chooses the machines" in readme
    assert "MASTER_ADDR" not in readme
    assert "Ctrl-C" not in readme
    assert "\n\n\n" not in readme
    assert (
        "The machines are those of the spec" in generate(*make_spec_and_plan(cluster=WITH_HOSTS), "slurm")["README.md"]
    )


# The lines for sbatch


def test_the_job_asks_for_whole_nodes_with_one_task_each() -> None:
    text = script()
    assert options(text)[1:] == [
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--propagate=NONE",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
    ]
    assert options(text)[0].startswith("--job-name=Qwen3-VL-8B-Instruct-tp4-pp1-")
    # sbatch stops reading options at the first command.
    assert text.rindex("#SBATCH --") < text.index("set -euo pipefail")


def test_a_job_that_could_not_go_on_is_not_begun_again() -> None:
    text = script(model=QWEN3_30B, tp=2, ep=2, etp=1)
    assert {"--no-requeue", "--requeue"} & set(options(text)) == {"--no-requeue"}


def test_the_time_limit_is_left_to_the_user_with_the_prediction_beside_it() -> None:
    text = script()
    assert "# Predicted: 2.68 hours, between 2.42 and 3.07, with start-up and checkpoints." in text
    assert "\n##SBATCH --time=5:00:00\n" in text
    assert "Predicted" not in script(job={"samples": None})
    assert "Predicted" not in script(cluster=with_options(time="24:00:00"))


@pytest.mark.parametrize(
    ("given", "there", "gone"),
    [
        ({"partition": "gpu", "qos": "high"}, ["--partition=gpu", "--qos=high"], []),
        ({"gpus_per_node": "h100:8"}, ["--gpus-per-node=h100:8"], ["--gpus-per-node=8"]),
        ({"gres": "gpu:h100:8"}, ["--gres=gpu:h100:8"], ["--gpus-per-node"]),
        ({"gres": "nvme:1"}, ["--gres=nvme:1", "--gpus-per-node=8"], []),
        ({"gpus": 32}, ["--gpus=32"], ["--gpus-per-node"]),
        ({"gpus_per_task": "h100:8"}, ["--gpus-per-task=h100:8"], ["--gpus-per-node"]),
        ({"gpus_per_node": False}, [], ["--gpus-per-node"]),
        ({"exclusive": False, "mem_per_gpu": "200G"}, ["--mem-per-gpu=200G"], ["--exclusive", "--mem="]),
        ({"exclusive": "user"}, ["--exclusive=user"], []),
        ({"requeue": True}, ["--requeue"], ["--no-requeue"]),
        ({"requeue": False}, ["--no-requeue"], ["--requeue"]),
        ({"nodelist": "gpu[1-4,7]"}, ["--nodelist=gpu[1-4,7]"], []),
        ({"constraint": "[a|b]*2&ib"}, ["--constraint='[a|b]*2&ib'"], []),
        ({"comment": 'my "run" # 1 $(x)'}, ["--comment='my \"run\" # 1 $(x)'"], []),
    ],
)
def test_options_of_the_spec_take_the_place_of_ours(
    given: dict[str, str | bool], there: list[str], gone: list[str]
) -> None:
    found = options(script(cluster=with_options(**given)))
    assert set(there) <= set(found)
    assert not [line for line in found for start in gone if line == start or line.startswith(f"{start}=")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": "3"}, "slurm.nodes: is the spec's `nodes`"),
        ({"a b": "c"}, "slurm.a b: is not an option of sbatch"),
        ({"comment": "a\nrm -rf x"}, "slurm.comment: 'a\\\\nrm -rf x' is not usable"),
        ({"comment": "it's"}, 'slurm.comment: "it\'s" is not usable'),
    ],
)
def test_options_that_could_leave_their_line_are_refused(given: dict[str, str | bool], message: str) -> None:
    with pytest.raises(SpecError) as error:
        script(cluster=replace(CLUSTER, slurm=given))
    assert message.replace("\\\\", "\\") in str(error.value)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"gpus_per_node": 4}, "gpus-per-node 4 asks for 4 GPUs in a node"),
        ({"gres": "nvme:1,gpu:h100:4"}, "gres nvme:1,gpu:h100:4 asks for 4 GPUs in a node"),
        ({"gpus": "h100:20"}, "gpus h100:20 asks for 20 GPUs for 4 nodes"),
        ({"gpus_per_task": 1}, "gpus-per-task 1 asks for 1 GPUs in a node"),
    ],
)
def test_fewer_gpus_than_the_plan_has_are_refused(given: dict[str, str | bool], asked: str) -> None:
    name = next(iter(given)).replace("_", "-")
    with pytest.raises(SpecError, match=rf"^slurm\.{name}: {asked}, and the plan has 8 in each; set the spec's"):
        script(cluster=with_options(**given))


def test_hosts_of_the_spec_are_asked_for_by_name() -> None:
    text = script(cluster=WITH_HOSTS)
    assert "--nodelist=gpu9,gpu8,gpu7,gpu6" in options(text)
    assert "\nhosts=(gpu9 gpu8 gpu7 gpu6)\n" in text
    assert "\nmaster_addr=gpu9\n" in text


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1", "[::1]", "-x", "a b"])
def test_a_host_that_is_no_name_of_a_node_is_refused(address: str) -> None:
    hosts = (replace(NAMED_HOSTS[0], address=address), *NAMED_HOSTS[1:])
    with pytest.raises(SpecError, match=r"hosts\[0\]\.address: .* is not a Slurm node name; leave hosts out"):
        script(cluster=replace(CLUSTER, hosts=hosts))


def test_hosts_and_a_nodelist_do_not_go_together() -> None:
    with pytest.raises(SpecError, match="slurm: nodelist conflicts with hosts"):
        script(cluster=replace(WITH_HOSTS, slurm={"nodelist": "gpu1"}))
    twice = (*NAMED_HOSTS[:3], replace(NAMED_HOSTS[0], port=2222))
    with pytest.raises(SpecError, match=r"hosts\[3\]\.address: 'gpu9' is listed twice"):
        script(cluster=replace(CLUSTER, hosts=twice))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("24:00:00", 86400),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("0", None),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: float | None) -> None:
    assert time_limit_s(text) == seconds


def test_a_time_limit_below_the_prediction_is_warned_of() -> None:
    short = make_spec_and_plan(cluster=with_options(time="2:00:00"))
    assert (
        "time 2:00:00 under slurm in the spec limits the job to 2 hours" in warnings_of(draft_of(*short, "slurm"))[-1]
    )
    assert "- time 2:00:00 under slurm" in generate(*short, "slurm")["README.md"]
    assert "2:00:00" not in generate(*short, "none")["README.md"]
    long = make_spec_and_plan(cluster=with_options(time="1-0"))
    assert not any("under slurm" in warning for warning in warnings_of(draft_of(*long, "slurm")))


# The script


CASES: dict[str, dict[str, Any]] = {
    "no hosts": {},
    "hosts": {"cluster": WITH_HOSTS},
    "one node": {"cluster": ONE_NODE},
    "a secret": {"cluster": replace(CLUSTER, secrets=("HF_TOKEN",))},
    "options": {"cluster": with_options(comment='$HOME `x` "y"', time="1-0", requeue=True)},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_script_passes_bash_and_shellcheck(case: str) -> None:
    assert_sound(script(**CASES[case]))


# Stubs for Slurm's commands, for a job on four nodes: srun runs the tasks one after the other, and sleeps are shorter.
STAND_INS = {
    "sleep": "exec /bin/sleep 0.01",
    "squeue": 'printf "%s\\n" "$SUBMITTED"',
    "scontrol": """
case "$*" in
  "show hostnames "*) printf '%s\\n' ${SLURM_JOB_NODELIST//,/ } ;;
  "--oneliner show node "*)
    [[ -z "${HIDDEN:-}" ]] || exit 1
    echo "NodeName=$4 Arch=x86_64 NodeAddr=addr-of-$4 NodeHostName=$4 Port=6818" ;;
  *) exit 9 ;;
esac
""",
    "srun": """
printf '%s\\0' "$@" > "$PROBE/srun"
while [[ "$1" == --* ]]; do shift; done
for name in ${SLURM_JOB_NODELIST//,/ }; do
  mkdir "$PROBE/$name"
  SLURMD_NODENAME="$name" PROBE="$PROBE/$name" "$@" || exit
done
""",
}


def make_slurm(directory: Path) -> Path:
    directory.mkdir()
    for name, text in STAND_INS.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    return directory


def submit(
    bundle: Path, root: Path, *arguments: str, nodes: str = "n1,n2,n3,n4", env: dict[str, str] | None = None, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run the job script as Slurm does: a copy of it, in the submission directory."""
    spool = root / "spool"
    spool.mkdir()
    shutil.copy(bundle / JOB_SCRIPT, spool / "slurm_script")
    (root / "probe").mkdir()
    environment = {
        "PATH": f"{make_slurm(root / 'slurm')}:{root}/env/bin:{os.environ['PATH']}",
        "PROBE": str(root / "probe"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes.count(",") + 1),
        "SLURM_JOB_NODELIST": nodes,
        "SUBMITTED": f"{bundle}/{JOB_SCRIPT}",
        **(env or {}),
    }
    command = ["bash", str(spool / "slurm_script"), *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def ready_bundle(root: Path, place: str = "bundle", **what: Any) -> Path:
    bundle = root / "bundles" / place
    write_bundle(generate(*make_spec_and_plan(**what), "slurm"), bundle)
    make_python(root / "env")
    fill(bundle)
    return bundle


def words(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]


def started(root: Path) -> dict[str, tuple[str, str]]:
    """Return the node rank and master address of torchrun on each machine."""
    found = {}
    for argv in (root / "probe").glob("*/argv"):
        said = words(argv)
        found[argv.parent.name] = (said[said.index("--node_rank") + 1], said[said.index("--master_addr") + 1])
    return found


def test_every_machine_runs_the_script_of_its_place_in_the_list(tmp_path: Path) -> None:
    bundle = ready_bundle(tmp_path)
    done = submit(bundle, tmp_path, "--container-image=x y", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == {f"n{node + 1}": (str(node), "addr-of-n1") for node in range(4)}
    given = words(tmp_path / "probe/srun")
    assert given[:9] == [
        "--nodes=4",
        "--ntasks=4",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--label",
        "--export=ALL",
        "--cpu-bind=none",
        "--mpi=none",
        "--container-image=x y",
    ]


def test_the_name_of_node_0_has_to_do_where_slurm_hides_its_address(tmp_path: Path) -> None:
    done = submit(ready_bundle(tmp_path), tmp_path, cwd=tmp_path, env={"HIDDEN": "1"})
    assert done.returncode == 0, done.stderr
    assert {address for _, address in started(tmp_path).values()} == {"n1"}


def test_hosts_of_the_spec_keep_their_own_scripts_in_whatever_order_slurm_lists_them(tmp_path: Path) -> None:
    bundle = ready_bundle(
        tmp_path, cluster=replace(WITH_HOSTS, hosts=tuple(replace(h, venv=None) for h in NAMED_HOSTS))
    )
    done = submit(bundle, tmp_path, nodes="gpu6,gpu7,gpu8,gpu9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == {f"gpu{9 - node}": (str(node), "gpu9") for node in range(4)}


def test_a_machine_that_is_none_of_the_hosts_says_so(tmp_path: Path) -> None:
    done = submit(ready_bundle(tmp_path, cluster=WITH_HOSTS), tmp_path, nodes="gpu5,gpu7,gpu8,gpu9", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "gpu5 is not one of the nodes: gpu9 gpu8 gpu7 gpu6\n"


# Slurm's signal reaches the shell of a task long after it has ended the trainer: here after that many sleeps.
LATE = """echo >>"$PROBE/sleeps"
(($(wc -l <"$PROBE/sleeps") != 50)) || kill -TERM "$PPID"
"""
DIES = """#!/bin/bash
[[ "$1" == - || "$1" == -c ]] || kill -TERM "$$"
"""


@pytest.mark.parametrize(("sleep", "code"), [(LATE, 1), ("exit 0", 143)], ids=["by Slurm", "by somebody"])
def test_a_task_whose_script_was_ended_first_waits_for_its_own_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep: str, code: int
) -> None:
    monkeypatch.setitem(STAND_INS, "sleep", sleep)
    bundle = ready_bundle(tmp_path, cluster=ONE_NODE)
    (tmp_path / "env/bin/python").write_text(DIES)
    assert submit(bundle, tmp_path, nodes="n1", cwd=tmp_path).returncode == code


def test_one_node_meets_itself(tmp_path: Path) -> None:
    done = submit(ready_bundle(tmp_path, cluster=ONE_NODE), tmp_path, nodes="n3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == {"n3": ("0", "127.0.0.1")}


@pytest.mark.parametrize("way", ["arguments", "from standard input", "squeue does not answer"])
def test_the_bundle_is_found_however_it_was_submitted(tmp_path: Path, way: str) -> None:
    bundle = ready_bundle(tmp_path)
    command, cwd = {
        "arguments": (f"{bundle}/{JOB_SCRIPT} --label /x/{JOB_SCRIPT}", tmp_path),
        "from standard input": ("(null)", bundle),
        "squeue does not answer": ("", bundle),
    }[way]
    done = submit(bundle, tmp_path, cwd=cwd, env={"SUBMITTED": command})
    assert done.returncode == 0, done.stderr
    assert len(started(tmp_path)) == 4


def test_the_files_of_another_plan_are_not_taken(tmp_path: Path) -> None:
    bundle = ready_bundle(tmp_path)
    write_bundle(generate(*make_spec_and_plan(tp=2), "slurm"), tmp_path / "other")
    done = submit(bundle, tmp_path, cwd=tmp_path / "other", env={"SUBMITTED": f"{tmp_path}/other/{JOB_SCRIPT}"})
    assert done.returncode == 2
    assert re.fullmatch(r"job\.sbatch: Qwen3\S+ is neither in \S+/other nor in \S+/other; .*\n", done.stderr)
    assert not started(tmp_path)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "job.sbatch: not running in a Slurm job; submit it: sbatch job.sbatch\n"),
        (
            {"SLURM_JOB_NUM_NODES": "2"},
            "job.sbatch: the plan is for 4 nodes, but the job has 2; submit it with --nodes=4",
        ),
    ],
)
def test_what_is_wrong_with_the_job_is_said_in_one_line(tmp_path: Path, env: dict[str, str], message: str) -> None:
    done = submit(ready_bundle(tmp_path), tmp_path, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_secret_comes_with_the_environment_of_the_job(tmp_path: Path) -> None:
    bundle = ready_bundle(tmp_path, cluster=replace(CLUSTER, secrets=("HF_TOKEN",)))
    assert "Export them in the shell that calls `sbatch`" in (bundle / "README.md").read_text()
    done = submit(bundle, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("job.sbatch: HF_TOKEN is not set; export it in the shell that calls sbatch")
    shutil.rmtree(tmp_path / "probe")
    for left in ("spool", "slurm"):
        shutil.rmtree(tmp_path / left)
    submit(bundle, tmp_path, cwd=tmp_path, env={"HF_TOKEN": "a b"})
    assert len(started(tmp_path)) == 4


@pytest.mark.parametrize("export", ["NONE", "NIL", "PATH,HOME"])
def test_an_export_that_keeps_secrets_from_the_job_is_refused(export: str) -> None:
    cluster = replace(with_options(export=export), secrets=("HF_TOKEN",))
    with pytest.raises(SpecError, match=f"slurm.export: export {export} does not pass HF_TOKEN to the job"):
        script(cluster=cluster)
    assert script(cluster=replace(with_options(export="ALL"), secrets=("HF_TOKEN",)))
    assert script(cluster=replace(with_options(export="PATH,HF_TOKEN"), secrets=("HF_TOKEN",)))


def test_a_bundle_that_is_not_on_every_node_is_said_in_one_line(tmp_path: Path) -> None:
    bundle = ready_bundle(tmp_path)
    (bundle / "node-00.sh").unlink()
    done = submit(bundle, tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"no {bundle}/node-00.sh on n1; the bundle must be on storage that all nodes share\n"


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=NAMES, value=NAMES | st.sampled_from(NASTY))
def test_no_name_can_break_the_script_or_run_a_command(place: str, value: str) -> None:
    usable = "".join(value.translate({ord("'"): "", ord("\\"): ""}).split()) or "x"
    with scratch() as root:
        cluster = replace(CLUSTER, name=place, slurm={"comment": f"a {usable}", "partition": usable})
        bundle = ready_bundle(root, place, cluster=cluster)
        done = submit(bundle, root, cwd=root)
        assert done.returncode == 0, done.stderr
        assert started(root) == {f"n{node + 1}": (str(node), "addr-of-n1") for node in range(4)}
        assert words(root / "probe/n1/argv")[-1] == f"{bundle}/train.yaml"
        assert not list(root.rglob("PWNED"))
