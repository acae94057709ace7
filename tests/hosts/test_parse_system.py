import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import recorded
from topoplan.hosts.parse_system import (
    parse_cgroup_memory,
    parse_cpus,
    parse_df,
    parse_limits,
    parse_meminfo,
    parse_nccl_settings,
    parse_path,
    parse_port_range,
)

DIGEST = "a" * 64


class TestParseDf:
    def test_reads_a_network_mount_with_its_type(self) -> None:
        head = "Filesystem Type 1024-blocks Used Available Capacity Mounted on\n"
        found = parse_df(head + "filer:/export/data nfs4 1000 400 600 40% /data set\n", has_type=True)
        assert (found.source, found.kind, found.free_bytes) == ("filer:/export/data", "nfs4", 600 * 1024)

    def test_reads_a_source_with_a_blank_and_no_type(self) -> None:
        found = parse_df("//srv/my share 1000 400 600 40% /mnt\n", has_type=False)
        assert (found.source, found.size_bytes) == ("//srv/my share", 1000 * 1024)

    def test_is_nothing_for_an_error(self) -> None:
        assert parse_df("df: /data: Stale file handle", has_type=True) is None
        assert parse_df("", has_type=False) is None


class TestParsePath:
    def test_reads_all_of_a_directory(self) -> None:
        lines = ["path\t/data/a\tb", "exists\tyes", "writable\tno", "df\tx ext4 10 5 5 50% /", "files\t3", "size\t999"]
        found = parse_path("\n".join([*lines, f"fingerprint\t{DIGEST}  -"]))
        assert (found.path, found.exists, found.is_writable) == ("/data/a\tb", True, False)
        assert (found.files, found.size_bytes, found.fingerprint) == (3, 999, DIGEST)

    def test_keeps_the_quick_facts_where_the_rest_took_too_long(self) -> None:
        found = parse_path("path\t/data\nexists\tyes\nwritable\tyes\n")
        assert (found.exists, found.files, found.fingerprint, found.free_bytes) == (True, None, "", None)

    def test_is_nothing_where_not_even_that_was_said(self) -> None:
        assert parse_path("path\t/data\n") is None


def test_memory_is_in_bytes() -> None:
    assert parse_meminfo("MemTotal:       1024 kB\nHugePages_Total:       0\n") == {"MemTotal": 2**20}


def test_limits_are_in_bytes_and_may_be_none() -> None:
    assert parse_limits("memlock\t8192\nopen_files\t1024\n") == (8 * 2**20, 1024)
    assert parse_limits("memlock\tunlimited\nopen_files\tunlimited\n") == (-1, -1)
    assert parse_limits("") == (None, None)


def test_the_tightest_group_limits_memory() -> None:
    assert parse_cgroup_memory("limit\tmax\nlimit\t9223372036854771712\nlimit\t68719476736\n") == 64 * 2**30
    assert parse_cgroup_memory("limit\tmax\n") is None


def test_a_port_range_has_two_ends() -> None:
    assert parse_port_range("32768\t60999") == (32768, 60999)
    assert parse_port_range("3") is None
    assert parse_port_range("60999 32768") is None


def test_the_environment_wins_over_nccl_conf() -> None:
    text = "NCCL_DEBUG=INFO\n@file /etc/nccl.conf\nNCCL_DEBUG=WARN\nNCCL_IB_HCA = =mlx5_0\n# NCCL_ALGO=Ring\n"
    assert parse_nccl_settings(text) == {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "=mlx5_0"}


@given(st.text(max_size=200))
def test_garbage_never_raises(text: str) -> None:
    parse_df(text, has_type=True)
    parse_df(text, has_type=False)
    parse_path("path\tx\nexists\tyes\ndf\t" + text)
    parse_meminfo(text)
    parse_limits(f"memlock\t{text}")
    parse_cgroup_memory(f"limit\t{text}")
    parse_port_range(text)
    parse_nccl_settings(text)
    parse_cpus(text)


@pytest.mark.parametrize(
    ("file", "sockets", "cores"),
    [("lscpu-gh200.txt", 1, 72), ("lscpu-a64fx.txt", 4, 48), ("lscpu-xeon-2016.txt", 2, 24)],
)
def test_reads_the_lines_of_many_cpus(file: str, sockets: int, cores: int) -> None:
    assert parse_cpus(recorded("cpus", file)) == (sockets, cores)
