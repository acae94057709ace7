import io

from rich.console import Console

from topoplan.report.tables import stage_name, stage_span, table_of


def shown(width: int = 60) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, width=width, color_system=None, highlight=False)


def test_figures_stand_between_two_kinds_of_text() -> None:
    stream, console = shown()
    table = table_of("part", right=("s", "%"), last=("what",))
    table.add_row("gemm", "1.5", "50", "linear layers")
    console.print(table)
    assert stream.getvalue().splitlines()[-1].split() == ["gemm", "1.5", "50", "linear", "layers"]


def test_stages_are_named_alone_or_from_first_to_last() -> None:
    assert (stage_span([3]), stage_name([3])) == ("3", "Stage 3")
    assert (stage_span([3, 4, 5]), stage_name([3, 4, 5])) == ("3-5", "Stages 3 to 5")
