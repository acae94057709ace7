import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from topoplan.cli.generate import bundle_name
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec


@pytest.fixture(autouse=True)
def fake_bundle(monkeypatch: pytest.MonkeyPatch, fake_search: list[Any], tmp_path: Path) -> None:
    def generate(spec: Spec, plan: Plan, scheduler: str | None = None) -> dict[str, str]:
        scripts = {f"node-{node:02d}.sh": "true\n" for node in range(spec.cluster.nodes)}
        return {
            "plan.json": json.dumps({"id": plan.id, "scheduler": scheduler}),
            "train.yaml": "do_train: true\n",
            **scripts,
            **({"job.sbatch": "true\n"} if scheduler else {}),
            "README.md": "#\n",
        }

    monkeypatch.setattr("topoplan.emit.bundle.generate", generate)
    monkeypatch.chdir(tmp_path)


def written_plan(directory: str | Path = "generated/test-2x8") -> str:
    return str(json.loads((Path(directory) / "plan.json").read_text())["id"])


def test_the_first_plan_goes_to_a_directory_named_after_the_cluster(cli: Cli, spec_file: Path) -> None:
    result = cli("generate", spec_file)
    assert result.code == 0
    assert written_plan() == "tp2-pp1-dp16-mbs1"
    assert "bash generated/test-2x8/node-00.sh" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("plan", "plan_id"),
    [
        ("2", "tp4-pp1-dp8-mbs1"),
        ("tp4-pp1-dp8-mbs1", "tp4-pp1-dp8-mbs1"),
        ("tp4 pp1 dp8 mbs1", "tp4-pp1-dp8-mbs1"),
        ("tp2 pp2 vpp3 dp8 mbs1 sel:core_attn", "tp2-pp2-vpp3-dp8-mbs1-sel-core_attn"),
    ],
)
def test_a_plan_is_chosen_by_rank_or_id(cli: Cli, spec_file: Path, plan: str, plan_id: str) -> None:
    assert cli("generate", spec_file, "--plan", plan, "-o", "out").code == 0
    assert written_plan("out") == plan_id


def test_an_id_outside_the_ranking_is_predicted(cli: Cli, spec_file: Path, fake_predict: list[Any]) -> None:
    assert cli("generate", spec_file, "--plan", "tp8-pp2-dp2-mbs1").code == 0
    assert written_plan() == "tp8-pp2-dp2-mbs1"
    assert fake_predict[0]["sequence_parallel"] is True


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [
        ("0", 2, "there is no plan 0; expected 1 to 5"),
        ("6", 2, "there is no plan 6; expected 1 to 5"),
        ("first", 2, "'first' is not a plan"),
        ("tp16-pp1-dp2-mbs1", 2, "tp 16 > 8"),
        ("tp8-pp2-dp3-mbs1", 2, "is not the id of a layout of this job; it is tp8-pp2-dp2-mbs1"),
        ("tp1-pp16-dp2-mbs1", 1, "does not fit: 99.0 GiB"),
    ],
)
def test_a_plan_that_cannot_be_taken_writes_nothing(
    cli: Cli, spec_file: Path, fake_predict: list[Any], plan: str, code: int, message: str
) -> None:
    result = cli("generate", spec_file, "--plan", plan)
    assert result.code == code
    assert message in result.err
    assert not Path("generated").exists()


def test_an_edited_bundle_is_kept_unless_forced(cli: Cli, spec_file: Path) -> None:
    cli("generate", spec_file, "-o", "out")
    Path("out/train.yaml").write_text("edited\n")
    result = cli("generate", spec_file, "-o", "out")
    assert result.code == 2
    assert "--force" in result.err
    assert Path("out/train.yaml").read_text() == "edited\n"
    assert cli("generate", spec_file, "-o", "out", "--force").code == 0


def test_a_file_in_the_way_is_refused(cli: Cli, spec_file: Path) -> None:
    Path("out").write_text("")
    assert cli("generate", spec_file, "-o", "out").code == 2


def test_json_names_plan_and_files(cli: Cli, spec_file: Path) -> None:
    view = json.loads(cli("generate", spec_file, "--json").out)
    assert view["schema"] == "topoplan.generate/1"
    assert "generated/test-2x8/train.yaml" in view["files"]
    assert all(Path(file).is_file() for file in view["files"])


@pytest.mark.parametrize(
    ("options", "scheduler"),
    [
        ([], None),
        (["--scheduler", "slurm"], "slurm"),
        (["--scheduler", "none"], None),
        (["--set", "slurm.partition=gpu"], "slurm"),
        (["--set", "slurm={time: 24:00:00}", "--scheduler", "none"], None),
    ],
)
def test_the_scheduler_is_the_options_or_else_the_specs(
    cli: Cli, spec_file: Path, options: list[str], scheduler: str | None
) -> None:
    result = cli("generate", spec_file, "-o", "out", *options)
    assert result.code == 0
    assert json.loads(Path("out/plan.json").read_text())["scheduler"] == scheduler
    assert ("sbatch out/job.sbatch" in result.out) == (scheduler == "slurm")
    assert ("bash out/node-00.sh" in result.out) == (scheduler is None)


def test_an_unknown_scheduler_is_refused_before_the_search(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    result = cli("generate", spec_file, "--scheduler", "pbs")
    assert result.code == 2
    assert "--scheduler: 'pbs' is not a scheduler; expected slurm or none" in result.err
    assert not fake_search
    assert not Path("generated").exists()


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        ("h100-4x8", "h100-4x8"),
        ("../../etc", "etc"),
        ("my lab/row 2", "my-lab-row-2"),
        ("..", "cluster"),
        (".hidden", "hidden"),
    ],
)
def test_a_cluster_name_cannot_leave_its_directory(name: str, directory: str) -> None:
    assert bundle_name(name) == directory
