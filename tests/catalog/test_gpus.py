"""The GPUs of the catalog."""

import pytest

from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.specs import known

# CONTRACT: the names that scripts rely on.
PROMISED = (
    "v100-sxm-32gb a100-sxm-40gb a100-sxm-80gb a100-pcie-80gb a800-sxm-80gb h20-sxm-96gb h100-sxm-80gb h100-pcie-80gb "
    "h800-sxm-80gb h200-sxm-141gb b200-sxm-180gb b300-sxm-288gb gb200-nvl72-186gb gb300-nvl72-288gb l40s-48gb "
    "rtx4090-24gb a6000-48gb"
)


def test_every_promised_gpu_is_there() -> None:
    assert set(PROMISED.split()) <= set(catalog.gpu_names())


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_a_gpu_is_complete_and_plausible(name: str) -> None:
    card = known.gpu(name)
    quoted_bytes = int(name.rpartition("-")[2].removesuffix("gb")) * 1e9
    assert card.name == name
    assert 0.98 * quoted_bytes <= card.memory_bytes <= 1.08 * quoted_bytes
    assert 0.5e12 < card.memory_bytes_per_s < 10e12
    assert card.architecture in catalog.architectures()
    assert (card.fp8_flops is not None) == (card.architecture in {"ada", "hopper", "blackwell"})
    assert (card.fp4_flops is not None) == (card.architecture == "blackwell")
    assert card.gpus_per_node in {4, 8}
    assert 1 <= card.nics_per_node <= card.gpus_per_node
    assert card.source


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_peaks_are_dense_and_double_with_each_halving_of_the_width(name: str) -> None:
    card = known.gpu(name)
    if card.architecture != "volta":
        assert card.bf16_flops == card.fp16_flops
    if card.fp8_flops is not None:
        assert card.fp8_flops == pytest.approx(2 * card.bf16_flops, rel=0.02)
    if card.fp4_flops is not None and card.fp8_flops is not None:
        assert card.fp4_flops >= 2 * card.fp8_flops


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_a_card_without_nvlink_has_a_domain_of_one(name: str) -> None:
    card = known.gpu(name)
    assert (card.nvlink_domain_gpus == 1) == (card.nvlink_bytes_per_s == 0)
    assert card.nvlink_domain_gpus == 1 or card.nvlink_domain_gpus >= card.gpus_per_node


def test_figures_are_converted_to_bytes_and_to_one_direction() -> None:
    h100 = known.gpu("h100-sxm-80gb")
    assert h100.memory_bytes == 81559 * 2**20
    assert h100.bf16_flops == 989.4e12
    assert h100.nvlink_bytes_per_s == 450e9  # 900 GB/s counts both directions
    assert h100.nic_bytes_per_s == 50e9  # 400 Gb/s


def test_the_export_versions_differ_from_their_originals_in_nvlink_alone() -> None:
    for original, export in (("a100-sxm-80gb", "a800-sxm-80gb"), ("h100-sxm-80gb", "h800-sxm-80gb")):
        assert known.gpu(export).nvlink_bytes_per_s == 200e9
        assert known.gpu(export).bf16_flops == known.gpu(original).bf16_flops
        assert known.gpu(export).memory_bytes == known.gpu(original).memory_bytes


def test_a_gpu_is_found_in_any_case() -> None:
    assert known.gpu(" H100-SXM-80GB") == known.gpu("h100-sxm-80gb")


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("h100-sxm-80bg", "'h100-sxm-80gb'"),
        ("H100-NVL", "'h100-sxm-80gb' or 'h100-pcie-80gb'"),
        ("NVIDIA A100-SXM4-80GB", "'a100-sxm-80gb'"),
    ],
)
def test_an_unknown_gpu_gets_the_nearest_name(wrong: str, suggested: str) -> None:
    with pytest.raises(SpecError) as caught:
        known.gpu(wrong)
    assert f"GPU {wrong!r} is not known; did you mean {suggested}?" in str(caught.value)
    assert "topoplan show gpus" in str(caught.value)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("h100", "h100-sxm-80gb"),
        ("a100-80g", "a100-sxm-80gb"),
        ("H100 PCIe", "h100-pcie-80gb"),
        ("h20", "h20-sxm-96gb"),
        ("h200", "h200-sxm-141gb"),
        ("b200", "b200-sxm-180gb"),
        ("gb200", "gb200-nvl72-186gb"),
        ("a100-80gb", "a100-sxm-80gb"),
        ("a100-40gb", "a100-sxm-40gb"),
        ("l40s", "l40s-48gb"),
        ("4090", "rtx4090-24gb"),
        ("rtx4090", "rtx4090-24gb"),
        ("V100", "v100-sxm-32gb"),
    ],
)
def test_a_short_name_stands_for_one_card(short: str, name: str) -> None:
    assert known.gpu(short).name == name


def test_a_short_name_of_several_cards_names_them() -> None:
    with pytest.raises(SpecError, match="GPU 'a100' is not one card; expected a100-sxm-40gb, a100-sxm-80gb or a100-p"):
        known.gpu("a100")


def test_a_gpu_like_no_other_is_told_where_the_list_is() -> None:
    with pytest.raises(SpecError, match=r"^GPU 'xyz' is not known; `topoplan show gpus` lists the known ones, and"):
        known.gpu("xyz")


@pytest.mark.parametrize(
    ("driver_name", "mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm-80gb"),
        ("A100-SXM4-40GB", 40536, "a100-sxm-40gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-sxm-32gb"),
        ("NVIDIA RTX A6000", 46068, "a6000-48gb"),
        ("NVIDIA GeForce RTX 4090", None, "rtx4090-24gb"),
        ("NVIDIA GeForce RTX 4090", 49140, None),
        ("NVIDIA H100 NVL", 95830, None),
        ("NVIDIA GeForce RTX 4090 D", 24564, None),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx3090-24gb"),
        ("NVIDIA GeForce RTX 3090 Ti", 24564, None),
        ("NVIDIA A40", 46068, "a40-48gb"),
        ("NVIDIA L20", 46068, "l20-48gb"),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_gives_it(
    driver_name: str, mib: int | None, name: str | None
) -> None:
    found = known.gpu_of_driver(driver_name, mib * 2**20 if mib else None)
    assert (found.name if found else None) == name
