"""The risks of a plan, and the plan to choose for low risk."""

import pytest

from tests.samples import H100, make_plan
from topoplan.planner.risk import SAFE_SHARE, TIGHT_SHARE, WIDE_BAND, first_safe, spare_share, tags_of

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
