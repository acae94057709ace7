import contextlib
import hashlib
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.bed import Bed, small_disk
from tests.waiting import LIMIT_S, eventually
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.identities import Access
from topoplan.remote.ssh import connect
from topoplan.remote.upload import PUT, File, upload

BIG = 40 * 2**20


@pytest.fixture
def host(bed: Bed) -> Iterator[Connection]:
    with connect(bed.target("alpha"), Access(), deadline_s=LIMIT_S) as connection:
        yield connection


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def keep_uploading(connection: Connection, directory: Path) -> None:
    for number in range(100):
        upload(connection, {"big": bytes(BIG)}, str(directory / f"{number}"), deadline_s=LIMIT_S)


def test_files_are_put_where_they_belong(host: Connection, tmp_path: Path) -> None:
    there = tmp_path / "more" / "a directory's"
    binary = os.urandom(3 * 2**20 + 1)
    files = {
        "node-00.sh": File(data=b"#!/bin/sh\necho started\n", mode=0o755),
        "logs/deep/it's \\ a $file.bin": binary,
        "logs/größe": File(data=b"x" * 32768, mode=0o600),
        "-n": b"",
    }
    upload(host, files, str(there), deadline_s=LIMIT_S)
    assert (there / "logs/deep/it's \\ a $file.bin").read_bytes() == binary
    assert (there / "logs/größe").stat().st_mode & 0o777 == 0o600
    assert (there / "-n").read_bytes() == b""
    assert subprocess.run([there / "node-00.sh"], capture_output=True).stdout == b"started\n"
    assert names(there) == ["-n", "logs", "node-00.sh"]
    assert names(there.parent) == ["a directory's"]
    assert [stat.S_IMODE(place.stat().st_mode) for place in (there, there / "logs")] == [0o700, 0o700]


def test_many_files_are_put_at_once(host: Connection, tmp_path: Path) -> None:
    files = {f"{number:03}": bytes([number % 256]) * number * 40 for number in range(300)}
    upload(host, files, str(tmp_path / "run"), deadline_s=LIMIT_S)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files


def test_a_new_directory_appears_with_all_that_is_in_it(host: Connection, tmp_path: Path) -> None:
    there = tmp_path / "run"
    seen: list[list[str]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.append(names(there))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        upload(host, {"one": b"1", "two/three": b"3" * 2**22}, str(there), deadline_s=LIMIT_S)
    finally:
        done.set()
        watcher.join()
    assert all(each == ["one", "two"] for each in seen)
    assert names(tmp_path) == ["run"]


def test_what_was_put_there_before_and_nobody_heard_of_it_is_there(host: Connection, tmp_path: Path) -> None:
    for _ in range(2):
        upload(host, {"one": b"1", "two/three": b"3"}, str(tmp_path / "run"), deadline_s=LIMIT_S)
    with pytest.raises(HostError, match="File exists"):
        upload(host, {"one": b"2", "two/three": b"3"}, str(tmp_path / "run"), deadline_s=LIMIT_S)
    assert (names(tmp_path), (tmp_path / "run" / "one").read_bytes()) == (["run"], b"1")


@pytest.mark.parametrize("kind", ["directory", "file", "link", "link to nothing"])
def test_what_is_there_already_is_left_alone(host: Connection, tmp_path: Path, kind: str) -> None:
    there, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    if kind == "directory":
        there.mkdir()
    elif kind == "file":
        there.write_bytes(b"old")
    else:
        there.symlink_to("other" if kind == "link" else "nothing")
    with pytest.raises(HostError, match=r"run: File exists; move the file that is in the way"):
        upload(host, {"script": b"new"}, f"{there}/", deadline_s=LIMIT_S)
    assert names(tmp_path) == ["other", "run"]
    assert not names(other)
    assert kind != "directory" or not names(there)


def test_nothing_changes_when_the_files_came_damaged(
    host: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = hashlib.sha256(b"something else").hexdigest()
    monkeypatch.setattr("topoplan.remote.upload._sum_line", lambda name, data: f"{wrong}  {name}\n")
    with pytest.raises(HostError, match=r"could not be put into .*computed checksum did NOT match") as caught:
        upload(host, {"script": b"new"}, str(tmp_path / "new"), deadline_s=LIMIT_S)
    assert caught.value.problem == "command"
    assert names(tmp_path) == []


def test_what_the_host_says_is_said_with_a_remedy(host: Connection, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"could not be put into /proc/no: mkdir: .*No such file.*; make the dir") as it:
        upload(host, {"a": b""}, "/proc/no", deadline_s=LIMIT_S)
    assert it.value.problem == "command"
    (tmp_path / "file").touch()
    for place in ("file", "file/run", "file/a/run"):
        with pytest.raises(HostError, match=r"; move the file that is in the way, or name another"):
            upload(host, {"a": b""}, str(tmp_path / place), deadline_s=LIMIT_S)
    assert names(tmp_path) == ["file"]


def test_where_there_is_no_room_it_says_so_and_leaves_nothing(bed: Bed, host: Connection, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, inside=bed, name=host.name):
        place = str(small / "run")
        with pytest.raises(HostError, match=r"(No space left on device|Wrote only .*); make room there") as caught:
            upload(host, {"first": b"1", "big": os.urandom(4 * 2**20)}, place, deadline_s=LIMIT_S)
        assert caught.value.problem == "command"
        assert host.run(["ls", "-A", str(small)], deadline_s=LIMIT_S).stdout == b""
        upload(host, {"first": b"1"}, place, deadline_s=LIMIT_S)
        assert host.run(["cat", f"{place}/first"], deadline_s=LIMIT_S).stdout == b"1"


def test_a_relative_path_is_in_the_home_directory(host: Connection) -> None:
    home = host.run(["pwd"], deadline_s=LIMIT_S).stdout.decode().strip()
    for name in (f".topoplan-test-{os.getpid()}", f"-test-{os.getpid()}/x"):
        upload(host, {"a": b"here"}, name, deadline_s=LIMIT_S)
        assert (Path(home) / name / "a").read_bytes() == b"here"
        host.run(["rm", "-r", "--", name.partition("/")[0]], deadline_s=LIMIT_S)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", ".", "a\nb"])
def test_names_that_lead_elsewhere_are_refused(host: Connection, name: str) -> None:
    with pytest.raises(ValueError, match="is not the relative name of a file"):
        upload(host, {name: b""}, "/tmp", deadline_s=LIMIT_S)


@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.05, 0.1, 0.3])
def test_a_client_that_goes_in_the_middle_leaves_nothing(host: Connection, tmp_path: Path, after_s: float) -> None:
    timer = threading.Timer(after_s, host.close)
    timer.start()
    with pytest.raises(HostError, match="the connection was lost"):
        keep_uploading(host, tmp_path)
    timer.join()
    assert eventually(lambda: not list(tmp_path.glob(".*")))
    assert all(path.stat().st_size == BIG for path in tmp_path.glob("*/*"))


def test_it_ends_by_the_deadline_and_leaves_nothing(
    host: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topoplan.remote.upload.PUT", PUT.replace("timeout", "sleep 8; timeout"))
    began = time.monotonic()
    with pytest.raises(HostError, match=r"were not put into .* within 2 s; check the network") as caught:
        upload(host, {"big": bytes(1000)}, str(tmp_path / "run"), deadline_s=2)
    assert time.monotonic() - began < LIMIT_S
    assert caught.value.problem == "deadline"
    assert eventually(lambda: not names(tmp_path))
    assert host.run(["true"], deadline_s=LIMIT_S).code == 0


def test_a_host_that_stops_answering_does_not_hold_it_up(bed: Bed, tmp_path: Path) -> None:
    with connect(bed.target("beta"), Access(), deadline_s=LIMIT_S) as connection:
        with bed.frozen("beta"):
            began = time.monotonic()
            with pytest.raises(HostError) as caught:
                upload(connection, {"a": b""}, str(tmp_path / "run"), deadline_s=0.5)
            assert caught.value.problem == "deadline"
            assert time.monotonic() - began < LIMIT_S
        assert eventually(lambda: not names(tmp_path))


def test_a_host_that_is_cut_off_is_lost_and_shows_nothing_that_is_not_whole(cables: Bed, tmp_path: Path) -> None:
    with connect(cables.target("beta"), Access(), deadline_s=LIMIT_S) as connection:
        timer = threading.Timer(0.03, cables.cut, ["beta"])
        timer.start()
        try:
            with pytest.raises(HostError) as caught:
                keep_uploading(connection, tmp_path)
        finally:
            timer.join()
            cables.heal("beta")
        assert caught.value.problem == "lost"
    cables.restart("beta")
    assert all(path.stat().st_size == BIG for path in tmp_path.glob("*/*"))


OTHER_USER = 4242
"""A user id that does not exist on this machine."""


@contextlib.contextmanager
def open_to_others(directory: Path, mode: int) -> Iterator[Path]:
    """Yield a directory with this mode, whatever the umask."""
    directory.mkdir()
    directory.chmod(mode)
    yield directory


@pytest.mark.skipif(os.getuid() != 0, reason="another user needs root")
class TestAPlaceThatOthersUse:
    def put(self, host: Connection, base: Path) -> Path:
        place = base / "runs" / "node-00" / "run"
        upload(host, {"a": b"here"}, str(place), own_parts=3, deadline_s=LIMIT_S)
        return place

    @pytest.mark.parametrize("mode", [0o1777, 0o2775, 0o755])
    def test_gets_directories_of_our_own(self, host: Connection, tmp_path: Path, mode: int) -> None:
        with open_to_others(tmp_path / "data", mode) as data:
            os.chown(data, OTHER_USER, OTHER_USER)
            old = os.umask(0o002)
            try:
                for _ in range(2):
                    place = self.put(host, data)
                    assert (place / "a").read_bytes() == b"here"
                    for one in (place, *place.parents[:2]):
                        assert (one.stat().st_uid, stat.S_IMODE(one.stat().st_mode) & 0o777) == (0, 0o700)
                    (place / "a").unlink()
                    place.rmdir()
            finally:
                os.umask(old)
            assert names(data) == ["runs"]

    @pytest.mark.parametrize("at", ["runs", "runs/node-00"])
    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("theirs", r"it belongs to UNKNOWN \(uid 4242\); have it removed, or name another `workdir`"),
            ("link", r"it is a link; remove it, or name another"),
            ("theirs, by a link", r"it is a link; remove it, or name another"),
            ("writable", r"others can write in it \(mode 775\); remove that permission with `chmod go-w`, or"),
            ("anybody's", r"others can write in it \(mode 1777\); remove that"),
        ],
    )
    def test_is_refused_where_a_directory_on_the_way_is_not_ours_alone(
        self, host: Connection, tmp_path: Path, at: str, kind: str, words: str
    ) -> None:
        with open_to_others(tmp_path / "data", 0o1777) as data:
            part, elsewhere = data / at, tmp_path / "elsewhere"
            part.parent.mkdir(exist_ok=True, mode=0o700)
            (part if "link" not in kind else elsewhere).mkdir()
            if "link" in kind:
                part.symlink_to(elsewhere)
            if "theirs" in kind:
                os.chown(part, OTHER_USER, OTHER_USER)
            part.chmod({"writable": 0o775, "anybody's": 0o1777}.get(kind, 0o700))
            with pytest.raises(HostError, match=rf"could not be put into .*: {part}: {words}"):
                self.put(host, data)
            assert names(elsewhere if "link" in kind else part) == []

    def test_is_refused_where_anybody_could_rename_our_directories(self, host: Connection, tmp_path: Path) -> None:
        with open_to_others(tmp_path / "data", 0o777) as data:
            with pytest.raises(HostError, match=r"anybody can rename what is in it \(mode 777\); prevent it with"):
                self.put(host, data)
            assert names(data) == []


@pytest.mark.parametrize("directory", ["", "/", "/a", "a/..", "../a", "a//b", "./a"])
def test_a_directory_of_our_own_has_a_name(host: Connection, directory: str) -> None:
    with pytest.raises(ValueError, match="are no names"):
        upload(host, {"a": b""}, directory, own_parts=2, deadline_s=LIMIT_S)
