import pytest

from topoplan.remote.lines import LONGEST_BYTES, Lines


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
