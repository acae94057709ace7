"""`generate` killed at each of its steps, and the resulting state of the disk.

Steps are each call that changes the file system, the middle of each write, and each wait for the disk. The state before
a step is the state after the previous one, which is what a kill at that moment leaves.
"""

import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.bundle.whole import read_mark
from topoplan.bundle.write import MANIFEST, write_bundle, write_file
from topoplan.cli.main import main
from topoplan.errors import OutputError, SpecError
from topoplan.lint.check import check
from topoplan.planner.predict import predict
from topoplan.run.bundle_reader import read_bundle

State = Mapping[str, tuple[int, bytes]]
"""Relative path -> mode and content; the content of a directory is empty."""

_STEPS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.utime", "os.link", "os.symlink"}
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OURS = ".topoplan-writing"


def state(root: Path) -> State:
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, b"" if path.is_dir() else path.read_bytes())
        for path in sorted(root.rglob("*"))
    }


def put(root: Path, wanted: State) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, (mode, content) in wanted.items():
        path = root / name
        if S_ISDIR(mode):
            path.mkdir()
        else:
            path.write_bytes(content)
        path.chmod(mode & 0o7777)


def without_leftovers(found: State) -> State:
    return {name: entry for name, entry in found.items() if _OURS not in name}


def listen(step: Callable[[str], None]) -> None:
    """Make this process call `step` before each of its steps."""

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STEPS or (event == "open" and arguments[2] & _TO_WRITE):
            step(event)

    def write_bytes(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            step("write")
            return file.write(data[len(data) // 2 :])

    sys.addaudithook(heard)
    Path.write_bytes = write_bytes  # type: ignore[assignment,method-assign]
    os.fsync = lambda handle: step("fsync")


def in_a_child(work: Callable[[], object]) -> int:
    """Run `work` in a child process; return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """Return the exit code of the child, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ends(write: Callable[[], object], root: Path) -> Iterator[State]:
    """Yield the state below `root`, restored there, at each step of `write` at which it has changed."""
    told = root.with_name("told")

    def work() -> None:
        seen: list[State] = []

        def step(_: str) -> None:
            if (now := state(root)) not in seen:
                seen.append(now)

        with told.open("wb") as file:
            listen(step)
            write()
            step("end")
            pickle.dump(seen, file)

    assert end_of(in_a_child(work)) == 0
    for end in pickle.loads(told.read_bytes()):
        put(root, end)
        yield end


def killed_at_rename(number: int, write: Callable[[], object]) -> int:
    """Run `write` in a child that is killed before the rename with this number; return how the child ended."""
    renames: list[str] = []

    def step(what: str) -> None:
        if what == "os.rename":
            renames.append(what)
            if len(renames) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        listen(step)
        write()

    return end_of(in_a_child(work))


# Bundles -------------------------------------------------------------------------------------------------------------

FOUR = replace(CLUSTER, hosts=tuple(replace(host, socket_interface=None, hcas=()) for host in HOSTS))
TWO = replace(FOUR, nodes=2, hosts=FOUR.hosts[:2])
ONE = replace(FOUR, nodes=1, hosts=FOUR.hosts[:1])
NOBODYS = {"logs/run/rank0.log": "loss 1.2", "saves/checkpoint-10/model.safetensors": "weights", "notes.txt": "mine"}


def bundle_of(**what: Any) -> dict[str, str]:
    spec, plan = make_spec_and_plan(**{"cluster": TWO, "model": QWEN3_8B, "tp": 2, **what})
    return generate(spec, predict(spec, plan.layout))


@pytest.fixture(scope="module")
def bundles() -> dict[str, dict[str, str]]:
    return {"old": bundle_of(), "new": bundle_of(tp=4), "smaller": bundle_of(cluster=ONE, tp=4)}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Provide a directory in memory if possible, because thousands of files come and go."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as directory:
        (Path(directory) / "root").mkdir()
        yield Path(directory) / "root"


def refusals(directory: Path) -> Iterator[str]:
    """Yield the message of each reader of bundles that refuses this one."""
    for read in (read_bundle, lambda path: check([str(path)])):
        with pytest.raises(SpecError) as caught:
            read(directory)
        yield str(caught.value)
    for script in sorted(directory.glob("node-*.sh")):
        ran = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
        assert ran.returncode == 2, f"{script} began"
        yield ran.stderr.replace("'", "")


@pytest.mark.parametrize(
    ("before", "edits", "after", "force"),
    [
        pytest.param(None, None, "new", False, id="a new directory"),
        pytest.param("old", {}, "new", False, id="another plan"),
        pytest.param("old", {}, "smaller", False, id="fewer nodes"),
        pytest.param("old", {"train.yaml": "# mine\n", "node-01.sh": "# mine\n"}, "new", True, id="over edits"),
        pytest.param(None, {"train.yaml": "# mine\n"}, "new", True, id="among files of others"),
    ],
)
def test_a_bundle_is_the_old_one_or_the_new_one_or_refused_by_all_who_start_it(
    root: Path,
    bundles: dict[str, dict[str, str]],
    before: str | None,
    edits: dict[str, str] | None,
    after: str,
    force: bool,
) -> None:
    directory = root / "bundle"
    if before is not None:
        write_bundle(bundles[before], directory)
    if edits is not None:
        for name, text in {**NOBODYS, **edits}.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with (directory / name).open("a") as file:
                file.write(text)

    def write(*, force: bool = force) -> None:
        write_bundle(bundles[after], directory, force=force)

    old = state(root)
    write()
    new = state(root)
    refused: list[State] = []
    put(root, old)
    for end in ends(write, root):
        found = without_leftovers(end)
        if found not in (old, new, *refused):
            refused.append(found)
            again = f"topoplan generate --from {directory}/plan.json -o {directory}"
            words = again if "bundle/plan.json" in found else "topoplan generate"
            assert all(words in said for said in refusals(directory))
            assert all(found[f"bundle/{name}"] == old[f"bundle/{name}"] for name in NOBODYS)
        write(force=force and not refused)
        assert state(root) == new
    assert len(refused) > len(bundles[after]) if old else not refused


def test_a_kill_leaves_what_lay_there_at_that_step(root: Path, bundles: dict[str, dict[str, str]]) -> None:
    directory = root / "bundle"
    write_bundle(bundles["old"], directory)
    old = state(root)
    expected = list(ends(lambda: write_bundle(bundles["new"], directory), root))
    renames = 0
    while True:
        renames += 1
        put(root, old)
        code = killed_at_rename(renames, lambda: write_bundle(bundles["new"], directory))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert state(root) in expected
        write_bundle(bundles["new"], directory)
        assert state(root) == expected[-1]
    assert renames > len(bundles["new"])


@pytest.fixture
def half(root: Path, bundles: dict[str, dict[str, str]]) -> Path:
    """Return a bundle whose scripts are new while its other files are old."""
    directory = root / "bundle"
    write_bundle(bundles["old"], directory)
    killed_at_rename(5, lambda: write_bundle(bundles["new"], directory))
    assert (directory / "node-01.sh").read_text() == bundles["new"]["node-01.sh"]
    assert (directory / "hosts.json").read_text() == bundles["old"]["hosts.json"]
    return directory


def test_a_bundle_that_is_being_mended_can_be_mended_as_well(
    root: Path, half: Path, bundles: dict[str, dict[str, str]]
) -> None:
    refused: list[State] = []
    for end in ends(lambda: write_bundle(bundles["smaller"], half), root):
        found = without_leftovers(end)
        if found not in refused and read_mark(half) is not None:
            refused.append(found)
            assert all("topoplan generate --from" in said for said in refusals(half))
        write_bundle(bundles["smaller"], half)
        assert set(state(half)) == {*bundles["smaller"], MANIFEST}


def test_the_command_that_is_told_mends_it(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", str(half), "--dry-run"])
    command = capsys.readouterr().err.partition("write it again: ")[2]
    with pytest.raises(SystemExit, match="0"):
        main(shlex.split(command)[1:])
    assert read_bundle(half).notes == ()


def test_what_was_edited_in_half_a_bundle_is_not_written_over(half: Path, bundles: dict[str, dict[str, str]]) -> None:
    with (half / "hosts.json").open("a") as file:
        file.write("\n")
    with pytest.raises(OutputError, match=r"was edited since topoplan wrote it: hosts\.json"):
        write_bundle(bundles["new"], half)


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text.replace('"files', "files")])
def test_a_damaged_mark_is_a_mark(half: Path, bundles: dict[str, dict[str, str]], damage: Callable[[str], str]) -> None:
    (half / "train.yaml").write_text(damage((half / "train.yaml").read_text())[:400])
    assert all("is incomplete" in said for said in refusals(half))
    write_bundle(bundles["new"], half, force=True)
    assert read_bundle(half).notes == ()


def test_a_copy_of_half_a_bundle_is_refused_and_a_copy_of_the_whole_over_it_is_not(
    half: Path, tmp_path: Path, bundles: dict[str, dict[str, str]]
) -> None:
    """Copy like `scp DIR/* HOST:`, without hidden files and without removing any."""

    def copied() -> str:
        for path in half.glob("[!.]*"):
            shutil.copy(path, tmp_path)
        return subprocess.run(["bash", tmp_path / "node-01.sh"], capture_output=True, text=True, check=False).stderr

    assert "the bundle is incomplete" in copied()
    write_bundle(bundles["new"], half)
    assert "the bundle is incomplete" not in copied()


def test_a_bundle_is_on_the_disk_before_it_is_in_place(root: Path, bundles: dict[str, dict[str, str]]) -> None:
    """After a loss of power, a file system has what was synced, and any part of the rest."""
    directory = root / "bundle"
    write_bundle(bundles["old"], directory)
    done: list[tuple[str, str]] = []
    told = root.with_name("told")

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            done.append((event, str(arguments[1])))

    def work() -> None:
        os.fsync = lambda handle: done.append(("fsync", str(Path(f"/proc/self/fd/{handle}").readlink())))
        sys.addaudithook(heard)
        write_bundle(bundles["new"], directory)
        told.write_text(json.dumps(done))

    assert end_of(in_a_child(work)) == 0
    events = [tuple(one) for one in json.loads(told.read_text())]
    renames = [at for at, (event, _) in enumerate(events) if event == "os.rename"]
    main, place = str(directory / "train.yaml"), ("fsync", str(directory))
    written = {path for event, path in events[: renames[0]] if event == "fsync"}
    assert all(any(path.endswith(f"/new/{name}") for path in written) for name in (*bundles["new"], MANIFEST))
    assert any(path.endswith("/mark/train.yaml") for path in written)
    assert [events[at][1] for at in (renames[0], renames[-1])] == [main, main]
    assert place in events[renames[0] : renames[1]]
    assert place in events[renames[-2] : renames[-1]]
    assert events[-1] == place


def test_another_that_writes_there_is_waited_for_or_told(
    root: Path, bundles: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root / "bundle"
    write_bundle(bundles["old"], directory)
    old = state(root)

    def stays(step: str) -> None:
        if step == "os.rename":
            os.kill(os.getpid(), signal.SIGSTOP)

    def work() -> None:
        listen(stays)
        write_bundle(bundles["new"], directory)

    child = in_a_child(work)
    os.waitpid(child, os.WUNTRACED)
    found = state(root)
    monkeypatch.setattr("topoplan.bundle.write._WAIT_S", 0.1)
    with pytest.raises(OutputError, match="another process of topoplan writes there"):
        write_bundle(bundles["smaller"], directory)
    assert state(root) == found
    os.kill(child, signal.SIGKILL)
    end_of(child)
    assert without_leftovers(found) == old
    write_bundle(bundles["smaller"], directory)
    assert set(state(root)) == {"bundle", *(f"bundle/{name}" for name in (*bundles["smaller"], MANIFEST))}


# One file ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [None, "# ours\nold\n"])
def test_a_file_is_the_old_one_or_the_new_one(root: Path, earlier: str | None) -> None:
    path = root / "page.md"
    if earlier is not None:
        path.write_text(earlier)

    def write() -> None:
        write_file(path, "# ours\nnew\n", mark="# ours", writer="a test")

    old = state(root)
    write()
    new = state(root)
    put(root, old)
    for end in ends(write, root):
        assert without_leftovers(end) in (old, new)
        write()
        assert state(root) == new
