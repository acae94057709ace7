"""The report of a check: text at two widths, and JSON."""

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from tests.reading.setups import FULL_YAML, all_of, configuration, mca, setup_of, swift_zero2
from topoplan.lint.check import Checked, Fixed, check_setup
from topoplan.lint.fix import Copy, Correction
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration, Setup
from topoplan.report.check import SCHEMA, checked_to_dict, github_lines, print_checked, print_fixed, sarif
from topoplan.specs.load import load_cluster

PART = Part(kind="yaml", name="train.yaml", text="a: 1\nb: 2\n")
ERROR = Finding(
    rule="mca-ignored-key",
    severity="error",
    part=PART,
    line=2,
    what="deepspeed is never read by the Megatron trainer [sic], which shards by its layout",
    why="training_args.py sets it to None before anything reads it",
    remedy="remove it",
    edits=(Edit(first_line=2, last_line=2, text=""),),
)
NOTE = Finding(
    rule="launch-idle", severity="note", part=Part(kind="shell", name="run.sh", text=""), what="two GPUs idle"
)


def checked(*findings: Finding, cluster: str | None = None, of: Configuration | None = None) -> Checked:
    read = None if cluster is None else load_cluster(f"cluster_specs/{cluster}.yaml")
    found = check_setup(all_of(of) if of else Setup(parts=(PART, NOTE.part)), PredictionTarget(cluster=read))
    return replace(found, findings=(*findings, *found.findings), not_understood=())


@cache
def _article() -> Checked:
    return checked(cluster="h100-4x8", of=configuration(FULL_YAML))


def article(*findings: Finding) -> Checked:
    """Return the check of a published configuration on its cluster, with the test's own findings."""
    return replace(_article(), findings=(*findings, *_article().findings))


def shown(what: Checked, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_checked(console, what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_a_finding_has_its_place_its_reason_and_its_remedy() -> None:
    assert shown(checked(ERROR, NOTE)) == (
        "train.yaml:2  error  deepspeed is never read by the Megatron trainer [sic], which shards by its\n"
        "    layout  [mca-ignored-key]\n"
        "    training_args.py sets it to None before anything reads it\n"
        "    remedy: remove it\n"
        "\n"
        "run.sh  note  two GPUs idle  [launch-idle]\n"
        "\n"
        "1 error, 1 note.\n"
    )


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = shown(article(ERROR, NOTE), width)

    assert max(map(len, text.splitlines())) <= width


def test_what_two_commands_on_one_line_have_in_common_is_said_once() -> None:
    folded = Part(kind="shell", name="a.md", text="one\ntwo\n", lines=(7, 7), unfolded=True)
    both = [replace(NOTE, part=folded, line=line) for line in (1, 2)]

    assert shown(checked(*both)).startswith("a.md:7  note  two GPUs idle  [launch-idle] 2 times\n\n2 notes.")


def test_configurations_that_are_predicted_alike_share_a_table() -> None:
    longer = configuration(FULL_YAML + "logging_steps: 5\n", name="longer.yaml")
    both = check_setup(
        all_of(configuration(FULL_YAML), longer), PredictionTarget(cluster=load_cluster("cluster_specs/h100-4x8.yaml"))
    )

    text = shown(both)
    assert text.count("MFU") == 1
    assert "train.yaml, longer.yaml on h100-4x8" in text


def test_nothing_to_say_is_said() -> None:
    assert shown(checked()) == "No findings in 2 files.\n"
    assert shown(check_setup(Setup(parts=()), PredictionTarget())) == "No configuration and no command was found.\n"


def test_a_program_whose_arguments_nobody_knows_is_named() -> None:
    setup = setup_of(
        "torchrun --nproc_per_node 8 a.py --lr 1\ntorchrun --nproc_per_node 8 b/a.py\nswift sft --model a\n"
    )
    found = replace(checked(), setup=setup)

    assert shown(found).startswith(
        "Only the launch of a.py, b/a.py was looked at: the arguments are no known trainer's.\nNo findings in 1 file."
    )
    assert checked_to_dict(found)["unread_programs"] == ["a.py", "b/a.py"]


def test_the_prediction_stands_beside_the_best_plan() -> None:
    text = shown(article())

    assert "train.yaml on h100-4x8, 4 x 8 h100-sxm-80gb: Qwen/Qwen3-VL-8B-Instruct, full sft bf16" in text
    head = next(line for line in text.splitlines() if "best plan  " in line or line.endswith("best plan"))
    assert head.split() == ["this", "file", "best", "plan"]
    assert "tp4 pp1 dp8 mbs1 nosp" in text
    assert "- every sequence is assumed to be cutoff_len long, 4,096 tokens" in text


def test_an_impossible_layout_leaves_the_batch_open_and_is_compared_with_nothing() -> None:
    text = " ".join(shown(checked(cluster="h100-4x8", of=mca(tensor_model_parallel_size=3))).split())

    assert "not predicted: the layout breaks rule world-size: world size 32 % (tp 3 * pp 1 * cp 1) = 2." in text
    assert "best plan" not in text


def test_what_is_not_predicted_says_why() -> None:
    text = shown(checked(cluster="h100-4x8", of=mca(model_name_or_path="/data/final")))

    assert "train.yaml: not predicted: /data/final: model '/data/final' was not found" in text


def test_the_json_twin_has_everything() -> None:
    view = checked_to_dict(article(ERROR))
    json.dumps(view, allow_nan=False)

    assert view["schema"] == SCHEMA == "topoplan.check/1"
    told = [finding["severity"] for finding in view["findings"]]
    assert view["counts"] == {severity: told.count(severity) for severity in ("error", "warning", "note")}
    assert "plan-slower" in [finding["rule"] for finding in view["findings"]]
    assert view["findings"][0] == {
        "rule": "mca-ignored-key",
        "docs": "docs/checks.md#mca-ignored-key",
        "severity": "error",
        "file": "train.yaml",
        "line": 2,
        "piece": None,
        "what": ERROR.what,
        "why": ERROR.why,
        "remedy": "remove it",
        "fixable": True,
    }
    (prediction,) = view["predictions"]
    assert prediction["plan"]["id"] == "tp4-pp1-dp8-mbs1-nosp"
    assert prediction["best"]["fits"]
    assert prediction["speed_of_best"] > 1.15
    assert {"key": "tensor_model_parallel_size", "now": 4, "best": 2} in prediction["changes"]
    assert prediction["model"]["name"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert view["cluster"]["name"] == "h100-4x8"
    assert "fixed" not in view


def test_what_would_fit_is_in_the_json() -> None:
    _, where = swift_zero2(max_length=4096)
    against = PredictionTarget(cluster=load_cluster("cluster_specs/a100-1x8.yaml"))
    (prediction,) = checked_to_dict(check_setup(where, against))["predictions"]

    assert prediction["plan"]["id"] == "zero2-dp5-mbs1-full"
    assert not prediction["plan"]["fits"]
    assert prediction["best"] is None
    assert [way["plan"]["fits"] for way in prediction["would_fit"]] == [True, True, True]


def test_host_memory_has_a_row_where_something_is_offloaded() -> None:
    _, where = swift_zero2(deepspeed="zero3_offload", max_length=4096)
    cluster = load_cluster("cluster_specs/a100-1x8.yaml", overrides=("host_memory=256GB",))
    checked = check_setup(where, PredictionTarget(cluster=cluster))

    row = next(line for line in shown(checked).splitlines() if line.startswith("host memory, GiB"))
    assert " of 238: over" in row


def fixed(*left: Finding) -> Fixed:
    after = replace(PART, text="a: 1\n")
    correction = Correction(before=PART, after=after, findings=(ERROR,))
    copy = Copy(
        path=Path("train.fixed.yaml"),
        text="# ...\na: 1\n",
        mark="",
        mode=None,
        parts=(after,),
        corrections=(correction,),
    )
    return Fixed(copies=(copy,), after=replace(checked(), findings=tuple(replace(one, part=after) for one in left)))


def fixed_text(what: Fixed) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False, emoji=False)
    print_fixed(console, checked(ERROR), what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_copies_are_named_with_what_is_left_in_their_own_lines() -> None:
    left = replace(ERROR, line=1, what="a is wrong")

    assert fixed_text(fixed()) == "\nWrote train.fixed.yaml: 1 correction to train.yaml.\n"
    assert fixed_text(fixed(left, NOTE)) == (
        "\nWrote train.fixed.yaml: 1 correction to train.yaml.\n"
        "Left to correct by hand:\n"
        "- train.fixed.yaml:2: error: a is wrong\n"
    )


def test_nothing_to_correct_is_said() -> None:
    assert fixed_text(Fixed(copies=(), after=checked())) == (
        "\nNothing can be corrected automatically: no copy was written.\n"
    )


def test_the_json_of_a_fix_names_the_copies_and_what_is_left() -> None:
    view = checked_to_dict(checked(ERROR), fixed(ERROR))

    places = [{"file": "train.yaml", "line": 1}]
    assert view["fixed"] == [{"file": "train.fixed.yaml", "from": places, "names": [], "rules": ["mca-ignored-key"]}]
    assert [one["rule"] for one in view["left"]] == ["mca-ignored-key"]


SCRIPT = Part(kind="shell", name="runs/a b,c.sh", text="one\ntwo\n", lines=(7, 8))
FINDING = Finding(
    rule="launch-nested-torchrun",
    severity="error",
    part=SCRIPT,
    line=2,
    what="100% wrong: twice",
    why="so",
    remedy="do",
)
SLOWER = replace(FINDING, rule="plan-slower", severity="note", line=None, why="", remedy="")


def test_github_shows_a_finding_at_its_line() -> None:
    assert list(github_lines([FINDING, SLOWER])) == [
        "::error file=runs/a b%2Cc.sh,line=8,title=launch-nested-torchrun::100%25 wrong: twice%0Aso%0Aremedy: do",
        "::notice file=runs/a b%2Cc.sh,title=plan-slower::100%25 wrong: twice",
    ]


def test_sarif_has_each_rule_once_with_its_help_and_each_finding_with_its_place() -> None:
    (run,) = json.loads(json.dumps(sarif([FINDING, replace(FINDING, line=1), SLOWER])))["runs"]

    rules = run["tool"]["driver"]["rules"]
    assert [one["id"] for one in rules] == ["launch-nested-torchrun", "plan-slower"]
    assert all(one["help"]["text"] for one in rules)
    assert [(one["ruleId"], one["ruleIndex"], one["level"]) for one in run["results"]] == [
        *[("launch-nested-torchrun", 0, "error")] * 2,
        ("plan-slower", 1, "note"),
    ]
    first, _, last = (one["locations"][0]["physicalLocation"] for one in run["results"])
    assert first == {"artifactLocation": {"uri": "runs/a%20b%2Cc.sh"}, "region": {"startLine": 8}}
    assert "region" not in last
