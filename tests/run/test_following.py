from pathlib import Path

import pytest

from topoplan.run.following import LogCopy


def opened(path: Path) -> LogCopy:
    copy = LogCopy.open(path)
    assert copy is not None
    return copy


def test_is_continued_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for data in (b"one\n\xff", b"two", b""):
        copy = opened(path)
        copy.add(data)
        copy.close()
        copy.close()
    copy = opened(path)
    assert (copy.size_bytes, copy.read(0), copy.read(5), copy.read(9)) == (8, b"one\n\xfftwo", b"two", b"")
    copy.close()
    assert path.stat().st_mode & 0o077 == 0


def test_one_process_at_a_time_continues_it(tmp_path: Path) -> None:
    first = opened(tmp_path / "log")
    assert LogCopy.open(tmp_path / "log") is None
    first.close()
    opened(tmp_path / "log").close()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogCopy.open(tmp_path / "absent" / "log")
    full = opened(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        full.add(b"x")
    full.close()
