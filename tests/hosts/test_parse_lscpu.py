import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import recorded
from topoplan.hosts.parse_lscpu import parse_cpus


@pytest.mark.parametrize(
    ("file", "sockets", "cores"),
    [("lscpu-gh200.txt", 1, 72), ("lscpu-a64fx.txt", 4, 48), ("lscpu-xeon-2016.txt", 2, 24)],
)
def test_reads_the_lines_of_many_cpus(file: str, sockets: int, cores: int) -> None:
    assert parse_cpus(recorded("cpus", file)) == (sockets, cores)


@given(st.text(max_size=200))
def test_garbage_is_unknown_and_never_raises(text: str) -> None:
    parse_cpus(text)
