import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from topoplan.catalog import profile_entries

OWN = "gpu: h100-sxm-80gb\nsource: ours\ngemm_efficiency: 0.8\n"
RUN = {
    "id": "a",
    "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1},
    "model": {"name": "Qwen/Qwen3-8B"},
    "job": {"seq_len": 4096, "global_batch_size": 64},
    "layout": {"tp": 2},
}


def own(folder: Path, text: str = OWN) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_profile_is_shown_with_its_sources(cli: Cli) -> None:
    result = cli("show", "profile", "h100-sxm-80gb")
    assert result.code == 0
    assert "gemm_efficiency" in result.out
    assert "published" in result.out
    assert json.loads(cli("show", "profile", "h100-sxm-80gb", "--json").out)["profile"] == "hopper"


def test_all_profiles_are_listed_without_a_gpu(cli: Cli) -> None:
    assert "rtx4090-24gb" in cli("show", "profile").out
    assert json.loads(cli("show", "profile", "--json").out)["schema"] == "topoplan.profiles/1"


def test_a_file_to_start_from_is_written_once(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "h100.yaml"
    assert cli("show", "profile", "h100-sxm-80gb", "-o", path).code == 0
    text = path.read_text()
    again = cli("show", "profile", "h100-sxm-80gb", "-o", path)
    assert (again.code, path.read_text()) == (2, text)
    assert "exists" in again.err
    assert "with the constants of" in cli("show", "profile", "h100-sxm-80gb", "--profile", path).out


def test_rank_takes_a_profile(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    pins = ("--pin", "tp=2,pp=1,micro_batch_size=1", "--json")
    plain = json.loads(cli("rank", spec_file, *pins).out)
    mine = json.loads(cli("rank", spec_file, *pins, "--profile", own(tmp_path)).out)
    assert mine["plans"][0]["time"]["step_s"] < plain["plans"][0]["time"]["step_s"]
    assert mine["profile"]["constants"] == {"gemm_efficiency": 0.8}
    assert "profile" not in plain
    assert any("mine.yaml (ours)" in warning for warning in mine["plans"][0]["warnings"])


def test_explain_and_predict_take_a_profile(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    path = own(tmp_path)
    shown = cli("explain", spec_file, "--plan", "tp2-pp1-dp16-mbs1", "--profile", path).out
    assert "mine.yaml (ours)" in " ".join(shown.split())
    run = tmp_path / "run.json"
    run.write_text(json.dumps(RUN))
    shown = cli("explain", "--run", run, "--profile", path).out
    assert "mine.yaml (ours)" in " ".join(shown.split())
    answer = json.loads(cli("predict", run, "--json", "--profile", path).out)
    assert any("mine.yaml (ours)" in warning for warning in answer["warnings"])


def test_generate_keeps_the_profile_in_the_plan(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    options = ("--pin", "tp=2,pp=1,micro_batch_size=1", "-o", tmp_path / "bundle", "--profile", own(tmp_path))
    assert cli("generate", spec_file, *options).code == 0
    plan = json.loads((tmp_path / "bundle" / "plan.json").read_text())
    assert plan["inputs"]["profile"]["constants"] == {"gemm_efficiency": 0.8}


def test_a_wrong_profile_is_one_message(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    for text in ("gpu: h100-sxm-80gb\ngemm_efficiency: 1.4\n", "gpu: a100-sxm-80gb\n", "gpu: hopper\nwheel: 1\n"):
        result = cli("rank", spec_file, "--profile", own(tmp_path, text))
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("topoplan: ")
        assert len(result.err.splitlines()) == 1


@pytest.mark.usefixtures("graded_before")
def test_validate_shows_the_bands_and_writes_them(cli: Cli, tmp_path: Path) -> None:
    assert "eight_bit_time_band" in cli("validate", "--bands").out
    view = json.loads(cli("validate", "--bands", "--json").out)
    assert {band["profile"] for band in view["bands"]} == set(profile_entries())
    path = tmp_path / "profiles.json"
    assert cli("validate", "--bands", "-o", path).code == 0
    assert json.loads(path.read_text())["hopper"]["bands"]["time_band"]["figures"] >= 5
    path.write_text("mine")
    assert cli("validate", "--bands", "-o", path).code == 2
    assert path.read_text() == "mine"


ASK = ("show", "recipes", "--gpu", "a100-sxm-80gb", "--model")


def test_csv_of_short_names_is_as_the_published_tables_are(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B,Qwen/Qwen3-4B", "--gpus", "2", "--context", "20480,4096", "--csv")
    assert result.code == 0, result.err
    assert result.out == (
        "gpus,max_model_len,model,cell\n"
        "2,4096,Qwen3-0.6B,vanilla\n"
        "2,4096,Qwen3-4B,vanilla\n"
        "2,20480,Qwen3-0.6B,vanilla\n"
        "2,20480,Qwen3-4B,SP=2\n"
    )


def test_without_contexts_they_go_on_until_nothing_fits(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B", "--gpus", "1,2", "--json")
    assert result.code == 0, result.err
    cells = json.loads(result.out)["cells"]
    for gpus in (1, 2):
        assert [cell["fits"] for cell in cells if cell["gpus"] == gpus].index(False) == (
            sum(cell["gpus"] == gpus for cell in cells) - 1
        )


def test_people_get_a_table(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B", "--gpus", "6", "--context", "4096..8192")
    assert result.code == 0, result.err
    assert "6 GPUs, a100-sxm-80gb" in result.out
    assert "8,192" in result.out
