import base64
import subprocess
from pathlib import Path

import pytest

from tests.bed.bed import new_key
from topoplan.remote.known_hosts import HostKey, add, look_up


def key(tmp_path: Path, name: str = "key") -> tuple[HostKey, str]:
    """Return a key, and its text in a file."""
    text = new_key(tmp_path / name)
    kind, blob = text.split()
    return HostKey(kind=kind, blob=base64.b64decode(blob)), text


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        ("node0", "node0", True),
        ("NODE0", "node0", True),
        ("a,node0,b", "node0", True),
        ("node0", "node00", False),
        ("node*", "node0", True),
        ("node?", "node10", False),
        ("node*,!node0", "node0", False),
        ("!node0,node*", "node1", True),
        ("[node0]:2222", "[node0]:2222", True),
        ("[node0]:2222", "node0", False),
        ("[node0]:2222", "[node0]:2223", False),
        ("node0", "[node0]:2222", True),
        ("[10.0.*]:2222", "[10.0.0.1]:2222", True),
        ("fe80::1", "fe80::1", True),
    ],
)
def test_names_and_patterns_mean_what_they_mean_to_ssh(tmp_path: Path, names: str, asked: str, found: bool) -> None:
    mine, text = key(tmp_path)
    file = tmp_path / "known"
    file.write_text(f"{names} {text} a comment\n")
    assert (look_up(asked, [file]).verdict(mine) == "known") == found


def test_hashed_names_of_ssh_keygen_are_found(tmp_path: Path) -> None:
    mine, text = key(tmp_path)
    file = tmp_path / "known"
    file.write_text(f"node0 {text}\n[node1]:2222 {text}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert "node" not in file.read_text()
    for name in ("node0", "[node1]:2222"):
        assert look_up(name, [file]).verdict(mine) == "known"
    assert look_up("node1", [file]).verdict(mine) == "unknown"


def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    mine, text = key(tmp_path)
    file = tmp_path / "known"
    file.write_bytes(
        b"\n# node0\nnode0\nnode0 ssh-rsa !!!\n|1|x|y a b\n|1| a b\n\xff\xfe\n" + f"node0 {text}\n".encode()
    )
    known = look_up("node0", [tmp_path / "gone", file])
    assert known.verdict(mine) == "known"
    first = known.first()
    assert first.place == f"{file}:8"


def test_any_of_several_keys_of_a_host_is_known_and_another_is_a_change(tmp_path: Path) -> None:
    (one, first), (two, second), (other, _) = (key(tmp_path, name) for name in "abc")
    files = [tmp_path / "user", tmp_path / "global"]
    files[0].write_text(f"node0 {first}\n")
    files[1].write_text(f"node* {second}\n")
    known = look_up("node0", files)
    assert [known.verdict(each) for each in (one, two, other)] == ["known", "known", "changed"]
    assert known.verdict(HostKey(kind="ssh-rsa", blob=b"")) == "changed"
    assert known.kinds == ("ssh-ed25519",)


def test_a_revoked_key_is_revoked_whatever_else_is_said(tmp_path: Path) -> None:
    mine, text = key(tmp_path)
    file = tmp_path / "known"
    file.write_text(f"node0 {text}\n@revoked * {text}\n")
    assert look_up("node0", [file]).verdict(mine) == "revoked"


def test_an_authority_makes_no_key_known(tmp_path: Path) -> None:
    mine, text = key(tmp_path)
    file = tmp_path / "known"
    file.write_text(f"@cert-authority * {text}\n")
    known = look_up("node0", [file])
    assert (known.verdict(mine), known.by_authority) == ("unknown", True)


class TestAdd:
    def test_starts_a_new_line_and_writes_once(self, tmp_path: Path) -> None:
        mine, text = key(tmp_path)
        file = tmp_path / "known"
        file.write_text("# no end of line")
        assert add("node0", mine, file, hashed=False)
        assert not add("node0", mine, file, hashed=False)
        assert file.read_text() == f"# no end of line\nnode0 {text}\n"

    def test_hides_names_that_ssh_keygen_finds(self, tmp_path: Path) -> None:
        mine, _ = key(tmp_path)
        file = tmp_path / "new" / "known"
        assert add("[node0]:2222", mine, file, hashed=True)
        assert "node0" not in file.read_text()
        found = subprocess.run(["ssh-keygen", "-F", "[node0]:2222", "-f", file], capture_output=True)
        assert found.returncode == 0
        assert not add("[node0]:2222", mine, file, hashed=True)

    def test_makes_files_that_are_private(self, tmp_path: Path) -> None:
        mine, _ = key(tmp_path)
        file = tmp_path / "new" / "known"
        add("node0", mine, file, hashed=False)
        assert file.stat().st_mode & 0o77 == 0
        assert file.parent.stat().st_mode & 0o77 == 0


def test_the_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    mine, _ = key(tmp_path)
    shown = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "key.pub"], capture_output=True, text=True).stdout
    assert mine.fingerprint == shown.split()[1]
