"""A page's question is the same as on the command line, with the same numbers and messages."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.page.asked import CONFIG, FLAGSHIP, ROOT, SHIPPED, SPEC, run
from tests.sizes import some
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import Questions
from topoplan.page.form import reply, use_of
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec

H100 = {"gpu": "h100", "nodes": "4"}
JOB = {"model": "Qwen/Qwen3-8B", "seq_len": "4k", "batch": "64"}
TRAIN = (ROOT / "docs" / "example-train.yaml").read_text(encoding="utf-8")


def question(options: Mapping[str, Any], spec: str | None = None, **files: str) -> dict[str, Any]:
    """Return a question; names of files use `_yaml` and `_json` for their suffixes."""
    named = {name.replace("_", ".", 1): text for name, text in files.items()}
    return {"question": {"options": options, "spec": spec, "files": named}}


def answer(asked: dict[str, Any], spec: str | None = None, **options: Any) -> Any:
    return reply(Questions(spec, SpecOptions(**options)).answer, asked)


# Complete searches take seconds: test_playground.py runs them.
PINS = dict.fromkeys((path.stem for path in SHIPPED), "tp=4,pp=2,micro_batch_size=1") | {
    "b200-128x8-deepseek-v3": "tp=1,pp=8,cp=1,ep=8,micro_batch_size=1",
    "h200-16x8-qwen3-235b": "tp=4,pp=4,ep=8,micro_batch_size=1",
}


@pytest.mark.parametrize("path", some(SHIPPED, 3), ids=lambda path: path.stem)
def test_numbers_are_those_of_the_command_line(path: Path) -> None:
    spec, pins = str(path), ["--pin", PINS[path.stem]]
    expected = json.loads(run("rank", spec, *pins, "--top", "30", "--json").stdout)
    questions, asked = Questions(spec, SpecOptions()), question({"pin": pins[1:]})
    page = questions.answer(asked)
    assert page["ranking"] | {"elapsed_s": 0} == expected | {"elapsed_s": 0}
    best = expected["best"]["id"]
    details = json.loads(json.dumps(questions.details({**asked, "id": best})))
    assert details["explain"] == json.loads(run("explain", spec, *pins, "--plan", best, "--json").stdout)


def test_every_split_of_the_job_can_be_filtered_by() -> None:
    """The best plan of each split is in the page's data, however low it ranks, with its details."""
    asked = question({})
    questions = Questions(FLAGSHIP[0], SpecOptions())
    page, found = questions.answer(asked), rank(SpecOptions().read(FLAGSHIP[0]))
    shown = {plan["id"]: plan["rank"] for plan in (*page["ranking"]["plans"], *page["others"])}
    assert shown.items() <= {one.id: place for place, one in enumerate(found.plans.layouts, start=1)}.items()
    splits = {(one.tp, one.pp, one.cp) for one in found.plans.layouts}
    assert splits == {(one.tp, one.pp, one.cp) for one in found.plans.layouts if one.id in shown}
    assert max(shown.values()) > len(shown) == len(page["labels"])
    assert questions.details({**asked, "id": page["others"][-1]["id"]})["explain"]["plan"]["id"] in shown


def test_values_along_are_those_of_what_if() -> None:
    pins = ["tp=4,pp=1,micro_batch_size=1"]
    along = Questions(FLAGSHIP[0], SpecOptions(pin=pins)).along({**question({}), "key": "nodes", "values": [2, 4]})
    expected = json.loads(run("what-if", *FLAGSHIP, "--pin", *pins, "--set", "nodes=2,4", "--json").stdout)
    plans = [case["plan"] | {"elapsed_s": 0} for case in along["cases"]]
    assert plans == [case["plan"] | {"elapsed_s": 0} for case in expected["cases"]]


def test_a_value_on_top_of_the_spec_is_an_option() -> None:
    page = answer(question({"nodes": "2", "overrides": ["samples=1000"]}), FLAGSHIP[0])
    assert page["command"] == f"topoplan rank {FLAGSHIP[0]} --nodes 2 --set samples=1000"
    assert page["ranking"]["cluster"]["nodes"] == 2
    assert page["has"]["nodes"] == "2"


def test_a_dropped_spec_takes_the_place_of_all_else() -> None:
    page = answer(question({}, "mine.yaml", mine_yaml=SPEC), nodes="3")
    assert page["ranking"]["cluster"]["nodes"] == 1
    assert page["command"] == "topoplan rank mine.yaml"


def test_a_dropped_config_is_the_model() -> None:
    asked = question(H100 | JOB | {"model": "config.json", "pin": ["tp=4,pp=1"]}, config_json=json.dumps(CONFIG))
    page = answer(asked)
    assert "--model config.json" in page["command"]
    assert page["ranking"]["model"]["name"] == "Mine-8B"
    assert page["ranking"]["best"]["id"].startswith("tp4-pp1")
    in_a_spec = question({"pin": ["tp=4,pp=1"]}, "s.yaml", s_yaml=SPEC.replace("Qwen/Qwen3-8B", "c.json"), c_json="{}")
    assert "c.json: hidden_size is missing" in answer(in_a_spec)["error"]["message"]


def test_a_dropped_train_yaml_is_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN, encoding="utf-8")
    options = ["--gpu", "h100", "--nodes", "4", "--pin", "tp=4", "--job"]
    expected = json.loads(run("rank", *options, str(tmp_path / "train.yaml"), "--json").stdout)
    page = answer(question(H100 | {"job": "train.yaml", "pin": ["tp=4"]}, train_yaml=TRAIN))
    assert page["ranking"]["plans"][:10] == expected["plans"]
    assert page["ranking"]["job"] == expected["job"]


def test_files_are_held_for_their_question_alone() -> None:
    questions, asked = Questions(None, SpecOptions()), H100 | {"job": "train.yaml", "pin": ["tp=4,pp=1"]}
    assert "error" not in reply(questions.answer, question(asked, train_yaml=TRAIN))
    assert reply(questions.answer, question(asked))["error"]["message"] == "train.yaml: no such file"


@pytest.mark.parametrize(
    ("name", "text", "use"),
    [
        ("cluster.yaml", SPEC, "spec"),
        ("cluster.yml", "# mine\nnodes: 4\n  broken: [", "spec"),
        ("cluster.json", '{"gpu": "h100", "model": {"name": "x"}}', "spec"),
        ("config.json", json.dumps(CONFIG), "model"),
        ("Config.JSON", '{"architectures": ["X"], "text_config": {"hidden_size": 1}}', "model"),
        ("config.json", "{broken", "model"),
        ("train.yaml", TRAIN, "job"),
        ("run.sh", "torchrun --nnodes 4 train.py --gpus 3", "job"),
        ("job.yaml", "job:\n  seq_len: 4096", "job"),
        ("ds_z3.json", '{"zero_optimization": {"stage": 3}}', ""),
        ("empty.yaml", "", "job"),
    ],
)
def test_what_a_file_is_for(name: str, text: str, use: str) -> None:
    assert use_of(name, text) == use
    assert Questions(None, SpecOptions()).dropped({"name": name, "text": text}) == {"use": use}


ALL = H100 | JOB
LARGE = "#" * 11_000_000


@pytest.mark.parametrize(
    ("options", "files", "field", "words"),
    [
        ({"gpu": "h10"}, {}, "gpu", "--gpu h10: GPU 'h10' is not known"),
        ({"nodes": "0"}, {}, "nodes", "--nodes 0: 0 is out of range"),
        ({"gpus_per_node": "many"}, {}, "gpus_per_node", "'many' is not a whole number"),
        ({"overrides": ["nvlink_bandwidth=900"]}, {}, "set.nvlink_bandwidth", "900 has no unit"),
        ({"overrides": ["ib_bandwidth=fast"]}, {}, "set.ib_bandwidth", "--set ib_bandwidth=fast"),
        ({"overrides": ["nics_per_node=-1"]}, {}, "set.nics_per_node", "out of range"),
        ({"overrides": ["job.precision=bf17"]}, {}, "set.precision", "'bf17' is not a choice"),
        ({"overrides": ["smaples=3"]}, {}, "overrides", "did you mean 'samples'?"),
        ({"overrides": ["samples"]}, {}, "overrides", "is not key=value"),
        ({"model": "Qwen/Qwn3-8B"}, {}, "model", "did you mean 'Qwen/Qwen3-8B'?"),
        ({"seq_len": "long"}, {}, "seq_len", "--seq-len long"),
        ({"batch": "-8"}, {}, "batch", "--batch -8"),
        ({"finetuning": "half"}, {}, "finetuning", "expected full, freeze, lora or qlora"),
        ({"job": "missing.yaml"}, {}, "job", "missing.yaml: no such file"),
        ({"pin": ["tp=x"]}, {}, "pin", "--pin tp=x"),
        ({"margin": "200%"}, {}, "margin", "--margin 200%"),
        ({"backend": "nccl"}, {}, "backend", "'nccl' is not a backend"),
        ({"trainer": "axolotl"}, {}, "trainer", "'axolotl' is not a trainer"),
        ({"gpu": ""}, {}, "", "expected a SPEC, or --gpu"),
        ({"model": ""}, {}, "model", "--model is missing"),
        ({"model": "c.json"}, {"c.json": "{"}, "model", "c.json:1: is not JSON"),
        ({"model": "c.json"}, {"c.json": LARGE}, "model", "c.json: is larger than 10 MB"),
        ({"model": "c.json"}, {"c.json": "\ud800"}, "model", "is not a text file"),
        ({"model": "c.json"}, {"c.json": "[" * 100_000}, "model", "nested too deep"),
        ({"job": "t.yaml"}, {"t.yaml": "a: ["}, "job", "t.yaml:2:1: is not valid YAML"),
        ({"job": "t.yaml"}, {"t.yaml": "cutoff: 3"}, "job", "is neither a job nor a trainer's file"),
        ({"job": "t.yaml"}, {"t.yaml": "seq_len: 4096\nsamples: some"}, "job", "t.yaml:2: job.samples"),
    ],
)
def test_a_mistake_stands_at_its_field(options: Any, files: Any, field: str, words: str) -> None:
    error = answer({"question": {"options": ALL | options, "spec": None, "files": files}})["error"]
    assert words in error["message"]
    assert error["field"] == field


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        (None, "", "not a question"),
        ([], "", "not a question"),
        ({"options": {"gpu": 3}}, "gpu", "not text"),
        ({"options": {"profile": "/etc/passwd"}}, "", "not a question"),
        ({"options": {"overrides": [1]}}, "overrides", "not text"),
        ({"options": {}, "spec": 7}, "spec", "not among its files"),
        ({"options": {}, "spec": "/etc/passwd"}, "spec", "not among its files"),
        ({"options": {}, "files": {"../x.yaml": ""}}, "", "not a file"),
        ({"options": {}, "files": {"x.yaml": 3}}, "", "not a file"),
        ({"options": {}, "spec": "s.yaml", "files": {"s.yaml": "a: [" * 10}}, "spec", "s.yaml:2:1: is not valid YAML"),
        ({"options": {}, "spec": "s.yaml", "files": {"s.yaml": SPEC.replace("1", "one")}}, "spec", "s.yaml:2: nodes"),
    ],
)
def test_rubbish_is_told(asked: Any, field: str, words: str) -> None:
    error = answer({"question": asked})["error"]
    assert words in error["message"]
    assert error["field"] in (field, "")


def test_a_defect_costs_one_answer_and_not_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(asked: Mapping[str, Any]) -> None:
        raise KeyError("tp")

    assert reply(broken, {})["error"] == {"message": "a defect of topoplan, KeyError: 'tp'", "field": ""}
    assert "Traceback" in capsys.readouterr().err


def test_a_stopped_search_answers_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    questions = Questions(FLAGSHIP[0], SpecOptions(), lambda done, total: told.append((done, total)))

    def stopped_half_way(spec: Spec, progress: Callable[[int, int], bool]) -> Ranking:
        def stops(done: int, total: int) -> bool:
            if done == total // 2:
                questions.stop({})
            return progress(done, total)

        return rank(spec, progress=stops)

    monkeypatch.setattr("topoplan.planner.search.rank", stopped_half_way)
    assert 0 < questions.answer(question({}))["ranking"]["searched"] < 1
    assert questions.progress({}) == {"done": 0, "total": 0}
    assert told[0][0] < told[-1][0] <= told[-1][1]


def test_the_question_without_spec_begins_with_an_example() -> None:
    assert Questions(None, SpecOptions()).first() is None
    assert Questions(None, SpecOptions(gpu="h100", model="Qwen/Qwen3-8B", seq_len="4k", batch="16")).first() is not None
