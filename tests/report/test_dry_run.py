import subprocess
from pathlib import Path

import pytest

from tests.run.test_bundle_reader import bundle_at
from topoplan.hosts.needs import RunNeeds, needs_of, python_on
from topoplan.remote.ssh_config import Target
from topoplan.remote.upload import PUT
from topoplan.report.dry_run import dry_run_lines, dry_run_to_dict
from topoplan.run import programs
from topoplan.run.bundle_reader import Bundle, read_bundle

PROGRAMS = ["put", "start", "keep", "supervise", "follow", "state", "stop"]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read_bundle(bundle_at(tmp_path / "bundle"))


@pytest.fixture
def checks(bundle: Bundle) -> RunNeeds:
    return needs_of(bundle.draft.spec, bundle.draft.plan, {})


def targets(bundle: Bundle) -> dict[str, Target]:
    return {
        node.name: Target(name=node.name, alias=node.name, hostname=node.host.address, user="ada", port=22)
        for node in bundle.nodes
    }


def test_every_program_is_named_on_one_line_and_its_text_is_in_json(bundle: Bundle, checks: RunNeeds) -> None:
    document = dry_run_to_dict(bundle, targets(bundle), checks=checks, grace_s=10)
    said = list(dry_run_lines(document))
    for program in document["programs"]:
        assert sum(line.startswith(f"  {program['name']}") and line.endswith(program["does"]) for line in said) == 1
    assert "PROGRAMS that run on hosts, with their arguments; --json has their text:" in said
    assert len(said) < 30 + 15 * len(bundle.nodes)
    texts = {program["name"]: program["text"] for program in document["programs"]}
    assert texts["stop"] == programs.STOP
    assert texts["keep"] == programs.LEADER


def test_what_each_host_gets_comes_after_the_programs_with_its_words(bundle: Bundle) -> None:
    document = dry_run_to_dict(bundle, targets(bundle), checks=None, grace_s=7)
    _, hosts = "\n".join(dry_run_lines(document)).split("\nHOSTS")
    for node in bundle.nodes:
        own = f"topoplan-runs-ada/{node.name}/<run id>-<random>"
        place = f"{node.host.workdir or '~'}/{own}"
        assert f"\n{node.name}: ssh ada@{node.host.address}\n" in hosts
        assert f"  run put {node.host.workdir or '~'} {own} .topoplan-<random> 120 SUMS\n" in hosts
        words = f"{place} {node.script} <run id>-<random> KEEP SUMS {python_on(node.host)}"
        assert f"  run start {words}\n" in hosts
        assert f"  run stop {place} <run id>-<random> 700 500 PID START BOOT\n" in hosts
    assert "run ask" not in hosts


def test_json_has_the_programs_and_what_differs_by_host(bundle: Bundle, checks: RunNeeds) -> None:
    document = dry_run_to_dict(bundle, targets(bundle), checks=checks, grace_s=10)
    assert [one["name"] for one in document["programs"]] == ["ask", "versions", "meet", "ports", *PROGRAMS]
    by_name = {one["name"]: one for one in document["programs"]}
    assert by_name["start"]["text"] == programs.START
    for node, planned in zip(bundle.nodes, document["nodes"], strict=True):
        assert planned["put"] == PUT
        assert planned["staging"].endswith(f"/{node.name}/.topoplan-<random>")
        for name, *words in planned["commands"]:
            assert name == "ask" or len(words) == len(by_name[name]["words"])
    without = dry_run_to_dict(bundle, targets(bundle), checks=None, grace_s=10)
    assert [one["name"] for one in without["programs"]] == PROGRAMS


def test_every_program_is_one_that_can_be_read(bundle: Bundle, checks: RunNeeds) -> None:
    for one in dry_run_to_dict(bundle, targets(bundle), checks=checks, grace_s=10)["programs"]:
        if one["name"] in ("ports", "versions", "supervise"):
            compile(one["text"], one["name"], "exec")
            continue
        done = subprocess.run(["bash", "-n"], input=one["text"].encode(), capture_output=True)
        assert (one["name"], done.returncode, done.stderr) == (one["name"], 0, b"")
