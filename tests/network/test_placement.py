from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.layout.layout import Layout
from topoplan.network.placement import Group, GroupName, Span, first_ranks, group, span

DEGREE = st.sampled_from([1, 2, 3, 4, 8])
NAMES = get_args(GroupName)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts with a valid expert grid."""
    tp, cp, dp, pp = (draw(DEGREE) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in (1, 2, 4, tp) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (etp * n) == 0]))
    return Layout.of(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)


@given(layouts(), st.sampled_from(NAMES))
def test_the_groups_of_one_kind_partition_the_world(layout: Layout, name: GroupName) -> None:
    shape = group(layout, name)
    members = [rank for first in first_ranks(shape, layout.world_size) for rank in shape.ranks(first)]
    assert sorted(members) == list(range(layout.world_size))
    numbers = [{shape.number(rank) for rank in shape.ranks(first)} for first in first_ranks(shape, layout.world_size)]
    assert numbers == [{number} for number in range(len(numbers))]


@given(layouts())
def test_group_sizes_multiply_to_the_world_on_both_grids(layout: Layout) -> None:
    size = {name: group(layout, name).size for name in NAMES}
    assert size["tp"] * size["dp_cp"] * size["pp"] == layout.world_size
    assert size["cp"] * size["dp"] == size["dp_cp"]
    assert size["etp"] * size["ep"] * size["edp"] * size["pp"] == layout.world_size
    assert size["tp_ep"] == size["etp"] * size["ep"]
    assert size["edp"] == layout.expert_dp


def test_tensor_parallel_is_innermost_and_pipeline_outermost() -> None:
    layout = Layout.of(tp=4, pp=2, dp=4)
    assert list(group(layout, "tp").ranks(0)) == [0, 1, 2, 3]
    assert list(group(layout, "pp").ranks(1)) == [1, 17]
    assert list(group(layout, "dp").ranks(0)) == [0, 4, 8, 12]
    assert first_ranks(group(layout, "dp"), 32) == [0, 1, 2, 3, 16, 17, 18, 19]


def spread(shape: Group, domain: int) -> list[Counter[int]]:
    """Return the members of every group by domain, in a world that both group and domain divide."""
    world = shape.size * shape.stride * domain
    return [Counter(rank // domain for rank in shape.ranks(first)) for first in first_ranks(shape, world)]


@given(size=st.integers(1, 12), stride=st.integers(1, 12), domain=st.integers(1, 16))
def test_the_span_is_that_of_the_worst_group_in_the_world(size: int, stride: int, domain: int) -> None:
    shape = Group(size, stride)
    groups = spread(shape, domain)
    found = span(shape, domain)
    assert found.domains == max(len(members) for members in groups)
    assert found.members == min(min(m.values()) for m in groups if len(m) == found.domains)
    assert found.largest in {max(m.values()) for m in groups if len(m) == found.domains}


@pytest.mark.parametrize(
    ("shape", "domain", "expected"),
    [
        (Group(8, 1), 8, Span(1, 8, 8)),
        (Group(4, 8), 8, Span(4, 1, 1)),
        (Group(8, 4), 8, Span(4, 2, 2)),
        (Group(2, 1), 7, Span(2, 1, 1)),  # seven GPUs a node: ranks 6 and 7 are on two of them
        (Group(14, 1), 7, Span(2, 7, 7)),
        (Group(3, 4), 8, Span(2, 1, 2)),
        (Group(1, 64), 8, Span(1, 1, 1)),
    ],
)
def test_spans_of_usual_groups(shape: Group, domain: int, expected: Span) -> None:
    assert span(shape, domain) == expected
