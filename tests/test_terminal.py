from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import HostError
from topoplan.terminal import plain, plain_lines, plain_values


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b2Jred", "red"),
        ("\x1b]52;c;ZXZpbA==\x07clipboard", "clipboard"),
        ("\x1b]8;;http://x\x1b\\link\x9d8;;\x9c", "link"),
        ("\x1bP+q544e\x1b\\\x1b_Gi=1;AA\x1b\\string", "string"),
        ("\x1b]0;no end", "0;no end"),
        ("\x1b\x1b[0m[2J", "\\x1b[2J"),
        ("over\rwritten\b\b", "over\\rwritten\\x08\\x08"),
        ("a\nb\x85c\u2028d", "a\\nb\\x85c\\u2028d"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("à l'été 训练 \N{GRINNING FACE}", "à l'été 训练 \N{GRINNING FACE}"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b\x9b[]\x07\\;m2JP_c"), max_size=60))
def test_any_text_can_be_printed_afterwards(text: str) -> None:
    assert plain(text).isprintable()
    assert plain(plain(text)) == plain(text)


def test_values_keep_their_form() -> None:
    @dataclass(frozen=True)
    class Facts:
        name: str
        parts: tuple[str, ...]

    facts = {"a\x07": [Facts(name="\x1b[1mb", parts=("\r", "c")), 3, None, frozenset({"\x00"})]}
    assert plain_values(facts) == {"a\\x07": [Facts(name="b", parts=("\\r", "c")), 3, None, frozenset({"\\x00"})]}


def test_the_error_of_a_host_is_one_line_of_plain_text() -> None:
    error = HostError("it said \x1b]0;x\x07\rall is well", host="node0\n", problem="command", remedy="look\x07")
    assert str(error) == "node0\\n: it said \\rall is well; look\\x07"
    assert (error.what, error.remedy) == ("it said \\rall is well", "look\\x07")


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\n\x1b\x9b[]\x07\\;m2JP_c\t"), max_size=60))
def test_many_lines_are_as_each_of_them(text: str) -> None:
    assert plain_lines(text).split("\n") == [plain(line) for line in text.split("\n")]
