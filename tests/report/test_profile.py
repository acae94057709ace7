from pathlib import Path

from tests.report.printed import printed
from topoplan import catalog
from topoplan.report.profile import (
    kinds_text,
    print_profile,
    print_profiles,
    profile_text,
    profile_to_dict,
    profiles_to_dict,
    shown_value,
    unit,
)
from topoplan.specs import known
from topoplan.specs.constants import BANDS, CONSTANTS
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.profile import read_profile

H100 = known.gpu("h100-sxm-80gb")


def test_json_has_every_number_with_unit_meaning_and_source() -> None:
    view = profile_to_dict(H100, profile_of(H100))
    assert view["schema"] == "topoplan.profile/1"
    assert [number["name"] for number in view["constants"]] == list(CONSTANTS)
    assert [number["name"] for number in view["bands"]] == list(BANDS)
    for number in (*view["constants"], *view["bands"]):
        assert number["meaning"]
        assert number["source"]
    first = view["constants"][0]
    assert (first["name"], first["value"], first["unit"], first["kind"]) == (
        "gemm_efficiency",
        profile_of(H100).gemm_efficiency,
        "fraction",
        "published",
    )


def test_the_list_has_every_gpu_once() -> None:
    profiles = profiles_to_dict()["profiles"]
    assert sorted(name for profile in profiles for name in profile["gpus"]) == sorted(catalog.gpu_names())
    assert all(sum(profile["kinds"].values()) == len(CONSTANTS) for profile in profiles)


def test_numbers_are_shown_in_the_units_of_people() -> None:
    assert shown_value("gemm_efficiency", 0.535) == "53.5%"
    assert shown_value("collective_latency_s", 2e-5) == "20 us"
    assert shown_value("step_overhead_s", 0.01) == "10 ms"
    assert shown_value("context_bytes", 600_000_000) == "600.0 MB"
    assert shown_value("gemm_tile", (128, 256)) == "128 x 256"
    assert shown_value("flash_attention", False) == "no"
    assert shown_value("attention_tail", 1024) == "1024"
    assert shown_value("router_bytes", 24) == "24 bytes"
    assert shown_value("host_adam_bytes_per_s", 100e9) == "100 GB/s"
    assert shown_value("nvlink_gb_per_s", 25) == "25 GB/s"
    assert shown_value("nccl_inside_gb_per_s", (40.0, 30.0, 3.0)) == "40 to 3 GB/s"
    assert shown_value("flash2_flops_per_sm", 335e12 / 132) == "2.54 TFLOP/s"
    assert shown_value("nvls_inside_channels", 16) == "16"
    units = {key: unit(key) for key in (*CONSTANTS, *BANDS)}
    assert (units["cublas_workspace_bytes"], units["attention_softmax_width"]) == ("bytes", "elements")
    switches = {"flash_attention", "fp8_transposes", "nccl_doubles_narrow_rings"}
    assert {key for key, name in units.items() if not name} == switches


def test_the_tables_fit() -> None:
    for name in ("h100-sxm-80gb", "v100-sxm-32gb"):
        text = printed(print_profile, known.gpu(name), profile_of(known.gpu(name)), width=80)
        text += printed(print_profiles, width=80)
        assert max(map(len, text.splitlines())) <= 80
        assert all(key in text for key in (*CONSTANTS, *BANDS))


def test_what_another_entry_has_says_what_it_is_there() -> None:
    numbers = {one["name"]: one for one in profile_to_dict(H100, profile_of(H100))["constants"]}
    assert numbers["host_adam_bytes_per_s"]["kind"] == "kin"
    assert numbers["host_adam_bytes_per_s"]["source"].startswith("as ampere, assumed: two sockets")


def test_times_are_written_in_the_unit_that_suits_them() -> None:
    card = known.gpu("h100-sxm-80gb")
    lines = profile_text(card, profile_of(card)).splitlines()
    assert "step_overhead_s: 10ms" in lines
    assert "kernel_launch_s: 4us" in lines


def test_the_file_that_is_written_is_one_that_is_read_and_changes_nothing(tmp_path: Path) -> None:
    for name in catalog.gpu_names():
        card = known.gpu(name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(profile_text(card, profile_of(card)))
        own = read_profile(path)
        mine, plain = profile_of(card, own), profile_of(card)
        assert set(own.constants) == set(CONSTANTS)
        assert all(getattr(mine, key) == getattr(plain, key) for key in (*CONSTANTS, *BANDS))
        assert kinds_text(mine) == f"{len(CONSTANTS)} measured"
