import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from topoplan.specs import known
from topoplan.specs.gpu_profile import profile_of


def test_it_draws_the_cluster(cli: Cli, spec_file: Path) -> None:
    result = cli("topology", spec_file)
    assert result.code == 0
    assert "one of 4 nodes" in result.out
    assert "Communication groups" not in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_a_cluster_needs_neither_model_nor_job(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text("gpu: h100-sxm-80gb\nnodes: 2\n")
    assert cli("topology", path).code == 0
    assert cli("topology", path, "--plan", "1").is_refused("`model` is missing")


@pytest.mark.parametrize(("layout", "words"), [("tp=4, pp=2", "tp4 pp2 dp4"), ("ulysses=4", "fsdp2 ulysses4 dp8")])
def test_degrees_bring_a_table(cli: Cli, spec_file: Path, layout: str, words: str) -> None:
    result = cli("topology", spec_file, "--layout", layout)
    assert result.code == 0
    assert f"Communication groups of {words}" in result.out


def test_a_plan_is_chosen_by_place_or_id(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    by_id = json.loads(cli("topology", spec_file, "--plan", "tp2-pp2-dp8-mbs1", "--json").out)
    assert not fake_search
    assert by_id["layout"]["pp"] == 2
    by_place = json.loads(cli("topology", spec_file, "--plan", "2", "--json").out)
    assert by_place["layout"]["tp"] == 4
    assert [row["name"] for row in by_place["groups"]] == ["tp", "dp"]


def test_options_change_the_cluster(cli: Cli, spec_file: Path) -> None:
    view = json.loads(cli("topology", spec_file, "--set", "fabric.rails=8", "--json").out)
    assert view["schema"] == "topoplan.topology/1"
    assert sum(vertex["kind"] == "leaf" for vertex in view["nodes"]) == 8


def test_the_drawing_of_a_plan_has_its_groups_and_what_they_send(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "groups.svg"
    shown = cli("topology", spec_file, "--plan", "tp4-pp2-dp4-mbs1", "-o", target).out
    assert "Communication groups of tp4 pp2 dp4" in shown
    assert re.search(
        r"tp: 8 groups of 4, tightest NVLink 900GB/s; a GPU sends [\d.]+ GB in a step\.", target.read_text()
    )
    cli("topology", spec_file, "-o", target)
    assert "groups of" not in target.read_text()


def test_a_plans_groups_get_what_constants_of_ones_own_say(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("gpu: h100-sxm-80gb\nnvlink_efficiency: 0.4\n")

    def rate(*options: Any) -> float:
        view = json.loads(cli("topology", spec_file, "--plan", "tp4-pp1-dp8-mbs1", "--json", *options).out)
        (row,) = (row for row in view["groups"] if row["name"] == "tp")
        return float(row["member_bytes_per_s"])

    assert rate("--set", f"profile={own}") == pytest.approx(
        rate() * 0.4 / profile_of(known.gpu("h100-sxm-80gb")).nvlink_efficiency
    )


def test_a_plan_that_splits_data_alone_comes_with_its_bytes(cli: Cli, spec_file: Path) -> None:
    assert "Bytes of a step, GB" in cli("topology", spec_file, "--plan", "zero3-dp32-mbs1-full").out
    view = json.loads(cli("topology", spec_file, "--plan", "zero3-dp32-mbs1-full", "--json").out)
    assert [row["moment"] for row in view["step"]] == ["forward", "backward", "backward"]
