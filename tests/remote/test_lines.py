import pytest

from topoplan.remote.lines import LONGEST_BYTES, Lines


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_lines_are_whole_wherever_the_pieces_are_cut(step: int) -> None:
    data = b"one\n\ntwo\r\n\xff\x00\nlast"
    lines = Lines()
    found = [line for at in range(0, len(data), step) for line in lines.add(data[at : at + step])]
    assert found == [b"one\n", b"\n", b"two\r\n", b"\xff\x00\n"]
    assert (lines.rest(), lines.rest()) == ([b"last"], [])


def test_output_without_line_ends_is_cut_and_loses_nothing() -> None:
    data = bytes(range(1, 10)) * LONGEST_BYTES + b"\nend"
    lines = Lines()
    found = [*lines.add(data), *lines.rest()]
    assert b"".join(found) == data
    assert max(len(line.rstrip(b"\n")) for line in found) == LONGEST_BYTES


def test_of_a_long_line_that_is_drawn_over_the_last_state_stays() -> None:
    lines = Lines(longest_bytes=20, redrawn=True)
    assert lines.add(b"\r10%" * 4) == []
    assert (lines.add(b"\r11%" * 9), lines.open) == ([], b"\r11%")
    assert lines.add(b"\r99%\r  \nnext") == [b"\r11%\r99%\r  \n"]
    assert lines.rest() == [b"next"]
