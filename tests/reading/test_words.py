"""Words of a command with their lines."""

from topoplan.reading.words import Word, is_open, join


def test_joined_words_keep_the_line_of_each() -> None:
    joined = join([Word(text="torchrun", line=3), Word(text="a.py", line=5)])

    assert joined.text == "torchrun a.py"
    assert joined.line == 3
    assert joined.lines == (3,) * 8 + (5,) * 5


def test_what_the_shell_puts_in_place_is_open() -> None:
    assert is_open("$HOME/a")
    assert is_open("`hostname`")
    assert not is_open("a.py")
