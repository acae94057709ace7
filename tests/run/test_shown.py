import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.run.shown import KEEP_LINES, LONGEST_BYTES, MOST_BYTES, Lines, ShownLines, Tail, shown_line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain text", "plain text"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"\x1b]0;a title\x07prompt", "prompt"),
        (b"\x1b]8;;http://x\x1b\\link", "link"),
        (b"a\tb", "a       b"),
        (b"bell \x07 and \x00", "bell \\x07 and \\x00"),
        (b"no text \xff\xfe", "no text \\xff\\xfe"),
        ("à l'été 训练".encode(), "à l'été 训练"),
        ("\u202eabc".encode(), "\\u202eabc"),
        (b"with a Windows end\r", "with a Windows end"),
        (b" 10%|#  |\r 20%|## |\r100%|###|", "100%|###|"),
        (b"\r", ""),
    ],
)
def test_a_line_shows_its_text_and_nothing_that_a_terminal_obeys(line: bytes, shown: str) -> None:
    assert shown_line(line) == shown


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_lines_are_the_same_wherever_chunks_are_cut(data: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = ShownLines()
    found = "".join(pieces.feed(data[start:end]) for start, end in itertools.pairwise(places)) + pieces.end()
    whole = ShownLines()
    assert found == whole.feed(data) + whole.end()
    *lines, last = data.split(b"\n")
    shown = [*map(shown_line, lines), *([shown_line(last)] if last.strip() else [])]
    assert found.split("\n") == [*shown, ""]
    assert all(line.isprintable() for line in shown)


def test_a_line_without_an_end_comes_in_pieces_and_takes_little_memory() -> None:
    lines = ShownLines()
    pieces = ("".join(lines.feed(b"x" * 10_000) for _ in range(100)) + lines.end()).split("\n")
    assert "".join(pieces) == "x" * 1_000_000
    assert max(map(len, pieces)) <= MOST_BYTES + 10_000


def test_of_a_bar_that_is_not_done_the_present_state_is_known_once() -> None:
    lines = ShownLines()
    assert lines.feed(b"\r10%") == ""
    assert lines.bar() == "10%"
    assert lines.bar() is None
    for step in range(11, 5000):
        assert lines.feed(f"\r{step} of 5000 ".encode()) == ""
    assert lines.bar() == "4999 of 5000 "
    assert lines.feed(b"\rdone\n") == "done\n"
    assert lines.bar() is None


def test_the_last_lines_are_kept_within_bounds() -> None:
    tail = Tail("first\n")
    assert tail.lines() == ["first"]
    for number in range(5000):
        tail.add(f"{number}\n{number} again\n")
    assert tail.lines()[-2:] == ["4999", "4999 again"]
    assert len(tail.lines()) == KEEP_LINES
    tail.add("y" * 10**6 + "\nend\n")
    assert tail.lines()[-1] == "end"
    tail.add("ValueError: " + "z" * 90_000 + " at the end\n")
    assert (tail.lines()[-1][:12], tail.lines()[-1][-11:]) == ("ValueError: ", " at the end")
    assert sum(map(len, tail.lines())) < 300_000


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_lines_are_whole_wherever_the_pieces_are_cut(step: int) -> None:
    data = b"one\n\ntwo\r\n\xff\x00\nlast"
    lines = Lines()
    found = [lines.add(data[at : at + step]) for at in range(0, len(data), step)]
    assert b"".join(found) == b"one\n\ntwo\r\n\xff\x00\n"
    assert all(one.endswith(b"\n") for one in found if one)
    assert (lines.rest(), lines.rest()) == (b"last\n", b"")


def test_output_without_line_ends_gets_some_and_loses_nothing() -> None:
    lines = Lines()
    found = [lines.add(b"x" * 1000) for _ in range(LONGEST_BYTES // 100)] + [lines.add(b"\nend"), lines.rest()]
    whole = b"".join(found)
    assert whole.replace(b"\n", b"") == b"x" * 1000 * (LONGEST_BYTES // 100) + b"end"
    assert max(map(len, whole.split(b"\n"))) <= LONGEST_BYTES + 1000


def test_of_a_long_line_that_is_drawn_over_the_last_state_stays() -> None:
    lines = Lines(longest_bytes=20, redrawn=True)
    assert lines.add(b"\r10%" * 4) == b""
    assert (lines.add(b"\r11%" * 9), lines.open) == (b"", b"\r11%")
    assert lines.add(b"\r99%\r  \nnext") == b"\r11%\r99%\r  \n"
    assert lines.rest() == b"next\n"
