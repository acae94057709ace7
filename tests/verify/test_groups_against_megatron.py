"""Compare the ranks of each group with megatron-core's own RankGenerator."""

import random
from typing import get_args

import pytest

from topoplan.layout.layout import Layout
from topoplan.network.placement import GroupName, first_ranks, group

pytestmark = pytest.mark.verify

DENSE_TOKENS: dict[GroupName, str] = {"tp": "tp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "pp": "pp"}
EXPERT_TOKENS: dict[GroupName, str] = {"etp": "tp", "ep": "ep", "tp_ep": "tp-ep", "edp": "dp", "pp": "pp"}
LAYOUTS = 4000


@pytest.fixture(scope="module")
def rank_generator() -> type:
    reason = "megatron-core is not installed (the verify extra has it)"
    return pytest.importorskip("megatron.core.parallel_state", reason=reason).RankGenerator


def sampled_layouts() -> list[Layout]:
    """Return layouts of up to 768 ranks, powers of two and others, each with a matching expert grid."""
    rng = random.Random(20)
    layouts: set[Layout] = set()
    while len(layouts) < LAYOUTS:
        tp, cp, dp, pp = (rng.choice([1, 1, 2, 2, 3, 4, 6, 7, 8, 12, 16]) for _ in range(4))
        stage = tp * cp * dp
        if stage * pp > 768:
            continue
        etp = rng.choice([n for n in (1, 2, tp) if stage % n == 0])
        ep = rng.choice([n for n in range(1, stage + 1) if stage % (n * etp) == 0])
        layouts.add(Layout.of(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp))
    return sorted(layouts, key=repr)


def test_every_kind_of_group_is_compared() -> None:
    assert {*DENSE_TOKENS, *EXPERT_TOKENS} == set(get_args(GroupName))


def our_groups(layout: Layout, name: GroupName) -> list[list[int]]:
    shape = group(layout, name)
    return sorted(list(shape.ranks(first)) for first in first_ranks(shape, layout.world_size))


def test_groups_of_the_dense_grid_are_those_of_megatron(rank_generator: type) -> None:
    for layout in sampled_layouts():
        theirs = rank_generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order="tp-cp-ep-dp-pp")
        for name, token in DENSE_TOKENS.items():
            assert our_groups(layout, name) == sorted(theirs.get_ranks(token)), (layout, name)


def test_groups_of_the_expert_grid_are_those_of_megatron(rank_generator: type) -> None:
    for layout in sampled_layouts():
        theirs = rank_generator(
            tp=layout.etp, ep=layout.ep, dp=layout.expert_dp, pp=layout.pp, cp=1, order="tp-cp-ep-dp-pp"
        )
        for name, token in EXPERT_TOKENS.items():
            assert our_groups(layout, name) == sorted(theirs.get_ranks(token)), (layout, name)
