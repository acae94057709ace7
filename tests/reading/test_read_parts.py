"""Files, the kinds recognized in them, and graceful refusal of anything else."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bundle.samples import make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.errors import SpecError
from topoplan.reading.read_parts import file_parts, read_parts
from topoplan.reading.recognizer import keys_of
from topoplan.trainers.recognizers import recognizers

KEYS = keys_of(recognizers())

CASES = {
    "a.yaml": ("stage: sft\n", "yaml"),
    "a.yml": ("stage: sft\n", "yaml"),
    "a.json": ("{}", "json"),
    "a.sh": ("torchrun a.py\n", "shell"),
    "a.sbatch": ("#SBATCH -N 2\nsrun torchrun a.py\n", "shell"),
    "run": ("#!/usr/bin/env bash\necho\n", "shell"),
    "command": ("NNODES=2 \\\n  llamafactory-cli train a.yaml\n", "shell"),
    "command.txt": ("export A=1\n", "shell"),
    "keys.txt": ("# mine\nstage: sft\ntemplate: qwen3\n", "yaml"),
    "object.txt": ('{"zero_optimization": {}}', "json"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_is_told_by_suffix_and_content(name: str) -> None:
    text, kind = CASES[name]
    (part,) = file_parts(text, KEYS, name=name)
    assert (part.kind, part.text, part.lines) == (kind, text, ())


def test_a_document_is_cut_into_its_blocks() -> None:
    for name in ("a.md", "page.txt", "-"):
        (part,) = file_parts("Do:\n```bash\ntorchrun --nnodes 2 a.py\n```\n", KEYS, name=name)
        assert part.place(1) == f"{name}:3"


def test_a_file_on_one_line_gets_its_line_breaks_back() -> None:
    (part,) = file_parts("model_name_or_path: a stage: sft template: b\n", KEYS, name="a.yaml")
    assert part.unfolded
    assert part.lines == (1, 1, 1)


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as error:
        read_parts([str(path)], KEYS)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_configuration_is_refused_with_one_message(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    assert "no such file" in refusal(file)
    file.write_text(" \n\n")
    assert "is empty" in refusal(file)
    file.write_bytes(b"\x00\xff\x00")
    assert "is not a text file" in refusal(file)
    file.write_text("a: 1\n" * 300_000)
    assert "larger than 1 MB" in refusal(file)
    assert "a spec" not in refusal(file)
    page = tmp_path / "page.md"
    page.write_text("# Only prose\n\nabout training.\n")
    assert "holds no configuration" in refusal(page)


def test_a_directory_is_a_bundle_or_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    assert "no topoplan bundle; it holds ds.json" in refusal(tmp_path)
    spec, plan = make_spec_and_plan()
    bundle = tmp_path / "bundle"
    write_bundle(generate(spec, plan), bundle)
    found = [Path(part.name).name for part in read_parts([str(bundle)], KEYS)]
    assert found == ["train.yaml", "node-00.sh", "node-01.sh", "node-02.sh", "node-03.sh"]


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"torchrun --nnodes 2 a.py\n")))
    (part,) = read_parts(["-"], KEYS)
    assert (part.kind, part.place(1)) == ("shell", "standard input:1")
