import pytest

from tests.hosts.fleets import facts, fleet
from topoplan.hosts.preflight.fleet import most_common, names, version


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.21.5", (2, 21, 5)),
        ("2.21.5+cuda12.4", (2, 21, 5)),
        ("5.15.0-105-generic", (5, 15, 0)),
        ("0.16.0rc1", (0, 16, 0)),
        ("0.10.0.dev0", (0, 10, 0)),
        ("unknown", ()),
        ("", ()),
        ("9" * 5000, (999999999,)),
    ],
)
def test_the_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers


def test_the_host_that_differs_from_most_is_the_odd_one() -> None:
    of = fleet(facts(0, kernel="5"), facts(1, kernel="6"), facts(2, kernel="6"))
    assert names(of.majority_against(of.nodes[0], lambda node: node.facts.kernel)) == "n1, n2"
    assert of.majority_against(of.nodes[1], lambda node: node.facts.kernel) == ()


def test_of_two_hosts_the_second_one_differs() -> None:
    of = fleet(facts(0, kernel="5"), facts(1, kernel="6"))
    assert of.majority_against(of.nodes[0], lambda node: node.facts.kernel) == ()
    assert names(of.majority_against(of.nodes[1], lambda node: node.facts.kernel)) == "n0"


def test_who_does_not_know_is_left_out() -> None:
    of = fleet(facts(0, cpu_cores=None), facts(1, cpu_cores=None), facts(2, cpu_cores=8), facts(3, cpu_cores=None))
    assert [of.majority_against(node, lambda one: one.facts.cpu_cores) for node in of.nodes] == [()] * 4
    assert most_common([None, None]) is None
