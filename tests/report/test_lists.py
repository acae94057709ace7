import io
import json

from tests.report.printed import printed
from topoplan.report.lists import (
    gpu_entries,
    model_entries,
    print_gpus,
    print_models,
    print_table,
    table_to_dict,
    write_csv,
)
from topoplan.specs.known import gpu, model
from topoplan.trainers.trinity.recipes import table


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
    narrow = printed(print_models, entries, width=80).splitlines()
    assert len(narrow) == 2 + len(entries)
    assert max(map(len, narrow)) <= 80


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


A100 = gpu("a100-sxm-80gb")
CELLS = table([model("Qwen3-0.6B"), model("Qwen3-8B")], A100, [1, 4], [4096, 51200])


def shown(width: int = 100) -> str:
    return printed(print_table, A100, CELLS, width=width)


def test_csv_has_a_row_for_every_cell_and_models_without_their_organisation() -> None:
    stream = io.StringIO()
    write_csv(stream, CELLS)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "gpus,max_model_len,model,cell"
    assert lines[1:3] == ["1,4096,Qwen3-0.6B,vanilla", "1,4096,Qwen3-8B,Env + Offload"]
    assert lines[-1] == "4,51200,Qwen3-8B,Env + SP=4"
    assert len(lines) == 9


def test_json_has_the_settings_and_the_memory_of_every_cell() -> None:
    view = json.loads(json.dumps(table_to_dict(A100, CELLS), allow_nan=False))
    assert view["schema"] == "topoplan.table/1"
    assert view["gpu"] == "a100-sxm-80gb"
    last = view["cells"][-1]
    assert (last["ulysses"], last["expandable_segments"], last["offload"]) == (4, True, False)
    assert last["yarn_factor"] == 1.5625
    assert last["memory"]["moments_gib"][last["memory"]["peak"]] == max(last["memory"]["moments_gib"].values())
    none = next(cell for cell in view["cells"] if not cell["fits"])
    assert none["cell"] == "-"
    assert none["ulysses"] is None
    assert none["memory"]["device_gib"] > none["memory"]["capacity_gib"]


def test_people_get_a_block_for_every_number_of_gpus() -> None:
    text = shown()
    assert "1 GPU, a100-sxm-80gb" in text
    assert "4 GPUs, a100-sxm-80gb" in text
    assert text.index("Env + Offload") > text.index("1 GPU,")


def test_contexts_that_need_yarn_are_marked_and_explained() -> None:
    text = shown()
    assert "* 51,200" in text
    assert "* 4,096" not in text
    assert "longer than the model's own 40,960" in text
    assert "factor = max_model_len / 32,768" in " ".join(text.split())
