"""The order of plans: fastest first, and among equally fast plans more memory headroom, then the simpler plan."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.samples import spec_of
from tests.samples import FULL, H100, NO_RECOMPUTE, make_plan
from topoplan.planner.plan import Plan
from topoplan.planner.predict import memory_of
from topoplan.planner.rank import (
    CAVEAT_COST,
    SAFE_SHARE,
    TIE,
    TIGHT_SHARE,
    WIDE_BAND,
    first_safe,
    has_room,
    on_smaller_card,
    ranked,
    spare_share,
    tags_of,
    with_variant,
)
from topoplan.planner.search import rank
from topoplan.trainers.case import case_of


def plan(speed: float, gib: float = 50.0, *, tp: int = 1, full: bool = False, caveat: bool = False) -> Plan:
    caveats = ("a fault",) if caveat else ()
    made = make_plan(tp=tp, device_gib=gib, recompute=FULL if full else NO_RECOMPUTE, caveats=caveats)
    return replace(made, tokens_per_s_per_gpu=speed)


def speeds(plans: list[Plan]) -> list[float]:
    return [one.tokens_per_s_per_gpu for one in plans]


PLANS = st.lists(
    st.builds(
        plan,
        st.floats(900.0, 1100.0),
        st.floats(20.0, 75.0),
        tp=st.sampled_from([1, 2, 4, 8]),
        full=st.booleans(),
    ),
    max_size=25,
)


def test_more_than_one_percent_faster_always_leads() -> None:
    assert speeds(ranked([plan(980.0, 10.0), plan(1000.0, 70.0)])) == [1000.0, 980.0]


def test_within_one_percent_memory_to_spare_leads() -> None:
    assert speeds(ranked([plan(1000.0, 70.0), plan(995.0, 60.0)])) == [995.0, 1000.0]


def test_less_than_a_gib_to_spare_is_no_reason() -> None:
    simple, involved = plan(995.0, 60.9, tp=1), plan(1000.0, 60.1, tp=4, full=True)
    assert ranked([involved, simple]) == [simple, involved]


def test_as_simple_and_as_large_the_faster_one_leads() -> None:
    assert speeds(ranked([plan(998.0), plan(1000.0), plan(999.0)])) == [1000.0, 999.0, 998.0]


def test_ties_do_not_chain() -> None:
    # Each plan is within 1% of the previous one; the last is 2.4% below the first, so its memory does not move it
    # forward.
    order = ranked([plan(1000.0, 70.0), plan(992.0, 60.0), plan(984.0, 50.0), plan(976.0, 40.0)])
    assert speeds(order) == [992.0, 1000.0, 976.0, 984.0]


@pytest.mark.parametrize(("plain", "leads"), [(999.0, True), (970.0, True), (959.0, False), (900.0, False)])
def test_a_caveat_stands_behind_a_plain_plan_that_is_at_most_3_percent_slower(plain: float, leads: bool) -> None:
    troubled, other = plan(1000.0, 10.0, caveat=True), plan(plain, 70.0)
    assert ranked([troubled, other]) == ([other, troubled] if leads else [troubled, other])


@given(st.lists(st.builds(plan, st.floats(900.0, 1100.0), st.floats(20.0, 75.0), caveat=st.booleans()), max_size=25))
def test_no_caveat_leads_a_plain_plan_within_3_percent_nor_is_it_held_up_by_slower_ones(plans: list[Plan]) -> None:
    order = ranked(plans)
    for place, one in enumerate(order):
        for later in order[place + 1 :]:
            if one.caveats and not later.caveats:
                assert later.tokens_per_s_per_gpu <= one.tokens_per_s_per_gpu * (1.0 - CAVEAT_COST) * (1.0 + 1e-12)
            if later.caveats and not one.caveats:
                limit = later.tokens_per_s_per_gpu * (1.0 - CAVEAT_COST) * (1.0 - TIE)
                assert one.tokens_per_s_per_gpu >= limit * (1.0 - 1e-12)


def test_nothing_to_rank_is_an_empty_order() -> None:
    assert ranked([]) == []


@given(PLANS)
def test_no_plan_stands_ahead_of_one_that_is_more_than_one_percent_faster(plans: list[Plan]) -> None:
    order = speeds(ranked(plans))
    assert sorted(order) == sorted(speeds(plans))
    for position, speed in enumerate(order):
        assert all(speed >= later * (1.0 - TIE) for later in order[position:])


@given(PLANS, st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_the_order_of_the_search(plans: list[Plan], random: Random) -> None:
    shuffled = list(plans)
    random.shuffle(shuffled)
    key = [(p.tokens_per_s_per_gpu, p.memory.device_bytes, p.id) for p in ranked(plans)]
    assert [(p.tokens_per_s_per_gpu, p.memory.device_bytes, p.id) for p in ranked(shuffled)] == key


@given(PLANS)
def test_within_a_tie_the_order_is_by_whole_gib_then_by_complexity(plans: list[Plan]) -> None:
    order = ranked(plans)
    start = 0
    while start < len(order):
        # A tie: the fastest remaining plan, and all plans within 1% of it. They are contiguous.
        fastest = max(speeds(order[start:]))
        tie = [one for one in order[start:] if one.tokens_per_s_per_gpu >= fastest * (1.0 - TIE)]
        assert order[start : start + len(tie)] == tie
        keys = [(one.memory.device_bytes // 2**30, one.layout.complexity) for one in tie]
        assert keys == sorted(keys)
        start += len(tie)


CARD_GIB = H100.memory_bytes / 2**30
MARGIN_GIB = 1.5


def gib_with_spare(share: float) -> float:
    """Return the GiB of a plan that leaves this share of the card beyond the margin of hand-made plans."""
    return CARD_GIB * (1.0 - share) - MARGIN_GIB


@pytest.mark.parametrize(
    ("share", "above", "caveats", "tags"),
    [
        (0.5, 0.1, (), ()),
        (TIGHT_SHARE + 0.001, WIDE_BAND - 0.001, (), ()),
        (TIGHT_SHARE - 0.001, 0.1, (), ("tight",)),
        (0.5, WIDE_BAND + 0.001, (), ("unproven",)),
        (0.5, 0.1, ("a fault",), ("caveat",)),
        (0.0, 0.6, ("a fault",), ("tight", "caveat", "unproven")),
    ],
)
def test_each_risk_has_a_tag(share: float, above: float, caveats: tuple[str, ...], tags: tuple[str, ...]) -> None:
    plan = make_plan(device_gib=gib_with_spare(share), band=(0.9, 1.0 + above), caveats=caveats)
    assert spare_share(plan) == pytest.approx(share)
    assert tags_of(plan) == tags


def test_the_first_plan_without_caveat_and_with_memory_to_spare_is_safe() -> None:
    full = make_plan(device_gib=gib_with_spare(SAFE_SHARE - 0.001))
    faulty = make_plan(tp=2, caveats=("a fault",))
    roomy = make_plan(tp=4, device_gib=gib_with_spare(SAFE_SHARE + 0.001))
    assert first_safe([full, faulty, roomy, roomy]) == 2
    assert first_safe([full, faulty]) is None


@pytest.mark.parametrize("margin", [None, 0.0, 0.07])
def test_a_layout_leaves_room_if_it_fits_on_a_card_with_a_tenth_less_memory(margin: float | None) -> None:
    cluster = {} if margin is None else {"margin": margin}
    spec = spec_of("Qwen/Qwen3-8B", nodes=1, gpu="a100-sxm-40gb", cluster=cluster)
    smaller = on_smaller_card(case_of(spec, "mca"))
    fits = set()
    for found in rank(spec).plans[::7]:
        assert memory_of(smaller, found.layout).fits == has_room(found)
        fits.add(has_room(found))
    assert fits == {True, False}


def test_a_variant_is_behind_all_that_are_as_fast_and_never_first() -> None:
    plans = ranked([plan(1000.0, 70.0), plan(990.0), plan(900.0)])
    variant = plan(995.0, 10.0, full=True)
    assert speeds(with_variant(plans, variant)) == [990.0, 1000.0, 995.0, 900.0]
    assert speeds(with_variant([plan(1000.0, caveat=True)], plan(995.0))) == [1000.0, 995.0]
