"""The catalog's profiles, and profiles of a user's own on top of them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import spec_of
from topoplan import catalog
from topoplan.catalog import profile_entries
from topoplan.planner.predict import predict
from topoplan.specs import known
from topoplan.specs.constants import BANDS, CONSTANTS, OF_MEMORY, OF_TIME
from topoplan.specs.gpu_profile import (
    SHARDED_BANDS,
    WIDER_FOR_FEW,
    WIDER_FOR_NONE,
    WIDEST,
    Profile,
    band_keys,
    notes_on_bands,
    profile_of,
)
from topoplan.specs.profile import OwnProfile
from topoplan.specs.profile_form import ProfileForm

H100 = known.gpu("h100-sxm-80gb")
KINDS = {"published", "fitted", "assumed"}


def own(**constants: Any) -> OwnProfile:
    return OwnProfile(gpu="h100-sxm-80gb", constants=constants, source="ours", path="mine.yaml")


def test_profiles_that_are_a_cards_are_no_architectures() -> None:
    assert set(profile_entries()) - set(catalog.architectures()) == {
        "a100-pcie",
        "blackwell-ultra",
        "ga10x",
        "h20",
        "l40s",
    }
    assert {known.gpu(name).architecture for name in catalog.gpu_names()} == set(catalog.architectures())


@pytest.mark.parametrize("name", list(profile_entries()))
def test_every_constant_says_where_it_comes_from(name: str) -> None:
    entry = profile_entries()[name]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"])
    assert set(entry["constants"]) <= set(CONSTANTS)
    assert "kin" in entry or set(entry["constants"]) == set(CONSTANTS)
    assert set(entry["bands"]) == set(BANDS)
    for constant in entry["constants"].values():
        if "kin" in constant:
            assert set(constant) == {"kin"}
            assert constant["kin"] in profile_entries()
        else:
            assert constant["kind"] in KINDS
            assert len(constant["source"]) > 10


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_every_constant_is_one_that_a_user_could_give(name: str) -> None:
    profile = profile_of(known.gpu(name))
    numbers = {key: getattr(profile, key) for key in (*CONSTANTS, *BANDS)}
    assert ProfileForm.model_validate({"gpu": name, **numbers}).given() == {"gpu": name, **numbers}


def test_a_constant_of_the_kin_is_the_kins_and_says_so() -> None:
    ada, ampere = profile_of(known.gpu("rtx4090-24gb")), profile_of(known.gpu("a100-sxm-80gb"))
    assert ada.memory_efficiency == ampere.memory_efficiency
    assert ada.origins["memory_efficiency"].kin == "ampere"
    assert ada.origins["memory_efficiency"].source == ampere.origins["memory_efficiency"].source
    assert ada.origins["memory_efficiency"].kind_of_kin == ampere.origins["memory_efficiency"].kind
    volta = profile_of(known.gpu("v100-sxm-32gb"))
    assert volta.gemm_tile == ada.gemm_tile


def test_cards_whose_chips_are_unlike_the_measured_ones_do_not_have_their_bands() -> None:
    a6000, a100 = profile_of(known.gpu("a6000-48gb")), profile_of(known.gpu("a100-sxm-80gb"))
    assert (a6000.name, a6000.kin) == ("ga10x", "ampere")
    assert a6000.gemm_efficiency == a100.gemm_efficiency
    assert a6000.time_band == min(WIDER_FOR_NONE * a100.time_band, WIDEST)


@pytest.mark.parametrize(("like", "kin"), [("a100-sxm-80gb", "ampere"), ("h100-sxm-80gb", "hopper")])
def test_a_card_that_the_catalog_does_not_know_does_not_have_the_bands_of_those_that_were_measured(
    like: str, kin: str
) -> None:
    usual = known.gpu(like)
    card = replace(usual, name="some-card")
    profile, theirs = profile_of(card), profile_of(usual)
    assert profile.gemm_efficiency == theirs.gemm_efficiency
    assert profile.time_band == min(WIDER_FOR_NONE * theirs.time_band, WIDEST)
    assert profile.memory_band == WIDER_FOR_NONE * theirs.memory_band
    assert profile.sharded_memory_band == theirs.sharded_memory_band
    spec = spec_of()
    (note,) = notes_on_bands(profile, card.name, band_keys(spec.model, spec.job))
    assert note == f"some-card has no measured runs: bands from {kin}, widened"


def test_a_card_of_an_architecture_without_runs_has_its_bands_once_widened() -> None:
    ada = known.gpu("rtx4090-24gb")
    profile = profile_of(replace(ada, name="some-card"))
    assert (profile.kin, profile.time_band) == ("ampere", profile_of(ada).time_band)


def test_there_is_one_profile_of_a_gpu_and_of_a_file() -> None:
    mine = own(gemm_efficiency=0.8)
    assert profile_of(H100) is profile_of(H100)
    assert profile_of(H100, mine) is profile_of(H100, mine)
    assert profile_of(H100, mine) is not profile_of(H100)


def test_own_constants_go_over_the_catalogs_and_widen_the_bands_of_what_depends_on_them() -> None:
    plain, mine = profile_of(H100), profile_of(H100, own(gemm_efficiency=0.8))
    assert (mine.gemm_efficiency, mine.fp8_gemm_efficiency) == (0.8, plain.fp8_gemm_efficiency)
    assert mine.origins["gemm_efficiency"].kind == "measured"
    assert "mine.yaml: ours" in mine.origins["gemm_efficiency"].source
    slower, fuller = mine, profile_of(H100, own(fragmentation=0.2))
    for key in BANDS:
        wider = pytest.approx(min(getattr(plain, key) * WIDER_FOR_FEW, WIDEST))
        is_of_time = key.endswith("time_band")
        assert getattr(slower, key) == (wider if is_of_time else getattr(plain, key))
        assert getattr(fuller, key) == (getattr(plain, key) if is_of_time else wider)


@pytest.mark.parametrize("key", [key for key in CONSTANTS if not (key in OF_MEMORY and key in OF_TIME)])
def test_memory_and_step_time_depend_on_the_constants_that_are_said_to_be_theirs_alone(key: str) -> None:
    usual = getattr(profile_of(H100), key)
    other = not usual if isinstance(usual, bool) else tuple(2 * one for one in usual) if isinstance(usual, tuple) else 2
    other = other if other != 2 else type(usual)(usual / 2 + (usual == 0))
    for model, job in (("Qwen/Qwen3-8B", {}), ("Qwen/Qwen3-30B-A3B", {"precision": "fp8"})):
        for layout in ({"backend": "megatron", "tp": 2}, {"backend": "fsdp2"}):
            spec = spec_of(model, **job)
            plans = [predict(replace(spec, profile=profile), layout) for profile in (None, own(**{key: other}))]
            once, now = [(plan.memory.device_bytes, plan.time.step_s)[key in OF_MEMORY] for plan in plans]
            assert once == now


def test_own_constants_that_are_the_catalogs_change_nothing() -> None:
    plain = profile_of(H100)
    mine = profile_of(H100, own(**{key: getattr(plain, key) for key in CONSTANTS}))
    assert all(getattr(mine, key) == getattr(plain, key) for key in (*CONSTANTS, *BANDS))


def test_a_band_of_the_users_own_stands() -> None:
    mine = profile_of(H100, own(gemm_efficiency=0.8, fragmentation=0.2, time_band=0.07))
    assert mine.time_band == 0.07
    assert mine.memory_band > profile_of(H100).memory_band


def notes(gpu: str, profile: Profile | None = None, **job: Any) -> tuple[str, ...]:
    spec = spec_of(job.pop("model", "Qwen/Qwen3-8B"), gpu=gpu, **job)
    keys = band_keys(spec.model, spec.job)
    return notes_on_bands(profile or profile_of(spec.cluster.gpu), spec.cluster.gpu.name, keys)


def test_a_gpu_without_measured_runs_says_whose_bands_it_has() -> None:
    assert notes("rtx4090-24gb") == ("rtx4090-24gb has no measured runs: bands from ampere, widened",)
    assert notes("h100-sxm-80gb") == ()
    (note,) = notes("a100-sxm-80gb", model="Qwen/Qwen3-30B-A3B")
    assert note == "a100-sxm-80gb has no measured speed of a mixture of experts: band from blackwell, widened"


def test_a_file_of_the_users_own_is_named() -> None:
    (note,) = notes("h100-sxm-80gb", profile_of(H100, own(gemm_efficiency=0.8)))
    assert note == f"1 of {len(CONSTANTS)} constants from mine.yaml (ours); error band of step time widened"
    (note,) = notes("h100-sxm-80gb", profile_of(H100, own(fp8_transposes=False)))
    assert note.endswith("; error bands of memory and step time widened")


def test_a_mixture_of_experts_has_bands_of_its_own() -> None:
    spec = spec_of("Qwen/Qwen3-30B-A3B", precision="fp8")
    assert band_keys(spec.model, spec.job) == ("moe_memory_band", "moe_time_band")


def test_adapters_on_megatron_have_a_band_of_memory_of_their_own() -> None:
    for model, time_band in (("Qwen/Qwen3-30B-A3B", "moe_time_band"), ("Qwen/Qwen3-8B", "time_band")):
        spec = spec_of(model, finetuning="lora")
        assert band_keys(spec.model, spec.job) == ("adapter_memory_band", time_band)


def test_a_gpu_without_measured_runs_of_these_backends_says_whose_band_it_has() -> None:
    spec = spec_of("Qwen/Qwen3-8B", gpu="rtx4090-24gb")
    profile = profile_of(spec.cluster.gpu)
    (note,) = notes_on_bands(profile, spec.cluster.gpu.name, SHARDED_BANDS)
    assert note == "rtx4090-24gb has no measured runs: band from ampere, widened"
