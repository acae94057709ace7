"""Setups read from several files."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topoplan.errors import SpecError, TopoplanError
from topoplan.reading.read_setup import read_setup
from topoplan.trainers.recognizers import recognizers


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_without_any_training_is_refused(here: Path) -> None:
    (here / "a.sh").write_text("echo hello\n")
    with pytest.raises(SpecError, match="starts no training"):
        read_setup(["a.sh"], recognizers())


def test_a_launch_is_followed_to_its_file_beside_the_script(here: Path) -> None:
    (here / "jobs").mkdir()
    (here / "jobs/a.yaml").write_text("model_name_or_path: a\nstage: sft\ndeepspeed: ds.json\n")
    (here / "jobs/ds.json").write_text('{\n\t"zero_optimization": {"stage": 3}\n}')
    (here / "jobs/run.sh").write_text('llamafactory-cli train "$(dirname "$0")/a.yaml" seed=1\n')
    setup = read_setup(["jobs/run.sh"], recognizers())
    (launch,) = setup.launches
    assert launch.file_configuration.part.name == "jobs/a.yaml"
    assert [(one.trainer, one.from_command) for one in setup.configurations] == [
        ("llamafactory", True),
        ("llamafactory", False),
        ("deepspeed", False),
    ]
    assert [Path(part.name).name for part in setup.parts] == ["run.sh", "a.yaml", "ds.json"]


def test_a_file_that_is_given_and_named_is_read_once(here: Path) -> None:
    (here / "a.yaml").write_text("model_name_or_path: a\nstage: sft\n")
    (here / "run.sh").write_text("llamafactory-cli train ./a.yaml\n")
    setup = read_setup(["run.sh", "a.yaml"], recognizers())
    assert len(setup.configurations) == 1
    assert setup.launches[0].file_configuration is setup.configurations[0]


def test_a_file_that_is_not_there_is_no_error(here: Path) -> None:
    (here / "run.sh").write_text("llamafactory-cli train /nowhere/a.yaml --deepspeed none.json\n")
    assert read_setup(["run.sh"], recognizers()).launches[0].file_configuration is None


def test_deepspeed_inside_a_configuration_keeps_its_lines(here: Path) -> None:
    (here / "a.yaml").write_text("model_name_or_path: a\nstage: sft\ndeepspeed:\n  zero_optimization:\n    stage: 2\n")
    inner = read_setup(["a.yaml"], recognizers()).configurations[1]
    assert inner.trainer == "deepspeed"
    assert inner.line("zero_optimization", "stage") == 5


def test_the_blocks_of_a_document_are_one_session_in_a_shell(here: Path) -> None:
    (here / "a.md").write_text("```bash\nexport USE_MCA=1\n```\n\n```bash\ntorchrun --nnodes 2 a.py\n```\n")
    (launch,) = read_setup(["a.md"], recognizers()).launches
    assert [(one.name, one.part.file_line(one.line)) for one in launch.variables] == [("USE_MCA", 2)]


def test_the_scripts_of_two_files_are_not(here: Path) -> None:
    (here / "a.sh").write_text("export USE_MCA=1\n")
    (here / "b.sh").write_text("torchrun a.py\n")
    assert read_setup(["a.sh", "b.sh"], recognizers()).launches[0].variables == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=200)
    | st.text(alphabet=st.sampled_from("`#{}[]:\"' \n$()=-*&torchrunswiftmodel.yaml"), max_size=200),
    st.sampled_from(["a", "a.md", "a.sh", "a.yaml", "a.json"]),
)
def test_arbitrary_text_is_read_or_refused_calmly(here: Path, text: str, name: str) -> None:
    (here / name).write_text(text, encoding="utf-8", errors="replace")
    try:
        setup = read_setup([name], recognizers())
    except TopoplanError:
        return
    for variable in setup.variables:
        assert variable.part.place(variable.line).startswith(name)
