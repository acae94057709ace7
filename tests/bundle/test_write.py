import json
import os
import stat
from pathlib import Path

import pytest

from topoplan.bundle.write import MANIFEST, write_bundle, write_file
from topoplan.errors import OutputError

FILES = {"train.yaml": "a: 1\n", "node-00.sh": "#!/usr/bin/env bash\n", "node-01.sh": "#!/usr/bin/env bash\n"}


def content(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


def test_files_are_written_with_their_modes_and_a_manifest(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "bundle"
    assert write_bundle(FILES, target) == [target / name for name in FILES]
    assert {name: text for name, text in content(target).items() if name != MANIFEST} == FILES
    assert stat.S_IMODE((target / "node-00.sh").stat().st_mode) == 0o755
    assert not os.access(target / "train.yaml", os.X_OK)
    assert set(json.loads((target / MANIFEST).read_text())["files"]) == set(FILES)
    assert not leftovers(target.parent)


def test_an_untouched_bundle_is_replaced_and_its_stale_scripts_go(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    smaller = {"train.yaml": "a: 2\n", "node-00.sh": "#!/usr/bin/env bash\n"}
    write_bundle(smaller, target)
    assert {name: text for name, text in content(target).items() if name != MANIFEST} == smaller
    assert not leftovers(tmp_path)


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    before = content(target)
    write_bundle(FILES, target)
    assert content(target) == before


def test_logs_and_checkpoints_beside_the_bundle_stay(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / "logs").mkdir()
    (target / "logs" / "rank0.log").write_text("loss 1.2")
    write_bundle({"train.yaml": "a: 2\n"}, target)
    assert content(target)["logs/rank0.log"] == "loss 1.2"


@pytest.mark.parametrize("edited", ["train.yaml", "node-01.sh"])
def test_an_edited_file_is_not_overwritten(tmp_path: Path, edited: str) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / edited).write_text("mine")
    before = content(target)
    with pytest.raises(OutputError, match=rf"{edited}.*--force") as caught:
        write_bundle({"train.yaml": "a: 2\n", "node-00.sh": "x"}, target)
    assert caught.value.exit_code == 2
    assert content(target) == before
    assert not leftovers(tmp_path)


def test_force_overwrites_what_is_in_the_way_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / "train.yaml").write_text("mine")
    (target / "node-01.sh").write_text("mine, and not part of the new bundle")
    write_bundle({"train.yaml": "a: 2\n", "node-00.sh": "x"}, target, force=True)
    assert content(target)["train.yaml"] == "a: 2\n"
    assert content(target)["node-01.sh"].startswith("mine")


def test_a_deleted_file_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / "train.yaml").unlink()
    write_bundle(FILES, target)
    assert content(target)["train.yaml"] == FILES["train.yaml"]


def test_a_directory_with_files_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(OutputError, match=r"not a bundle of topoplan: notes\.txt"):
        write_bundle(FILES, tmp_path)
    assert content(tmp_path) == {"notes.txt": "keep"}
    write_bundle(FILES, tmp_path, force=True)
    assert content(tmp_path)["notes.txt"] == "keep"


def test_a_file_of_somebody_else_that_a_larger_bundle_would_replace_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle({"train.yaml": "a: 1\n"}, target)
    (target / "node-00.sh").write_text("my own")
    with pytest.raises(OutputError, match=r"did not write: node-00\.sh"):
        write_bundle(FILES, target)
    assert content(target)["node-00.sh"] == "my own"


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", '{"schema": "other/1", "files": {}}', '{"schema": "topoplan.manifest/1", "files": 3}']
)
def test_a_manifest_that_cannot_be_read_makes_the_directory_foreign(tmp_path: Path, manifest: str) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / MANIFEST).write_text(manifest)
    with pytest.raises(OutputError, match="not a bundle"):
        write_bundle(FILES, target)


def test_a_manifest_cannot_name_files_outside_of_the_bundle(tmp_path: Path) -> None:
    target, outside = tmp_path / "bundle", tmp_path / "outside.txt"
    outside.write_text("")
    write_bundle(FILES, target)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (target / MANIFEST).write_text(json.dumps({"schema": "topoplan.manifest/1", "files": {"../outside.txt": empty}}))
    write_bundle(FILES, target, force=True)
    assert outside.exists()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.write_text("a file")
    for force in (False, True):
        with pytest.raises(OutputError, match="is a file"):
            write_bundle(FILES, target, force=force)
    with pytest.raises(OutputError, match="cannot write"):
        write_bundle(FILES, target / "below")
    assert target.read_text() == "a file"


def test_a_directory_in_place_of_a_file_is_refused_and_the_rest_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    (target / "node-01.sh").unlink()
    (target / "node-01.sh").mkdir()
    before = content(target)
    with pytest.raises(OutputError, match=r"node-01\.sh"):
        write_bundle({**FILES, "train.yaml": "a: 2\n"}, target, force=True)
    assert content(target) == before
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    target = tmp_path / "bundle"
    if there:
        write_bundle(FILES, target)
    before = content(target) if there else {}
    write_bytes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "node-01.sh":
            raise OSError(28, "No space left on device", str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_bundle({**FILES, "train.yaml": "a: 2\n"}, target)
    assert target.exists() is there
    assert (content(target) if there else {}) == before
    assert not leftovers(tmp_path)


def test_an_interruption_in_the_middle_puts_the_old_files_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "bundle"
    write_bundle(FILES, target)
    before = content(target)
    replace = Path.replace

    def interrupted(path: Path, to: Path) -> Path:
        if to == target / "node-01.sh" and "new" in path.parts:
            raise KeyboardInterrupt
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bundle({name: text + "new\n" for name, text in FILES.items()}, target)
    assert content(target) == before
    assert not leftovers(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_bundle(FILES, tmp_path / "bundle")
    finally:
        tmp_path.chmod(0o755)


def test_a_place_that_nobody_can_write_to_is_refused() -> None:
    with pytest.raises(OutputError, match=r"cannot write.*-o"):
        write_bundle(FILES, Path("/proc/topoplan/bundle"))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", MANIFEST])
def test_a_path_out_of_the_bundle_is_a_programming_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        write_bundle({name: ""}, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_link_to_a_directory_is_followed_and_the_working_directory_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_bundle(FILES, tmp_path / "link")
    assert (tmp_path / "real" / "train.yaml").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert write_bundle(FILES, Path())[0].exists()
    assert not leftovers(tmp_path)


def test_a_file_is_written_whole_and_replaces_only_ours(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    for text in ("# ours\none\n", "# ours\ntwo\n"):
        write_file(path, text, mark="# ours", writer="a test")
        assert path.read_text() == text
    path.write_text("theirs")
    with pytest.raises(OutputError, match=r"was not written by `a test`; name another$"):
        write_file(path, "# ours\n", mark="# ours", writer="a test")
    with pytest.raises(OutputError, match="overwrite with --force"):
        write_file(path, "# ours\n", mark="# ours", writer="a test", force=False)
    assert path.read_text() == "theirs"
    write_file(path, "# ours\n", mark="# ours", writer="a test", force=True)
    assert path.read_text() == "# ours\n"
    assert not leftovers(tmp_path)


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("# ours\n")
    link.symlink_to(target)
    write_file(link, "# ours\nnew\n", mark="# ours", writer="a test")
    assert link.is_symlink()
    assert target.read_text() == "# ours\nnew\n"


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("# ours\nold\n")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"page\.md: cannot be written: No space left on device"):
        write_file(path, "# ours\nnew\n", mark="# ours", writer="a test")
    assert path.read_text() == "# ours\nold\n"
    assert not leftovers(tmp_path)


def test_a_directory_is_no_place_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory; expected a file"):
        write_file(tmp_path, "x", mark="x", writer="a test", force=True)
