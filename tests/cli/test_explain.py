import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Cli
from topoplan.cli.plan_choice import wanted_id

PLAN = "tp2-pp2-dp8-mbs1"


def test_a_plan_is_explained_by_its_id_without_a_search(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    result = cli("explain", spec_file, "--plan", PLAN, "--memory")
    assert result.code == 0
    assert not fake_search
    assert "Plan tp2 pp2 dp8 mbs1 fits" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert "\x1b" not in result.out


def test_without_a_choice_the_time_comes_first_and_the_memory_follows(cli: Cli, spec_file: Path) -> None:
    both, time, memory = (
        cli("explain", spec_file, "--plan", PLAN, *more).out for more in ((), ("--time",), ("--memory",))
    )
    assert both.index("Time of a step, by part") < both.index("From allocated tensors to the card")
    assert "From allocated" not in time
    assert "Time of a step, by part" not in memory
    assert cli("explain", spec_file, "--plan", PLAN, "--time", "--memory").out == both


def test_a_rank_takes_a_search(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    view = json.loads(cli("explain", spec_file, "--plan", "2", "--memory", "--json").out)
    assert len(fake_search) == 1
    assert view["plan"]["id"] == "tp4-pp1-dp8-mbs1"  # the second plan of `usual_ranking`
    assert cli("explain", spec_file, "--plan", "9").is_refused("there is no plan 9")


def test_options_and_pins_hold(cli: Cli, spec_file: Path) -> None:
    options = ["--set", "seq_len=8192", "--pin", "backend=megatron,grad_reduce_in_fp32=false", "--margin", "10%"]
    view = json.loads(cli("explain", spec_file, "--plan", PLAN, "--json", *options).out)
    assert view["job"]["seq_len"] == 8192
    assert view["plan"]["layout"]["backend"] == "megatron"
    assert view["memory"]["margin"]["from"] == "spec"


def test_a_plan_that_does_not_fit_is_explained(cli: Cli, spec_file: Path) -> None:
    options = ["--model", "Qwen/Qwen2.5-72B", "--set", "template=x"]
    result = cli("explain", spec_file, "--plan", "tp8-pp1-dp4-mbs1", *options)
    assert result.code == 0, result.err
    assert "does not fit" in result.out


def test_a_run_document_is_explained(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    document = {
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
        "model": {"name": "Qwen/Qwen3-8B"},
        "job": {"seq_len": 4096, "global_batch_size": 64},
        "layout": {"backend": "megatron", "tp": 4},
    }
    path.write_text(json.dumps(document))
    assert "Plan tp4 pp1 dp8 mbs1 fits" in cli("explain", "--run", path, "--memory").out
    path.write_text(json.dumps(document) + "\n" + json.dumps(document))
    result = cli("explain", "--run", path)
    assert result.code == 2
    path.write_text(json.dumps({"cluster": {}}))
    assert "no `layout`" in cli("explain", "--run", path).err


def test_an_id_may_be_pasted_from_the_table() -> None:
    assert wanted_id(" tp1 pp2 dp16 mbs1 sel:mlp ") == "tp1-pp2-dp16-mbs1-sel-mlp"


def test_json_has_the_time_and_the_memory_that_were_asked_for(cli: Cli, spec_file: Path) -> None:
    view = json.loads(cli("explain", spec_file, "--plan", PLAN, "--json").out)
    assert view["time"]["step"]["value"] == view["plan"]["time"]["step_s"]
    assert "memory" in view
    assert "memory" not in json.loads(cli("explain", spec_file, "--plan", PLAN, "--json", "--time").out)


def test_two_plans_are_compared_by_their_ids_without_a_search(
    cli: Cli, spec_file: Path, fake_search: list[Any]
) -> None:
    result = cli("explain", spec_file, "--plan", PLAN, "--versus", "tp8 pp1 dp4 mbs1")
    assert result.code == 0
    assert not fake_search
    assert "wins: it is" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    view = json.loads(cli("explain", spec_file, "--plan", PLAN, "--versus", "tp4-pp1-dp8-mbs1", "--json").out)
    assert view["schema"] == "topoplan.versus/1"
    assert view["differences"]["layout"]["tp"] == [2, 4]
    assert {"time_s", "memory_gib"} < set(view["differences"])


def test_two_ranks_take_one_search(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    assert cli("explain", spec_file, "--plan", "1", "--versus", "2").code == 0
    assert len(fake_search) == 1


def test_plans_that_split_data_alone_are_explained_by_id_and_by_rank(cli: Cli, spec_file: Path) -> None:
    result = cli("explain", spec_file, "--plan", "zero3-dp32-mbs1-full")
    assert result.code == 0, result.err
    assert "Memory of a GPU, by part" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    view = json.loads(cli("explain", spec_file, "--pin", "backend=fsdp2", "--json").out)
    assert view["plan"]["layout"]["backend"] == "fsdp2"
    (allocated, _) = view["memory"]["device"]["children"][0]["children"]
    assert {"weights", "gradients", "optimizer"} < {part["name"] for part in allocated["children"]}


def test_a_plan_of_either_kind_is_compared_with_the_other(cli: Cli, spec_file: Path) -> None:
    result = cli("explain", spec_file, "--plan", PLAN, "--versus", "fsdp2-dp32-mbs1-full")
    assert result.code == 0, result.err
    assert "two cost models" in result.out
