import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SPEC, Cli

PIN = ("--pin", "tp=2,pp=1,cp=1")


def test_before_and_after_with_the_fate_of_the_old_best(cli: Cli, spec_file: Path) -> None:
    result = cli("what-if", spec_file, *PIN, "--set", "nodes=8", "--set", "ib_bandwidth=200Gb/s")
    assert result.code == 0, result.err
    assert "What if nodes=8, ib_bandwidth=200Gb/s?" in result.out
    assert "The previous best plan, tp2 pp1 dp16" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_several_values_are_all_combined(cli: Cli, spec_file: Path) -> None:
    sets = ("--set", "nodes=2,4", "--set", "seq_len=2048, 4096", "--set", "fabric.oversubscription=2")
    view = json.loads(cli("what-if", spec_file, *PIN, *sets, "--json").out)
    assert view["schema"] == "topoplan.what-if/1"
    assert [(case["set"]["nodes"], case["set"]["seq_len"]) for case in view["cases"]] == [
        ("2", "2048"),
        ("2", "4096"),
        ("4", "2048"),
        ("4", "4096"),
    ]
    assert [case["gpus"] for case in view["cases"]] == [16, 16, 32, 32]
    assert all(case["set"]["fabric.oversubscription"] == "2" for case in view["cases"])


def test_constants_of_ones_own_count(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("gpu: h100-sxm-80gb\ngemm_efficiency: 0.4\n")

    def step_s(*options: Any) -> float:
        view = json.loads(cli("what-if", spec_file, *PIN, "--set", "nodes=2", "--json", *options).out)
        return float(view["cases"][0]["plan"]["time"]["step_s"])

    assert step_s("--profile", own) > 1.2 * step_s()


def test_the_machines_of_a_spec_do_not_hold_the_number_of_nodes(cli: Cli, tmp_path: Path) -> None:
    spec = tmp_path / "hosts.yaml"
    spec.write_text(SPEC + "hosts: [{address: a}, {address: b}, {address: c}, {address: d}]\n")
    assert cli("what-if", spec, *PIN, "--set", "nodes=2").code == 0
    result = cli("what-if", spec, *PIN, "--set", "nodes=2", "--set", "hosts=[{address: a}]")
    assert "1 hosts != nodes 2" in result.err


def test_a_pin_that_a_case_cannot_meet_is_told_and_the_others_go_on(cli: Cli, spec_file: Path) -> None:
    result = cli("what-if", spec_file, "--pin", "tp=8,dp=4", "--set", "nodes=4,3")
    assert result.code == 0
    assert "nothing legal" in result.out
    assert "24 GPUs" in result.out


def test_where_nothing_fits_the_way_out_is_named_and_a_command_that_shows_all(cli: Cli, tmp_path: Path) -> None:
    options = "--gpu rtx4090 --gpus-per-node 4 --model Qwen/Qwen3-32B --finetuning qlora --seq-len 2048 --batch 16"
    words = [*options.split(), "--trainer", "llamafactory"]
    result = cli("what-if", *words, "--set", "seq_len=2k,8k,12k")
    flat = " ".join(result.out.split())
    assert result.code == 0
    assert flat.count("GiB); fused_linear_cross_entropy would fit (") == 2
    *_, title, command = result.out.splitlines()
    assert title == "This shows what would fit:"
    verb, *rest = shlex.split(command)[1:]
    assert (verb, rest[rest.index("--seq-len") + 1]) == ("rank", "8k")
    assert "seq_len=8k" not in rest  # an option and --set that disagree are refused
    assert "with Liger kernels" in cli(verb, *rest).err
    assert "This shows" not in cli("what-if", *words, "--set", "seq_len=1k,2k").out


def test_the_longest_sequences_that_fit_can_be_asked_for(cli: Cli) -> None:
    options = "--gpu rtx4090 --gpus-per-node 4 --model Qwen/Qwen3-32B --finetuning qlora --seq-len 2048 --batch 16"
    words = [*options.split(), "--trainer", "llamafactory"]
    view = json.loads(cli("what-if", *words, "--set", "seq_len=2k,max", "--json").out)
    longest = int(view["cases"][1]["set"]["seq_len"])
    assert (longest % 1024, view["cases"][1]["plan"] is None) == (0, False)
    beyond = json.loads(cli("what-if", *words, "--set", f"job.seq_len={longest + 1024}", "--json").out)
    assert beyond["cases"][0]["plan"] is None


def test_the_command_for_ways_out_leaves_the_hosts_out(cli: Cli, tmp_path: Path) -> None:
    spec = tmp_path / "hosts.yaml"
    spec.write_text(SPEC + "hosts: [{address: a}, {address: b}, {address: c}, {address: d}]\n")
    result = cli("what-if", spec, "--set", "model=Qwen/Qwen2.5-72B", "--set", "nodes=1", "--pin", "cp=1")
    assert "--set nodes=1 --set hosts=null" in result.out.splitlines()[-1]


def test_where_nothing_fits_the_exit_code_is_1(cli: Cli, spec_file: Path) -> None:
    options = "--set model=Qwen/Qwen2.5-72B --set nodes=1 --set template=x --pin cp=1"
    result = cli("what-if", spec_file, *options.split())
    assert result.code == 1
    assert "after: no layout fits; the nearest" in result.out


def test_the_search_is_asked_once_for_each_case_and_once_before(
    cli: Cli, spec_file: Path, fake_search: list[dict[str, Any]]
) -> None:
    assert cli("what-if", spec_file, "--set", "seq_len=1024,2048").code == 0
    assert [call["spec"].job.seq_len for call in fake_search] == [4096, 1024, 2048]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["nodes=1,zero"], "--set nodes=zero: 'zero' is not a whole number"),
        (["seq_len=" + ",".join(map(str, range(1, 22))), "nodes=1,2,3,4,5,6,7,8,9,10"], "210 combinations"),
    ],
)
def test_bad_changes_are_one_message_before_any_search(
    cli: Cli, spec_file: Path, fake_search: list[Any], sets: list[str], message: str
) -> None:
    assert cli("what-if", spec_file, *(word for text in sets for word in ("--set", text))).is_refused(message)
    assert not fake_search


def test_the_backends_that_are_named_are_searched(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    assert cli("what-if", spec_file, "--backend", "fsdp2,ddp", "--set", "nodes=2").code == 0
    assert [call["spec"].backends for call in fake_search] == [("fsdp2", "ddp")] * 2
