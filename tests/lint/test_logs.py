"""Logs among the files of `check`: runs that went out of memory."""

import gzip
from pathlib import Path

import pytest

from tests.page.asked import ROOT, run
from topoplan.errors import SpecError
from topoplan.lint.check import check
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.specs.load import load_cluster

BUNDLE, SPEC = str(ROOT / "generated" / "h100-4x8"), str(ROOT / "cluster_specs" / "h100-4x8.yaml")
MESSAGE = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of"
    " 79.19 GiB of which 1.06 GiB is free. Including non-PyTorch memory, this process has 78.12 GiB memory in use. Of"
    " the allocated memory 75.10 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "train.log"
    path.write_text(f'Traceback\n  File "model.py", line 10, in forward\n{MESSAGE}\n', encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("beside", [[BUNDLE], [f"{BUNDLE}/train.yaml"]], ids=["bundle", "configuration"])
def test_out_of_memory_is_told_beside_what_was_predicted(log: str, beside: list[str]) -> None:
    against = PredictionTarget() if beside == [BUNDLE] else PredictionTarget(cluster=load_cluster(SPEC))
    [found] = [one for one in check([*beside, log], against).findings if one.rule == "log-out-of-memory"]
    assert (found.severity, found.place) == ("error", f"{log}:3")
    assert found.what.startswith("out of memory on GPU 3 of rank 3, in forward and before the first step was told: 2.0")
    assert "and 59.3 GiB are predicted of tp2-pp1-dp16-mbs2-nosp: 30% more, outside of the band of 5%" in found.why
    assert found.remedy.startswith("with that learnt, ")


def test_a_log_alone_is_told_without_a_prediction(log: str) -> None:
    ran = run("check", log)
    assert ran.exit_code == 1
    assert "also pass what ran" in ran.stdout
    assert ran.stdout.endswith("1 error.\n")


def test_of_two_plans_none_is_blamed(log: str, tmp_path: Path) -> None:
    files = [f"{BUNDLE}/train.yaml", str(tmp_path / "again.yaml")]
    text = Path(files[0]).read_text(encoding="utf-8")
    Path(files[1]).write_text(
        text.replace("device_train_batch_size: 2", "device_train_batch_size: 1"), encoding="utf-8"
    )
    against = PredictionTarget(cluster=load_cluster(SPEC))
    [found] = [one for one in check([*files, log], against).findings if one.part.name == log]
    assert found.remedy.endswith("2 plans are given")


def test_a_log_that_ended_well_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("Loading weights\n", encoding="utf-8")
    ran = run("check", str(path))
    assert (ran.exit_code, ran.stdout) == (0, "No findings in 1 file.\n")


def test_a_trainer_s_log_is_named_with_the_verb_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "trainer_log.jsonl"
    path.write_text(
        '{"current_steps": 10, "total_steps": 20, "loss": 1.5, "elapsed_time": "0:00:20"}\n', encoding="utf-8"
    )
    [found] = [one for one in check([BUNDLE, str(path)]).findings if one.part.name == str(path)]
    assert (found.rule, found.severity) == ("log-of-a-run", "note")
    assert "up to step 10" in found.what
    assert f"`topoplan calibrate {path} --spec BUNDLE`" in found.remedy


DATA = '{"instruction": "a", "output": "the loss at step 10/20"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DATA * 2, "is a data set, in which nothing is checked; `topoplan rank SPEC --set dataset="),
        ('{"messages": [{"role": "user", "content": "a"}]}', "is a data set, in which nothing is checked"),
        ('{"id": 1}\n{"id": 2}\n', "holds records, and no step of a run; give the log of a trainer"),
    ],
)
def test_records_that_are_no_log_are_refused_alone_and_left_alone_beside_others(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        check([str(path)])
    assert f"{path}: {message}" in str(error.value)
    found = check([BUNDLE, str(path)])
    assert found.setup.logs == ()
    assert [one for one in found.findings if one.part.name == str(path)] == []


def test_a_log_that_begins_or_ends_with_records_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    step = '{"current_steps": 10, "total_steps": 20, "loss": 1.5, "elapsed_time": "0:00:20"}\n'
    for text in (f'{step}{{"train_runtime": 20.5}}\n', 'Loading weights\n{"id": 1}\n', ""):
        path.write_text(text, encoding="utf-8")
        assert [part.text for part in check([str(path)]).setup.logs] == [text]


def test_a_log_that_cannot_be_read_is_told_beside_the_others(log: str, tmp_path: Path) -> None:
    packed = tmp_path / "packed.log"
    packed.write_bytes(gzip.compress(b"step 1"))
    told = {one.rule: one for one in check([str(packed), log], PredictionTarget()).findings}
    assert told["file-unreadable"].remedy.startswith("unpack it first: gunzip --keep ")
    assert "log-out-of-memory" in told
