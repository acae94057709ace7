from pathlib import Path

import pytest

from topoplan.cli.host_words import hosts_of, parse_host, read_hosts_file
from topoplan.errors import InputError
from topoplan.specs.cluster import Host


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node0", Host(address="node0")),
        ("me@node0", Host(address="node0", user="me")),
        ("node0:2222", Host(address="node0", port=2222)),
        ("me@10.0.0.1:22", Host(address="10.0.0.1", user="me", port=22)),
        ("[fd00::1]:2222", Host(address="fd00::1", port=2222)),
        ("fd00::1", Host(address="fd00::1")),
    ],
)
def test_hosts_are_taken_as_ssh_takes_them(text: str, host: Host) -> None:
    assert parse_host(text, where="HOST") == host


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "a b", "node0:99999", "node0:0", "@node0", "node0;id", "me@"])
def test_what_is_no_host_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InputError, match="hosts:3"):
        parse_host(text, where="hosts:3")


def test_a_hosts_file_may_have_slots_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# cluster\nnode0 slots=8\n\nnode1 slots=8 max_slots=8  # spare\nme@node2:2222\n")
    assert read_hosts_file(file) == [("node0", f"{file}:2"), ("node1", f"{file}:4"), ("me@node2:2222", f"{file}:5")]


def test_a_hosts_file_without_hosts_or_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "absent"):
        with pytest.raises(InputError, match=name):
            read_hosts_file(tmp_path / name)


def test_hosts_of_the_command_line_come_first(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1\n")
    hosts = hosts_of(["node0"], str(file), workdir="/w", venv="/v")
    assert hosts == [Host(address="node0", workdir="/w", venv="/v"), Host(address="node1", workdir="/w", venv="/v")]


def test_no_host_and_one_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no host is given"):
        hosts_of([], None)
    with pytest.raises(InputError, match="already given"):
        hosts_of(["node0", "me@node0"], None)
    with pytest.raises(InputError, match="already given"):
        hosts_of(["node0", "node0"], None)


def test_a_relative_workdir_is_refused() -> None:
    with pytest.raises(InputError, match="workdir"):
        hosts_of(["node0"], None, workdir="runs")
