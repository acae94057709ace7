from collections import defaultdict

import networkx as nx
import pytest

from topoplan.network.patterns import MESSAGES, _two_trees


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 31])
def test_both_trees_reach_every_domain_and_no_domain_is_inside_both(size: int) -> None:
    edges = list(_two_trees(size))
    for tree in (edges[::2], edges[1::2]):
        assert len(tree) == size - 1
        assert nx.is_tree(nx.Graph(tree))
        assert {child for child, _ in tree} | {parent for _, parent in tree} == set(range(size))
    children: dict[int, int] = defaultdict(int)
    for _, parent in edges:
        children[parent] += 1
    assert max(children.values()) <= 3


def test_rings_leave_a_domain_where_they_enter_the_next_and_carry_a_part_each() -> None:
    messages = {(here, there): load for here, there, load in MESSAGES["ring"](range(8), 4)}
    assert messages[0, 4] == messages[4, 0] == messages[3, 7] == 1 / 4
    assert messages[0, 1] == 3 / 4  # not of the ring that begins its way at rank 1


def test_an_all_to_all_sends_equal_parts_and_neighbours_everything() -> None:
    exchanged = list(MESSAGES["all-to-all"]([2, 4, 6], 8))
    assert len(exchanged) == 6
    assert {load for _, _, load in exchanged} == {1 / 3}
    assert list(MESSAGES["neighbour"]([2, 4, 6], 8)) == [(2, 4, 1.0), (4, 6, 1.0), (6, 2, 1.0)]
