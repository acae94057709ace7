from tests.report.printed import printed
from topoplan.report.lists import gpu_entries, model_entries, print_gpus, print_models


def test_models_have_an_exact_parameter_count() -> None:
    entries = {entry["name"]: entry for entry in model_entries()}
    assert entries["Qwen/Qwen3-8B"]["parameters"] == 8_190_735_360
    assert entries["Qwen/Qwen3-30B-A3B"]["parameters"] == 30_532_122_624
    assert {"name", "model_type", "parameters"} <= set(entries["deepseek-ai/DeepSeek-V3"])


def test_the_model_table_fits() -> None:
    entries = model_entries()
    text = printed(print_models, entries)
    assert max(map(len, text.splitlines())) <= 100
    assert all(entry["name"] in text for entry in entries)
    assert "MoE 8/256, latent" in text
    assert "dense, vision" in text


def test_gpus_are_in_bytes_and_flops() -> None:
    entries = {entry["name"]: entry for entry in gpu_entries()}
    h100 = entries["h100-sxm-80gb"]
    assert 75 * 2**30 < h100["memory_bytes"] < 80 * 2**30
    assert 980e12 < h100["bf16_flops"] < 1000e12
    assert 3e12 < h100["memory_bytes_per_s"] < 4e12
    assert len(entries) >= 17


def test_the_gpu_table_fits_and_uses_the_units_of_vendors() -> None:
    text = printed(print_gpus, gpu_entries())
    assert max(map(len, text.splitlines())) <= 100
    line = next(line for line in text.splitlines() if line.startswith("h100-sxm-80gb"))
    assert " 900 " in line
    assert "8 x 400" in line
