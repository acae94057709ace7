"""Configurations that a script writes as here-documents."""

from pathlib import Path

import pytest

from topoplan.lint.check import check, fix
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.reading.here_documents import here_documents
from topoplan.reading.parts import Part
from topoplan.reading.read_setup import read_setup
from topoplan.trainers.recognizers import recognizers

SCRIPT = """\
#!/bin/bash
cat > cfg/train.yaml <<'EOF'
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
dataset: mine
template: qwen3
output_dir: out
deepspeed: cfg/ds.json
evaluation_strategy: "no"
bf16: true
EOF
cat <<-EOF | sudo tee cfg/ds.json >/dev/null
\t{"zero_optimization": {"stage": 2}}
\tEOF
FORCE_TORCHRUN=1 llamafactory-cli train cfg/train.yaml
"""


def parts_of(text: str) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(one.file, one.text, one.lines) for one in here_documents(Part(kind="shell", name="run.sh", text=text))]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    return "run.sh"


def test_files_that_a_script_writes_are_read_with_their_lines_in_it() -> None:
    (train, deepspeed) = parts_of(SCRIPT)

    assert train[0] == "cfg/train.yaml"
    assert train[2] == tuple(range(3, 12))
    assert deepspeed == ("cfg/ds.json", '{"zero_optimization": {"stage": 2}}\n', (14,))


@pytest.mark.parametrize(
    "text",
    [
        "cat > a.yaml <<EOF\nstage: $STAGE\nEOF\n",
        "cat > a.txt <<EOF\nstage: sft\nEOF\n",
        "cat > a.yaml <<EOF\nstage: sft\n",
        "cat > a.yaml <<EOF\nEOF\n",
        "python - <<EOF\nopen('a.yaml')\nEOF\n",
    ],
)
def test_what_the_shell_fills_in_or_is_no_configuration_is_left_alone(text: str) -> None:
    assert parts_of(text) == []


def test_what_the_shell_would_fill_in_stands_in_quotes() -> None:
    assert parts_of("cat > a.yaml <<'EOF'\nstage: $STAGE\nEOF\n") == [("a.yaml", "stage: $STAGE\n", (2,))]


def test_the_command_reads_the_file_that_its_script_writes(script: str) -> None:
    setup = read_setup([script], recognizers())
    (launch,) = setup.launches

    assert launch.file_configuration is not None
    assert [one.trainer for one in setup.configurations] == ["llamafactory", "deepspeed"]


def test_mistakes_in_it_are_told_at_their_line_and_not_corrected_without_the_script(script: str) -> None:
    checked = check([script])
    (finding,) = [one for one in checked.findings if one.severity == "error"]

    assert finding.rule == "llamafactory-renamed-key"
    assert finding.part.place(finding.line) == "run.sh:10"
    assert fix(checked, PredictionTarget()).copies == ()


def test_what_a_script_writes_for_others_may_be_anything(script: str) -> None:
    Path(script).write_text("cat > k.yaml <<E\na: [\nE\ncat > l.yaml <<E\nkind: Pod\nE\n" + SCRIPT)

    assert len(read_setup([script], recognizers()).configurations) == 2
