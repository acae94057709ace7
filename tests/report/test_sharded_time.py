import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import topoplan
from tests.planner.sharded_cases import A100, CASES, DENSE, HOST, ZERO3_AWAY, plan_of
from topoplan.planner.sharded_time import sharded_time_breakdown
from topoplan.report.sharded_time import SOURCES, print_sharded_time, sharded_time_to_dict, source_of

PACKAGE = Path(topoplan.__file__).parent


def rendered(model: str, form: dict[str, Any], other: dict[str, Any], *, width: int = 100) -> str:
    stream = io.StringIO()
    spec, plan = plan_of(model, form, other)
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    print_sharded_time(console, plan, sharded_time_breakdown(spec, plan))
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
    for word in ("Stage", "stage 0", "pipeline", "bubble", "tp_comm"):
        assert word not in text


def test_every_source_is_a_file_of_the_package_and_a_name_in_it() -> None:
    for name, source in SOURCES.items():
        file, names = source.split(";")[0].split(",")[0].split(" ", 1)
        text = (PACKAGE / file).read_text(encoding="utf-8")
        for defined in names.split(" and "):
            assert any(f"{word}{defined}" in text for word in ("def ", "class ", "\n")), name


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_rows_of_the_json_form_add_up_to_the_step_and_have_sources(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec, plan = plan_of(model, form, other)
    view = sharded_time_to_dict(plan, sharded_time_breakdown(spec, plan))
    assert sum(row["step_s"] for row in view["rows"]) == pytest.approx(view["step_s"], rel=1e-4)
    for row in view["rows"]:
        assert row["source"] == source_of(row["part"], row["name"])
        assert row["part"] in SOURCES


def test_a_step_with_everything_away_says_what_the_host_and_pcie_take() -> None:
    text = flat(rendered(DENSE, ZERO3_AWAY, HOST, width=180))
    assert "Adam on the host" in text
    assert "weights back over PCIe" in text
    assert "Copies over PCIe, of weights and gradients, take" in text
    assert "weights for forward all-gather every forward" in text


def test_ulysses_is_told_among_what_is_sent() -> None:
    text = flat(rendered(DENSE, {"backend": "fsdp2", "ulysses": 4}, A100))
    assert "ulysses all-to-all every layer x 32 4 1 72" in text
    assert "all-to-all of Ulysses" in text


def test_one_gpu_sends_nothing() -> None:
    text = rendered(DENSE, {"backend": "ddp"}, {"nodes": 1, "gpus_per_node": 1, "finetuning": "lora"})
    assert "send each other" not in text
