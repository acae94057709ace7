import io

from rich.console import Console

from tests.samples import make_spec
from topoplan.report.tables import heading, layer_kind, stage_name, stage_span, table_of


def shown(width: int = 60) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, width=width, color_system=None, highlight=False)


def test_a_heading_names_the_formula_where_there_is_one() -> None:
    stream, console = shown()
    heading(console, "Stages", "engines/megatron/step.py stage_time")
    heading(console, "Around")
    assert stream.getvalue().split("\n") == [
        "",
        "Stages",
        "formula: engines/megatron/step.py stage_time",
        "",
        "Around",
        "",
    ]


def test_figures_stand_between_two_kinds_of_text() -> None:
    stream, console = shown()
    table = table_of("part", right=("s", "%"), last=("what",))
    table.add_row("gemm", "1.5", "50", "linear layers")
    console.print(table)
    assert stream.getvalue().splitlines()[-1].split() == ["gemm", "1.5", "50", "linear", "layers"]


def test_stages_are_named_alone_or_from_first_to_last() -> None:
    assert (stage_span([3]), stage_name([3])) == ("3", "Stage 3")
    assert (stage_span([3, 4, 5]), stage_name([3, 4, 5])) == ("3-5", "Stages 3 to 5")


def test_a_layer_is_called_by_its_two_halves() -> None:
    assert layer_kind(make_spec().model.layers[0]) == "attention + mlp"
