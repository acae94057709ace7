import pytest

from tests.samples import FULL, SELECTIVE, make_plan
from topoplan.layout.layout import Layout, Recompute
from topoplan.planner.plan import Time
from topoplan.report.text import band, billions, counted, gib, hours, interval, layout_label, significant, time_shares


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (0.9996, "1.00"),
        (3.214, "3.21"),
        (12.34, "12.3"),
        (999.6, "1,000"),
        (12345.6, "12,346"),
    ],
)
def test_significant_shows_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert significant(value) == shown


def test_sizes_and_counts() -> None:
    assert gib(1.5 * 2**30) == "1.5"
    assert billions(8_190_735_360) == "8.19B"
    assert billions(671_026_419_200) == "671B"
    assert counted(1, "layout") == "1 layout"
    assert counted(1234, "layout") == "1,234 layouts"


@pytest.mark.parametrize(("value", "shown"), [(0.0829, "0.08"), (4.178, "4.18"), (16.0, "16.0"), (1234.4, "1,234")])
def test_hours_keep_what_matters(value: float, shown: str) -> None:
    assert hours(value) == shown


def test_an_interval_has_the_same_decimals_on_both_sides() -> None:
    assert interval(9.5, 12.25) == "9.50-12.25"


def test_a_band_is_one_figure_only_when_both_sides_agree() -> None:
    assert band(Time(step_s=2.0, band_s=(1.8, 2.2), parts_s={})) == "±10%"
    assert band(Time(step_s=2.0, band_s=(1.8, 2.4), parts_s={})) == "-10+20%"
    assert band(Time(step_s=2.0, band_s=(1.8, 2.2), parts_s={}), ascii_only=True) == "+-10%"


def test_a_layout_label_is_the_id_with_spaces() -> None:
    assert layout_label(make_plan(tp=4).layout) == "tp4 pp1 dp8 mbs1"
    assert layout_label(make_plan(tp=4, recompute=SELECTIVE).layout) == "tp4 pp1 dp8 mbs1 sel:core_attn"
    assert layout_label(make_plan(recompute=FULL, optimizer_offload_fraction=0.5).layout) == (
        "tp1 pp1 dp32 mbs1 full offload50"
    )
    block = Recompute(granularity="full", method="block", num_layers=4)
    assert layout_label(make_plan(pp=2, recompute=block).layout) == "tp1 pp2 dp16 mbs1 full:block4"
    sums = Layout.of(backend="fsdp2", dp=8, gradient_accumulation_steps=2, recompute=FULL, sync_each_batch=False)
    assert layout_label(sums) == "fsdp2 dp8 mbs1 full nosync"


def test_time_shares_are_sorted_and_leave_out_crumbs() -> None:
    shares = time_shares({"tp_comm": 0.2, "compute": 1.5, "dp_comm": 0.299, "optimizer": 0.001, "other": 0.0}, 2.0)
    assert shares == ["compute 75", "dp 15", "tp 10"]
