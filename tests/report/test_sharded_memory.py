import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import topoplan
from tests.planner.sharded_cases import ALONE, CASES, DENSE, HOST, ZERO3_AWAY, plan_of
from topoplan.planner.sharded_memory import sharded_breakdown
from topoplan.report.sharded_memory import SOURCES, print_sharded_memory, sharded_memory_to_dict

PACKAGE = Path(topoplan.__file__).parent


def rendered(model: str, form: dict[str, Any], other: dict[str, Any], *, width: int = 100) -> str:
    stream = io.StringIO()
    spec, plan = plan_of(model, form, other)
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    print_sharded_memory(console, plan, sharded_breakdown(spec, plan))
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("model", "form", "other"), CASES)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_of_pipelines(
    model: str, form: dict[str, Any], other: dict[str, Any], width: int
) -> None:
    text = rendered(model, form, other, width=width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Stage", "stage 0", "pipeline", "in flight", "tp ", "chunk"):
        assert word not in text


def test_every_source_is_a_file_of_the_package_and_a_name_in_it() -> None:
    for name, source in SOURCES.items():
        file = ""
        for place in source.split(";")[0].split(" and "):
            *files, defined = place.split()
            file = files[0] if files else file
            if not defined.endswith(".json"):
                text = (PACKAGE / file).read_text(encoding="utf-8")
                assert f"def {defined}(" in text or f"\n{defined} = " in text, name


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_every_part_has_a_source(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    _, plan = plan_of(model, form, other)
    for part in plan.memory.by_stage[0].parts_bytes:
        assert ("peak" if part.startswith("peak") else part) in SOURCES


def test_states_are_told_with_their_bytes_and_shards() -> None:
    text = flat(rendered(DENSE, {"backend": "deepspeed", "zero_stage": 3}, {}, width=180))
    assert "trained: 2 bytes x 8.19B elements / 32 GPUs" in text
    assert "fp32 copy of the weights 1.0 4 bytes x 8.19B elements / 32 GPUs" in text
    assert "Adam's moments 1.9 8 bytes x 8.19B elements / 32 GPUs" in text
    assert re.search(r"gradients 0\.5 \d+ 2 bytes x 8\.19B elements / 32 GPUs", text)
    assert "stage3_max_live_parameters" in text
    assert "Host memory" not in text


def test_what_is_offloaded_is_told_with_the_host() -> None:
    text = rendered(DENSE, ZERO3_AWAY, HOST)
    host = flat(text[text.index("Host memory of a node, pinned") :])
    assert flat(text).count("in host memory") == 3
    for row in ("weights: trained", "optimizer: fp32 copy of the weights", "gradients for Adam on the host"):
        assert row in host
    assert "of 8 processes" in host
    assert "to spare" in host


def test_packed_weights_and_adapters_are_told() -> None:
    other = {**ALONE, "finetuning": "qlora", "quantization_bit": 4}
    text = flat(rendered(DENSE, {"backend": "ddp", "recompute": "full"}, other, width=180))
    assert "packed 3.3 0.5159 bytes x 6.95B elements" in text
    assert "weights frozen, 7 adapters in each" in text
    assert "largest linear layer, unpacked" in text
    assert "0 communicators" in text


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_figures_of_the_json_form_add_up(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    view = sharded_memory_to_dict(plan, sharded_breakdown(spec, plan))
    assert sum(view["parts_gib"].values()) == pytest.approx(view["device"]["allocated_gib"], rel=1e-4)
    assert sum(row["elements"] for row in view["parameters"]["by_place"]) == sum(
        view["parameters"][key] for key in ("trained", "frozen", "packed")
    )
    host = sum(row["gib"] for row in view["states"] if row["place"] == "host") * view["host"]["processes"]
    assert host == pytest.approx(view["host"]["gib"], rel=1e-4)
