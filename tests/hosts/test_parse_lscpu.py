from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import LSCPU, recorded
from topoplan.hosts.parse_lscpu import parse_cpus


@pytest.mark.parametrize(
    ("file", "sockets", "cores"),
    [("lscpu-gh200.txt", 1, 72), ("lscpu-a64fx.txt", 4, 48), ("lscpu-xeon-2016.txt", 2, 24)],
)
def test_reads_the_lines_of_many_cpus(file: str, sockets: int, cores: int) -> None:
    found = parse_cpus(recorded("cpus", file))
    assert (found.sockets, found.cores) == (sockets, cores)


def test_reads_json_at_any_depth() -> None:
    found = parse_cpus(json.dumps(LSCPU))
    assert (found.sockets, found.cores) == (2, 112)
    nested = {"lscpu": [{"field": "Vendor ID:", "data": "x", "children": LSCPU["lscpu"]}]}
    assert parse_cpus(json.dumps(nested)) == found


@given(st.text(max_size=200))
def test_garbage_is_unknown_and_never_raises(text: str) -> None:
    parse_cpus(text)
    assert parse_cpus("[" * 5000).sockets is None
    assert parse_cpus('{"field": 1, "data": []}').cores is None
