"""Words and operators of shell text, with their lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topoplan.reading.shell_words import split


def words(text: str) -> list[str]:
    return ["".join(piece.text for piece in token.pieces) for token in split(text).tokens if not token.operator]


def test_quotes_and_escapes_are_taken_off() -> None:
    assert words(r"""a 'b c' "d e" f\ g $'h\ti' "j\"k" """) == ["a", "b c", "d e", "f g", "h\ti", 'j"k']


def test_a_comment_begins_at_the_start_of_a_word_only() -> None:
    assert words("a#b # it's a comment\nc") == ["a#b", "c"]


def test_command_substitutions_stay_one_word_with_quotes_and_brackets_inside() -> None:
    assert words('x $(which "a)b" | (cat)) `date +%s` ${A:-$(b c)}') == [
        "x",
        '$(which "a)b" | (cat))',
        "`date +%s`",
        "${A:-$(b c)}",
    ]


def test_here_documents_are_skipped() -> None:
    assert words("cat <<EOF > f\nit's ( {\nEOF\nnext <<-'X'\n\tY\n\tX\nlast") == ["cat", "f", "next", "last"]


def test_a_shift_in_arithmetic_is_no_here_document() -> None:
    assert words("((n = 1 << 2))\nnext") == ["next"]


def test_the_number_in_front_of_a_redirection_belongs_to_it() -> None:
    assert words("run 2>&1 >log") == ["run", "1", "log"]


def test_a_continued_line_goes_on_with_the_line_of_each_word() -> None:
    tokens = [token for token in split("a \\\n  b \\\r\n  c").tokens if token.pieces]
    assert [token.line for token in tokens] == [1, 2, 3]


def test_what_is_never_closed_is_noted_with_its_line() -> None:
    assert split("a\nb 'c").unclosed == ("'", 2)
    assert split('a "b').unclosed == ('"', 1)
    assert split("a $(b").unclosed == ("(", 1)
    assert split("a 'b'").unclosed is None


def test_nesting_a_hundred_thousand_deep_is_read() -> None:
    for opening in ("(", "$(", '"$(', "${", "`", "((", "[["):
        split(opening * 100_000)


@given(st.text(alphabet=st.sampled_from("ab $(){}[]<>|&;'\"`\\\n\t#=-"), max_size=200))
def test_any_text_is_read(text: str) -> None:
    lines = text.count("\n") + 1
    assert all(1 <= token.line <= lines for token in split(text).tokens)
