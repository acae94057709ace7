"""Error bands: the rule, and that the catalog's bands are those that the measured runs give."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from tests.shipped import graded
from topoplan.catalog import profile_entries
from topoplan.planner.bands import NARROWEST, EarnedBand, earned_bands, profiles_text
from topoplan.planner.measured import parse_runs
from topoplan.planner.validate import ALLOCATED, Figure, validate
from topoplan.specs.constants import BANDS
from topoplan.specs.gpu_profile import WIDER_FOR_NONE, WIDEST

TOLERANCE = 0.03
"""How much a band may be off before the catalog has to be regenerated."""


@cache
def shipped() -> tuple[EarnedBand, ...]:
    return earned_bands(graded().figures)


def test_the_bands_of_the_catalog_are_what_the_measured_runs_give() -> None:
    stale = [
        f"{band.entry} {band.key}: {band.stored:.2f} stored, {band.value:.2f} earned"
        for band in shipped()
        if abs(band.value - band.stored) > TOLERANCE
    ]
    assert not stale, "run `topoplan validate --bands -o topoplan/catalog/profiles.json`"


def test_the_catalog_says_how_many_figures_grade_each_band() -> None:
    for band in shipped():
        assert profile_entries()[band.entry]["bands"][band.key]["figures"] == band.figures


def test_the_text_of_the_catalog_is_the_one_that_is_written() -> None:
    stored = [
        EarnedBand(entry=b.entry, key=b.key, value=b.stored, figures=b.figures, stored=b.stored) for b in shipped()
    ]
    text = profiles_text(stored)
    assert json.loads(text) == profile_entries()
    assert profiles_text(stored) == text


def figure(error: float, *, entry: str = "blackwell", band: str = "time_band", setup_key: str = "") -> Figure:
    kind = "throughput bf16" if "time" in band else ALLOCATED
    return Figure(
        id="x", family="f", kind=kind, unit="", predicted=1.0 + error, measured=1.0, entry=entry, band=band,
        setup_key=setup_key or f"{entry}{error}",
    )  # fmt: skip


def band(figures: Iterable[Figure], entry: str, key: str = "time_band") -> float:
    return next(b.value for b in earned_bands(list(figures)) if (b.entry, b.key) == (entry, key))


TEN = [0.11, -0.12, 0.13, -0.14, 0.15, -0.16, 0.17, -0.18, 0.19, -0.4]


def test_many_figures_earn_their_90th_percentile() -> None:
    assert band(map(figure, TEN), "blackwell") == pytest.approx(0.19)


def test_few_figures_take_the_kins_band_widened_unless_their_own_middle_is_wider() -> None:
    kin = [figure(error) for error in TEN]
    few = [figure(error, entry="hopper") for error in (0.02, -0.03, 0.9)]
    assert band(kin + few, "hopper") == pytest.approx(0.24)  # 0.19 * 1.25, upwards
    wide = [figure(error, entry="hopper") for error in (0.4, -0.5)]
    assert band(kin + wide, "hopper") == pytest.approx(0.45)


def test_no_figure_takes_the_kins_band_widened_more_and_never_beyond_the_widest() -> None:
    kin = [figure(error) for error in TEN]
    assert band(kin, "ampere") == pytest.approx(WIDER_FOR_NONE * 0.19)
    assert band(kin, "ada") == WIDEST  # from Ampere's, which is widened already
    assert band([], "blackwell") == WIDEST


def test_no_band_is_narrower_than_its_floor() -> None:
    for key in BANDS:
        assert band([figure(0.001, band=key, setup_key=str(n)) for n in range(9)], "blackwell", key) == NARROWEST[key]


def test_of_runs_that_are_alike_in_all_that_is_stated_the_fastest_counts() -> None:
    slow = [figure(error, setup_key=f"a{n}") for n in range(5) for error in (1.3, 0.2, 0.5)]
    assert band(slow, "blackwell") == pytest.approx(0.2)


def test_a_band_of_memory_holds_the_truth_around_the_prediction() -> None:
    short = [figure(-0.2, band="memory_band", setup_key=str(n)) for n in range(5)]
    assert band(short, "blackwell", "memory_band") == pytest.approx(0.25)  # 1 / 0.8 - 1


def row(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "document": {
            "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1},
            "model": {"name": more.pop("model", "Qwen/Qwen3-8B")},
            "job": {"seq_len": 4096, "global_batch_size": 64, "precision": more.pop("precision", "bf16")},
            "layout": {"backend": "megatron", "tp": 2},
        },
        "measured": {"step_s": 4, "reserved_gib": 40},
        **more,
    }


def test_a_figure_grades_the_band_of_its_gpu_and_kind_of_job() -> None:
    rows = [
        row("dense"),
        row("fp8", precision="fp8"),
        row("experts", model="Qwen/Qwen3-30B-A3B", precision="fp8"),
        row("slowed", slowed="deterministic algorithms"),
    ]
    figures = validate(list(parse_runs("\n".join(map(json.dumps, rows)), name="runs.jsonl"))).figures
    assert {figure.entry for figure in figures} == {"hopper"}
    assert [(figure.id, figure.band) for figure in figures] == [
        ("dense", "memory_band"),
        ("dense", "time_band"),
        ("fp8", "memory_band"),
        ("fp8", "eight_bit_time_band"),
        ("experts", "moe_memory_band"),
        ("experts", "moe_time_band"),
        ("slowed", "memory_band"),
        ("slowed", ""),
    ]


def test_the_memory_of_plans_that_split_data_alone_is_graded_by_all_entries_together() -> None:
    figures = [figure(error, entry="hopper", band="sharded_memory_band") for error in (-0.1, -0.2)]
    figures += [figure(error, entry="ampere", band="sharded_memory_band") for error in (0.05, -0.05, 0.02)]
    for entry in ("blackwell", "hopper", "ada"):
        assert band(figures, entry, "sharded_memory_band") == pytest.approx(0.25)  # 1 / (1 - 0.2) - 1


def test_plans_of_both_kinds_grade_bands_of_their_own() -> None:
    band_of = {figure.id: figure.band for figure in graded().figures if not figure.kind.startswith("throughput")}
    assert band_of["simumax-b200-llama3_70b_l12_tp1_pp2_dp4_mbc4_cef"] == "memory_band"
    assert band_of["swift-train-packing-llm"] == "sharded_memory_band"
