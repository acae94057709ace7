"""What trainers' sources refuse beyond the tables: `tests/verify/refusals_of_sources.py`."""

from pathlib import Path

import pytest

from tests.verify.refusals_of_sources import main, refusals

SOURCE = """
class Arguments:
    def __post_init__(self):
        if self.val_size > 0:
            if self.streaming and other:
                raise ValueError("first")
            else:
                logger.warning_rank0("second")
        assert getattr(self, "bf16") is None, "third"
        raise ValueError("always")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "arguments.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_a_refusal_has_the_keys_of_the_innermost_condition_that_reads_any(source: Path) -> None:
    found = list(refusals(source, frozenset(["val_size", "streaming", "bf16"])))
    assert [(one.kind, set(one.keys), one.conditions[0]) for one in found] == [
        ("raise", {"streaming"}, "self.val_size > 0"),
        ("warning", {"streaming"}, "self.val_size > 0"),
        ("assert", {"bf16"}, "getattr(self, 'bf16') is None"),
    ]
    assert found[0].place == f"{source}:Arguments.__post_init__:6"


def test_a_refusal_is_told_when_no_row_names_its_keys(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(source), "--keys", str(source)])
    assert capsys.readouterr().out == ""
    source.write_text("if a_key_of_no_table:\n    raise ValueError('x')\n", encoding="utf-8")
    (keys := source.with_name("keys")).write_text("a_key_of_no_table", encoding="utf-8")
    main([str(source), "--keys", str(keys)])
    assert "a_key_of_no_table" in capsys.readouterr().out
