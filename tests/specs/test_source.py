import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import SpecError
from topoplan.specs.load import load_spec
from topoplan.specs.source import MAX_FILE_BYTES, MAX_SPEC_BYTES, parse_source, parse_value, read_source, read_text


def _refused(text: str) -> str:
    with pytest.raises(SpecError) as error:
        parse_source(text, name="spec.yaml")
    return str(error.value)


def test_every_key_and_item_keeps_its_line() -> None:
    source = parse_source("a: 1\nb:\n  c:\n  - x\n  - {d: 2,\n     e: 3}\n", name="spec.yaml")
    assert source.data == {"a": 1, "b": {"c": ["x", {"d": 2, "e": 3}]}}
    assert source.place(("a",)) == "spec.yaml:1"
    assert source.place(("b", "c")) == "spec.yaml:3"
    assert source.place(("b", "c", 1)) == "spec.yaml:5"
    assert source.place(("b", "c", 1, "e")) == "spec.yaml:6"
    assert source.place(("b", "c", 0, "absent")) == "spec.yaml:4"
    assert source.place(()) == "spec.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("2e-5", 2e-5),
        ("1.0e-4", 1e-4),
        ("100_000", 100_000),
        ("-3", -3),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ('"true"', "true"),
        ("400Gb/s", "400Gb/s"),
        (".inf", float("inf")),
        ("[1, a]", [1, "a"]),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_plain_values_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse_value(text, name="--set") == value


def test_the_lines_of_an_options_text_are_not_joined() -> None:
    assert parse_value("a\nb", name="--set") == "a\nb"
    assert parse_value("[a,\n b]\n", name="--set") == ["a", "b"]
    with pytest.raises(SpecError, match=r"--set 'env.NAME=a\\nb': 'a\\nb' is not usable; expected text on one line"):
        load_spec(parse_source("gpu: h100\n", name="spec"), overrides=["env.NAME=a\nb"])


def test_a_bare_no_is_remembered_and_a_quoted_one_is_not() -> None:
    source = parse_source("a: no\nb: 'no'\nc: {d: Yes}\n", name="spec.yaml")
    assert source.old_booleans == {("a",), ("c", "d")}


def test_json_is_read_too() -> None:
    assert parse_source('{"a": [1, 2.5, "x", true, null]}', name="x.json").data == {"a": [1, 2.5, "x", True, None]}


def test_aliases_are_followed() -> None:
    assert parse_source("a: &x {b: 1}\nc: *x\n", name="spec.yaml").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_merge_keys_bring_their_keys_as_in_yaml_1_1() -> None:
    text = "base: &base {a: 1, b: 2}\nother: &other {b: 3, c: 4}\nall:\n  b: 9\n  <<: [*base, *other]\n  d: 5\n"
    source = parse_source(text, name="spec.yaml")
    assert source.data["all"] == {"a": 1, "b": 9, "c": 4, "d": 5}
    assert (source.lines["all", "a"], source.lines["all", "b"]) == (5, 4)
    assert parse_source('"<<": 1\n', name="spec.yaml").data == {"<<": 1}
    assert _refused("a: 1\n<<: 2\n").startswith("spec.yaml:2: `<<` merges something else than blocks")


def test_a_full_width_colon_is_named() -> None:
    assert "line 1 has a full-width colon" in _refused("name\N{FULLWIDTH COLON} a\nnodes: 4\n")
    assert "full-width" not in _refused("# name\N{FULLWIDTH COLON} a\na: b: c\n")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: b: c\n", "spec.yaml:1:5"),
        ("a: 1\nb: [1, 2\n", "spec.yaml:3:1"),
        ("a:\n\t- b\n", "spec.yaml:2:1"),
        ("a: 1\nb: 'x\n", "spec.yaml:3:1"),
        ("a: 1\n b: 2\n", "spec.yaml:2:3"),
        ("a: @x\n", "spec.yaml:1:4"),
    ],
)
def test_broken_yaml_names_line_and_column(text: str, where: str) -> None:
    assert _refused(text).startswith(f"{where}: is not valid YAML: ")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("a: &x [*x]\n", "alias *x names no finished anchor"),
        ("a: \x07\n", "is not valid YAML"),
        ("x: " + "[" * 200_000, "nested more than"),
        ("{a: " * 5000, "nested more than"),
    ],
)
def test_what_is_no_mapping_is_one_spec_error(text: str, what: str) -> None:
    message = _refused(text)
    assert what in message
    assert "\n" not in message


class TestReadingFiles:
    def refused(self, path: Path | str) -> str:
        with pytest.raises(SpecError) as error:
            read_source(Path(path))
        return str(error.value)

    def test_a_file_in_no_directory_is_missing(self, tmp_path: Path) -> None:
        assert "no such file" in self.refused(tmp_path / "absent" / "a.yaml")

    def test_a_file_below_a_file_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("a: 1\n")
        assert "cannot be read" in self.refused(tmp_path / "a.yaml" / "b.yaml")

    def test_a_directory_says_what_it_holds(self, tmp_path: Path) -> None:
        (tmp_path / "one.yaml").write_text("a: 1\n")
        assert self.refused(tmp_path) == f"{tmp_path}: is a directory, not a file; it holds one.yaml"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_an_unreadable_file_says_why(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("a: 1\n")
        path.chmod(0)
        assert "cannot be read: Permission denied" in self.refused(path)

    @pytest.mark.parametrize(
        "content", [b"\x00\x01\x02", b"\x7fELF\x02\x01\x00", b"\xff\xfea\x00", "é: 1".encode("latin-1")]
    )
    def test_a_file_that_is_not_utf_8_text_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "a.yaml"
        path.write_bytes(content)
        assert "is not a text file in UTF-8" in self.refused(path)

    def test_a_huge_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_bytes(b"# " + b"x" * MAX_SPEC_BYTES)
        assert "is larger than 10 MB" in self.refused(path)

    def test_another_limit_comes_with_another_remedy(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b"x" * MAX_FILE_BYTES * 2)
        assert len(read_text(path, most_bytes=2 * MAX_FILE_BYTES)) == 2 * MAX_FILE_BYTES
        with pytest.raises(SpecError, match=r"is larger than 1 MB; give another$"):
            read_text(path, most_bytes=MAX_FILE_BYTES, wanted="give another")

    def test_an_endless_device_is_refused(self) -> None:
        assert "/dev/zero" in self.refused("/dev/zero")

    def test_a_path_that_no_system_has_is_refused_on_one_line(self) -> None:
        assert "cannot be read" in self.refused("a\0b\nc.yaml")
        assert "\n" not in self.refused("a\0b\nc.yaml")

    def test_a_byte_order_mark_and_dos_line_ends_do_no_harm(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
        assert read_source(path).data == {"a": 1, "b": 2}


@given(st.one_of(st.text(), st.text(alphabet="abc:-[]{}&*!|>'\"%@`#?, \n\t~0.<")))
def test_no_text_gives_anything_but_a_mapping_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        assert all(isinstance(key, str) for key in parse_source(text, name="spec.yaml").data)
