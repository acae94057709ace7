import pytest

from topoplan.launch.lines import LONGEST_BYTES, Lines


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
    assert max(map(len, found)) == LONGEST_BYTES
