"""The whole check on files, with rules and searches defined by the tests."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reading.setups import FULL_YAML, all_of, launch, swift_zero2
from tests.samples import no_search
from topoplan import trainers
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.errors import InputError, SpecError
from topoplan.lint import check as whole
from topoplan.lint.check import check, check_setup, fix
from topoplan.lint.job_file import job_of, trainer_file
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.planner.plan import Ranking
from topoplan.planner.predict import predict
from topoplan.planner.search import rank
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs import known
from topoplan.specs.load import load_cluster, load_spec
from topoplan.specs.profile import OwnProfile
from topoplan.specs.source import Source, parse_source
from topoplan.specs.spec import Spec
from topoplan.specs.written import cluster_keys
from topoplan.trainers.recognizers import recognizers


def two_rules(setup: Setup) -> Iterator[Finding]:
    """Two rules: one whose finding only a person can correct, and one with an edit."""
    for part in setup.parts:
        for number, line in enumerate(part.text.splitlines(), start=1):
            if line.startswith("sequence_parallel: false"):
                edit = Edit(first_line=number, last_line=number, text="sequence_parallel: true")
                yield Finding(rule="sp-off", severity="warning", part=part, line=number, what="is off", edits=(edit,))
            if line.startswith("dataset:"):
                yield Finding(rule="data", severity="error", part=part, line=number, what="is no data set")


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "rule_modules", lambda: (SimpleNamespace(findings=two_rules),))


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(FULL_YAML)
    return path


def against() -> PredictionTarget:
    """Four H100 machines."""
    return PredictionTarget(cluster=load_cluster("cluster_specs/h100-4x8.yaml"))


LISTED = whole.rule_modules


def test_every_module_of_rules_is_listed() -> None:
    paths = [*Path(whole.__file__).parent.glob("rules/*.py"), *Path(trainers.__path__[0]).glob("*/rules.py")]
    paths += [path.parent for path in Path(trainers.__path__[0]).glob("*/rules/__init__.py")]
    root = Path(trainers.__path__[0]).parent.parent
    modules = [importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts)) for path in paths]

    assert [one for one in modules if hasattr(one, "findings") and one not in LISTED()] == []


@pytest.mark.parametrize(("name", "fixable"), [("Makefile", False), ("run.sh", True)])
def test_the_recipes_of_a_makefile_are_left_to_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fixable: bool
) -> None:
    monkeypatch.setattr(whole, "rule_modules", LISTED)
    (tmp_path / name).write_text("a:\n\tNCCL_DEBUG=INFO torchrun --nproc_per_node 8 b.py\n")
    (finding,) = check([str(tmp_path / name)]).findings

    assert (finding.rule, bool(finding.edits)) == ("env-nccl-log", fixable)


def test_findings_are_sorted_by_severity_and_then_by_place(train: Path) -> None:
    checked = check([str(train)])

    assert [(one.rule, one.severity) for one in checked.findings] == [("data", "error"), ("sp-off", "warning")]
    assert (checked.count("error"), checked.count("warning"), checked.count("note")) == (1, 1, 0)
    assert checked.predictions == ()
    assert checked.not_understood == ()


def test_with_a_cluster_the_configuration_is_predicted(train: Path) -> None:
    checked = check([str(train)], against())

    assert [one.rule for one in checked.findings] == ["data", "plan-slower", "sp-off"]
    (prediction,) = checked.predictions
    assert prediction.best.tokens_per_s_per_gpu > prediction.plan.tokens_per_s_per_gpu


def test_two_layouts_of_one_job_are_searched_once_and_not_again_for_their_copies(tmp_path: Path) -> None:
    searched: list[Spec] = []

    def search(spec: Spec) -> Ranking:
        searched.append(spec)
        return rank(spec)

    # The same global batch, and so the same job; the third has another.
    for name, tp, steps in (("a", 4, 8), ("b", 8, 16), ("c", 4, 16)):
        text = FULL_YAML.replace("parallel_size: 4 ", f"parallel_size: {tp} ")
        text = text.replace("accumulation_steps: 8", f"accumulation_steps: {steps}")
        (tmp_path / f"{name}.yaml").write_text(text)
    held = PredictionTarget(cluster=against().cluster, search=search)
    checked = check([str(tmp_path / f"{name}.yaml") for name in "abc"], held)

    asked = [(spec.job.global_batch_size, spec.job.pin["backend"]) for spec in searched]
    assert asked == [(batch, name) for batch in (64, 128) for name in ("mca", "ddp", "deepspeed", "fsdp2")]
    assert len(checked.predictions) == 3
    fixed = fix(checked, held)
    assert len(fixed.copies) == 3
    assert len(searched) == len(asked)


def test_a_rule_on_the_keys_stands_for_the_layout_rule_at_the_same_place(
    train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsearched = replace(against(), search=no_search)
    train.write_text(FULL_YAML.replace("parallel_size: 4 ", "parallel_size: 3 "))
    assert "layout-world-size" in [one.rule for one in check([str(train)], unsearched).findings]

    def tells(setup: Setup) -> Iterator[Finding]:
        (part,) = setup.parts
        line = next(n for n, text in enumerate(part.text.splitlines(), start=1) if text.startswith("tensor_"))
        yield Finding(rule="mca-tp", severity="error", part=part, line=line, what="3 divides nothing")

    monkeypatch.setattr(whole, "rule_modules", lambda: (SimpleNamespace(findings=tells),))
    assert [one.rule for one in check([str(train)], unsearched).findings if one.severity == "error"] == ["mca-tp"]


def test_what_large_cards_cannot_hold_needs_no_cluster_to_be_told() -> None:
    _, where = swift_zero2()
    checked = check_setup(where, PredictionTarget())

    (finding,) = checked.findings
    assert (finding.rule, finding.severity) == ("plan-does-not-fit", "warning")
    assert "on 5 GPUs of 1 x 5 a100-sxm-80gb" in finding.why
    assert checked.predictions == ()
    assert finding.why.endswith("no cluster was given: these are cards of 80 GB")
    _, small = swift_zero2(model="Qwen/Qwen3-0.6B")
    assert check_setup(small, PredictionTarget()).findings == ()
    # Only the activations make it too large, which larger cards can hold.
    _, long = swift_zero2(model="Qwen/Qwen3-8B", max_length=65536)
    assert check_setup(long, PredictionTarget()).findings == ()
    assert check_setup(replace(where, bundles=(Path("bundle"),)), PredictionTarget()).findings == ()


def test_what_is_offloaded_needs_no_cluster_to_be_told_either() -> None:
    _, where = swift_zero2(deepspeed="zero3_offload")
    (finding,) = check_setup(where, PredictionTarget()).findings

    assert (finding.rule, finding.severity) == ("layout-host-memory", "note")
    assert "of host memory on each node of 5 GPUs" in finding.what


def test_a_key_that_every_command_says_otherwise_is_not_judged_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "rule_modules", LISTED)
    (tmp_path / "train.yaml").write_text("stage: sft\nfinetuning_type: lora\ntemplate: qwen3\n")
    command = "USE_MCA=1 llamafactory-cli train train.yaml"
    one, other = tmp_path / "one.sh", tmp_path / "other.sh"
    one.write_text(f"{command} finetuning_type=full\n")
    other.write_text(f"{command}\n")

    def judged(*scripts: Path) -> list[int | None]:
        found = check([str(path) for path in scripts]).findings
        return [finding.line for finding in found if finding.rule == "mca-trains-everything"]

    assert judged(one) == []
    assert judged(other) == [2]
    assert judged(one, other) == [2]


def test_a_part_without_keys_of_a_trainer_is_named() -> None:
    stray = Part(kind="json", name="x.json", text="{}")
    checked = check_setup(Setup(parts=(stray,)), PredictionTarget())

    assert checked.not_understood == (stray,)


def test_a_correction_is_checked_again_with_its_prediction(train: Path) -> None:
    checked = check([str(train)], against())
    fixed = fix(checked, against())

    (copy,) = fixed.copies
    assert copy.path == train.with_name("train.fixed.yaml")
    assert "sequence_parallel: true\n" in copy.text
    assert copy.text.count("\n") == FULL_YAML.count("\n") + 1  # comments and order are kept, and a mark is added
    assert [one.rule for correction in copy.corrections for one in correction.findings] == ["sp-off"]
    before, after = checked.predictions[0].plan, fixed.after.predictions[0].plan
    assert (before.layout.sequence_parallel, after.layout.sequence_parallel) == (False, True)
    assert "sp-off" not in [one.rule for one in fixed.after.findings]
    assert "data" in [one.rule for one in fixed.after.findings]


def test_without_edits_there_is_nothing_to_write(train: Path) -> None:
    train.write_text(FULL_YAML.replace("sequence_parallel: false", "sequence_parallel: true"))
    checked = check([str(train)])

    assert fix(checked, PredictionTarget()).copies == ()


def test_a_profile_of_another_card_is_refused(train: Path) -> None:
    profile = OwnProfile(gpu="a100-sxm-80gb", constants={}, source="", path="own.yaml")
    with pytest.raises(InputError, match=r"own.yaml: the profile is of a100-sxm-80gb"):
        check([str(train)], PredictionTarget(cluster=against().cluster, profile=profile))


def test_an_empty_setup_is_calm() -> None:
    assert check_setup(all_of(), PredictionTarget()).findings == ()


def test_what_can_be_run_of_a_document_becomes_a_file() -> None:
    name = "article.md"
    piece = Part(kind="yaml", name=name, text="tensor_model_parallel_size: 2\n", label="yaml block 1")
    job = Part(kind="yaml", name=name, text=FULL_YAML, label="yaml block 2")
    variables = Part(kind="shell", name=name, text="export USE_MCA=1\n", label="bash block 1")
    command = replace(launch().part, name=name, label="bash block 2")
    found = Setup(
        parts=(piece, job, variables, command),
        configurations=tuple(
            Configuration(trainer="llamafactory", part=one, source=parse_source(one.text, name=name))
            for one in (piece, job)
        ),
        launches=(replace(launch(), part=command),),
        recognizers=recognizers(),
    )

    assert list(whole._files(found)) == [(job,), (variables, command)]
    assert list(whole._files(replace(found, configurations=found.configurations[:1], launches=()))) == [
        *((one,) for one in (piece, job, variables, command))
    ]


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "ddp"])
@pytest.mark.parametrize("trainer", ["llamafactory", "swift"])
def test_a_bundle_is_predicted_as_the_plan_that_it_was_written_for(tmp_path: Path, backend: str, trainer: str) -> None:
    spec = load_spec("cluster_specs/a100-1x8.yaml", model="Qwen/Qwen3-0.6B", pins={"backend": backend})
    spec = replace(spec, trainer=trainer)
    ranking = rank(spec)
    plan = ranking.plans[0]
    write_bundle(generate(spec, plan, trainer=trainer), tmp_path / "bundle")
    against = PredictionTarget(cluster=spec.cluster, search=lambda spec: ranking)
    (prediction,) = check([str(tmp_path / "bundle")], against).predictions
    assert prediction.plan.id == plan.id
    assert prediction.plan.memory.device_bytes == plan.memory.device_bytes
    assert prediction.plan.time.step_s == plan.time.step_s


def test_a_bundle_of_trinity_is_predicted_as_it_was_planned(tmp_path: Path) -> None:
    spec = replace(load_spec("cluster_specs/a100-1x8.yaml", model="Qwen/Qwen3-0.6B"), trainer="trinity")
    plan = rank(spec).plans[0]
    write_bundle(generate(spec, plan, trainer="trinity"), tmp_path / "bundle")
    (prediction,) = check([str(tmp_path / "bundle")], PredictionTarget(cluster=spec.cluster)).predictions
    assert prediction.plan.memory.device_bytes == pytest.approx(plan.memory.device_bytes, rel=0.02)
    assert prediction.plan.time.step_s == pytest.approx(plan.time.step_s, rel=0.02)


def test_a_bundle_is_predicted_for_the_lengths_that_it_was_planned_for(tmp_path: Path) -> None:
    overrides = ["lengths=[[500, 50000], [3000, 1000]]", "finetuning=lora"]
    spec = load_spec("cluster_specs/a100-1x8.yaml", model="Qwen/Qwen3-0.6B", overrides=overrides)
    plan = rank(spec).plans[0]
    write_bundle(generate(spec, plan), tmp_path / "bundle")
    against = PredictionTarget(cluster=spec.cluster)
    checked = check([str(tmp_path / "bundle")], against)
    (prediction,) = checked.predictions
    assert (prediction.plan.id, prediction.plan.time.step_s) == (plan.id, plan.time.step_s)
    of_lengths = [one for one in prediction.translation.assumptions if "samples" in one or "sequence" in one]
    assert of_lengths == ["samples are as long as those that the bundle was planned for"]
    assert "plan-slower" not in [one.rule for one in checked.findings]
    (alone,) = check(
        [str(tmp_path / "bundle" / "train.yaml"), str(tmp_path / "bundle" / "node-00.sh")], against
    ).predictions
    assert alone.plan.time.step_s > 2 * plan.time.step_s


ON_DATA = """\
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
do_train: true
finetuning_type: full
dataset: mine
template: qwen3_nothink
cutoff_len: 4096
bf16: true
pipeline_model_parallel_size: 2
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
"""


@pytest.mark.parametrize("further", ["", "variable_seq_lengths: true\n"])
def test_the_data_set_of_a_file_is_measured_as_for_its_job(
    further: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data_set(Path("data"))
    Path("t.yaml").write_text(ON_DATA + further)
    cluster = known.machines(known.gpu("h100"), 1, 8, "here")

    (prediction,) = check(["t.yaml"], PredictionTarget(cluster=cluster)).predictions

    file = trainer_file("t.yaml")
    where = Source(name="cluster", data=cluster_keys(cluster))
    spec = replace(load_spec(where, job=job_of(file, cluster).source), trainer="llamafactory", backends=("mca",))
    of_job = predict(spec, prediction.translation.layout)
    assert prediction.plan.time.step_s == of_job.time.step_s
    assert prediction.best_of_backend.id == rank(spec, best_only=True).plans[0].id
    (told,) = [one for one in prediction.translation.assumptions if "tokens" in one]
    assert told.startswith("lengths: 300 samples of d.jsonl, mean 7")


def test_a_data_set_that_is_not_here_is_said_to_be_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(ON_DATA)
    cluster = known.machines(known.gpu("h100"), 1, 8, "here")
    assumed = "every sequence is assumed to be cutoff_len long, 4,096 tokens"
    write_data_set(Path("data"))
    for text, why in (("{}", "has no data set 'mine'"), ("{", "data/dataset_info.json")):
        Path("data/dataset_info.json").write_text(text)
        (prediction,) = check(["t.yaml"], PredictionTarget(cluster=cluster)).predictions
        (told,) = [one for one in prediction.translation.assumptions if "tokens" in one]
        assert told.startswith(f"{assumed}: ")
        assert why in told


def write_data_set(directory: Path) -> None:
    directory.mkdir()
    (directory / "dataset_info.json").write_text('{"mine": {"file_name": "d.jsonl"}}')
    records = ({"instruction": "q", "output": "word " * (50 + i * 37 % 1150)} for i in range(300))
    (directory / "d.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_what_cannot_be_read_is_a_finding_beside_what_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "rule_modules", LISTED)
    texts = {"a.yaml": FULL_YAML, "b.yaml": "a: [1\nb: 2\n", "c.yaml": "services: {web: 1}\n", "d.yaml": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in (*texts, "e.yaml")]
    told = [one for one in check(names).findings if one.rule == "file-unreadable"]
    assert {(Path(one.part.name).name, one.severity, one.line) for one in told} == {
        ("b.yaml", "error", 2),
        ("c.yaml", "warning", None),
        ("d.yaml", "error", None),
        ("e.yaml", "error", None),
    }
    with pytest.raises(SpecError, match="not valid YAML"):
        check(names[1:2])


def test_a_directory_is_read_without_what_is_about_something_else(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("torchrun --nproc_per_node 8 -m llamafactory.launcher job.yaml\n")
    (tmp_path / "job.yaml").write_text(FULL_YAML)
    (tmp_path / "compose.yaml").write_text("services: {web: {image: nginx}}\n")
    (tmp_path / "README.md").write_text("# Nothing of ours\n")
    setup = check([str(tmp_path)]).setup

    assert [Path(part.name).name for part in setup.parts] == ["job.yaml", "train.sh"]
    assert setup.launches[0].file_configuration is setup.configurations[0]


BROKEN = '{\n  "zero_optimization": {\n    "stage": 2,\n  }\n}\n'


def test_a_file_that_another_names_and_that_cannot_be_read_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "rule_modules", LISTED)
    (tmp_path / "job.yaml").write_text(f"{FULL_YAML}\ndeepspeed: ds.json\nnonsense: 1\n")
    (tmp_path / "run.sh").write_text("deepspeed --hostfile hosts -m llamafactory.launcher job.yaml\n")
    (tmp_path / "ds.json").write_text(BROKEN)
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    for names in (["job.yaml", "run.sh"], ["job.yaml", "run.sh", "ds.json"]):
        found = check([str(tmp_path / name) for name in names]).findings
        unread = {(Path(one.part.name).name, one.line) for one in found if one.rule == "file-unreadable"}
        assert unread == {("ds.json", 3), ("hosts", None)}
        assert "llamafactory-unknown-key" in {one.rule for one in found}
    (tmp_path / "job.yaml").write_text("a: [1\n")
    alone = check([str(tmp_path / "run.sh")]).findings
    assert {"file-unreadable"} <= {one.rule for one in alone}
    assert "launch-file-not-found" not in {one.rule for one in alone}


def test_a_file_of_a_directory_that_should_be_readable_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "rule_modules", LISTED)
    (tmp_path / "job.yaml").write_text(FULL_YAML)
    (tmp_path / "a.yaml").write_bytes(b"model_name_or_path: \xff\xfe\n")
    (tmp_path / "ds.json").write_text(BROKEN)
    (tmp_path / "samples.json").write_text('{"instruction": "a"}\n{"instruction": "b"}\n')
    found = check([str(tmp_path)]).findings
    assert {Path(one.part.name).name for one in found if one.rule == "file-unreadable"} == {"a.yaml", "ds.json"}
