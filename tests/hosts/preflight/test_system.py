import shutil
import subprocess
from typing import Any

import pytest

from tests.hosts.fleets import GIB, cluster, facts, fleet, needs, outcome, see
from topoplan.hosts.collect import COLLECT, host_facts
from topoplan.hosts.preflight.system import clock, cpu_cores, host_memory, memlock, shm


@pytest.mark.parametrize(
    ("cores", "spec", "expected"),
    [(64, None, "ok"), (64, 64, "ok"), (32, 64, "warning"), (1, None, "warning"), (None, 64, "skipped")],
)
def test_cores(cores: int | None, spec: int | None, expected: str) -> None:
    assert outcome(cpu_cores, fleet(facts(cpu_cores=cores), of=cluster(nodes=1, cpu_cores=spec))) == expected


@pytest.mark.parametrize(
    ("changes", "offloads", "spec", "expected"),
    [
        ({}, 0.0, None, "ok"),
        ({}, 500 * GIB, 1000 * GIB, "ok"),
        ({}, 950 * GIB, None, "failure"),
        ({"cgroup_memory_bytes": 400 * GIB}, 500 * GIB, None, "failure"),
        ({"memory_available_bytes": None}, 950 * GIB, None, "ok"),
        ({"memory_bytes": 500 * GIB}, 0.0, 1000 * GIB, "warning"),
        ({"cgroup_memory_bytes": 400 * GIB}, 0.0, 1000 * GIB, "warning"),
        ({"memory_bytes": None, "memory_available_bytes": None}, 0.0, None, "skipped"),
    ],
)
def test_host_memory(changes: dict[str, Any], offloads: float, spec: int | None, expected: str) -> None:
    place = cluster(nodes=1, host_memory_bytes=spec)
    assert outcome(host_memory, fleet(facts(**changes), wanted=needs(host_bytes=offloads), of=place)) == expected


@pytest.mark.parametrize(
    ("whole", "free", "per_node", "expected"),
    [
        (2 * GIB, 2 * GIB, 2, "ok"),
        (2 * GIB, None, 2, "ok"),
        (64 * 2**20, 64 * 2**20, 2, "failure"),
        (64 * 2**20, 64 * 2**20, 1, "warning"),
        (2 * GIB, 100, 2, "failure"),
        (None, None, 2, "skipped"),
    ],
)
def test_shared_memory(whole: int | None, free: int | None, per_node: int, expected: str) -> None:
    place = cluster(nodes=1, gpus_per_node=per_node)
    assert outcome(shm, fleet(facts(shm_bytes=whole, shm_free_bytes=free), of=place)) == expected


def test_small_shared_memory_of_a_container_is_its_start_option() -> None:
    found = see(shm, fleet(facts(shm_bytes=2**26, in_container=True)))
    assert "--ipc=host" in found.remedy
    assert "64 MiB" in found.what


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(-1, "ok"), (64 * 2**10, "failure"), (8 * 2**20, "failure"), (GIB, "warning"), (None, "skipped")],
)
def test_locked_memory_counts_for_rdma(limit: int | None, expected: str) -> None:
    hosts = (facts(0, memlock_bytes=limit), facts(1))
    assert outcome(memlock, fleet(*hosts)) == expected
    assert outcome(memlock, fleet(*hosts, of=cluster(kind="ethernet"))) is None
    assert outcome(memlock, fleet(hosts[0])) is None


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_the_limit_is_the_one_that_a_node_script_leaves(shell: str) -> None:
    """Node scripts raise the limit if the system lets them: only what remains after that stops a run."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")

    def run(*words: str) -> bytes:
        return subprocess.run([*words], capture_output=True, check=True).stdout

    left = run("bash", "-c", "ulimit -S -l 64; ulimit -l unlimited 2>/dev/null; ulimit -l").decode().strip()
    said = host_facts(run(shell, "-c", f"ulimit -S -l 64\n{COLLECT}", "sh", "machine"))
    assert said.memlock_bytes == (-1 if left == "unlimited" else int(left) * 1024)


@pytest.mark.parametrize(
    ("offset_s", "expected"), [(0.0, "ok"), (4.0, "ok"), (-4.0, "ok"), (60.0, "warning"), (-60.0, "warning")]
)
def test_clocks_apart(offset_s: float, expected: str) -> None:
    hosts = [facts(number, clock_s=1000.0 + (offset_s if number == 1 else 0.0)) for number in range(3)]
    spans = dict.fromkeys(range(3), (999.5, 1000.2))
    assert outcome(clock, fleet(*hosts, query_times_s=spans), 1) == expected
    assert outcome(clock, fleet(*hosts, query_times_s=spans), 0) == "ok"


def clocks(*ahead_s: float) -> list[tuple[str, str]]:
    """Return outcome and text of each host's check, for clocks ahead of this machine's by so much."""
    hosts = [facts(number, clock_s=1000.0 + ahead) for number, ahead in enumerate(ahead_s)]
    one = fleet(*hosts, query_times_s=dict.fromkeys(range(len(hosts)), (1000.0, 1000.1)))
    found = [see(clock, one, number) for number in range(len(hosts))]
    return [(result.outcome, f"{result.what}; {result.remedy}".removesuffix("; ")) for result in found if result]


def test_of_two_clocks_that_are_apart_neither_is_blamed_without_a_third() -> None:
    """Here this machine's clock differs from both."""
    both = "either may be the wrong one; start chrony or ntpd on all hosts"
    assert clocks(100.0, 190.0) == [
        ("warning", f"its clock is 88.9s behind n1: {both}"),
        ("warning", f"its clock is 88.9s ahead of n0: {both}"),
    ]


def test_of_two_clocks_this_machines_own_one_may_decide() -> None:
    assert clocks(0.0, 90.0) == [
        ("ok", "in step with this machine"),
        ("warning", "its clock is 89.9s ahead of n0 and this machine; start chrony or ntpd there"),
    ]
    assert clocks(0.0, -90.0)[1][1].startswith("its clock is 89s behind n0 and this machine; ")
    # In step with each of them, ours cannot tell which is wrong.
    assert [text.split("; ")[0].split(": ")[1] for _, text in clocks(-3.5, 4.0)] == ["either may be the wrong one"] * 2


def test_two_clocks_may_not_differ_by_more_than_several_may() -> None:
    """Compared with the median, each would be only half as far off."""
    assert [outcome for outcome, _ in clocks(100.0, 109.0)] == ["warning", "warning"]
    assert [outcome for outcome, _ in clocks(100.0, 104.0)] == ["ok", "ok"]


def test_the_odd_clock_is_named_where_most_agree() -> None:
    found = clocks(50.0, 140.0, 51.0, 50.0)
    assert [outcome for outcome, _ in found] == ["ok", "warning", "ok", "ok"]
    assert found[1][1].startswith("its clock is 88.9s ahead of the others; ")
    # The middle one agrees with both others, which do not agree with each other.
    assert [outcome for outcome, _ in clocks(50.0, 54.5, 59.0)] == ["warning", "ok", "warning"]
    # Two and two: this machine's clock decides.
    assert [outcome for outcome, _ in clocks(0.0, 0.0, 60.0, 60.0)] == ["ok", "ok", "warning", "warning"]
    assert {outcome for outcome, _ in clocks(30.0, 30.0, 60.0, 60.0)} == {"warning"}


def test_one_clock_alone_is_compared_with_none() -> None:
    hosts = (facts(0, clock_s=None), facts(1))
    assert outcome(clock, fleet(*hosts, query_times_s=dict.fromkeys(range(2), (999.9, 1000.1))), 1) == "skipped"


def test_a_slow_answer_is_no_wrong_clock() -> None:
    """The second host was read 20 s later, and the round trip of the third took 30 s."""
    hosts = [facts(0, clock_s=1000.0), facts(1, clock_s=1020.0), facts(2, clock_s=1001.0)]
    spans = {0: (999.9, 1000.1), 1: (1019.9, 1020.1), 2: (1000.0, 1030.0)}
    assert [outcome(clock, fleet(*hosts, query_times_s=spans), number) for number in range(3)] == ["ok", "ok", "ok"]


def test_a_clock_that_is_not_known() -> None:
    hosts = (facts(0, clock_s=None), facts(1))
    spans = dict.fromkeys(range(2), (999.9, 1000.1))
    assert outcome(clock, fleet(*hosts, query_times_s=spans)) == "skipped"
    assert outcome(clock, fleet(*hosts)) is None
