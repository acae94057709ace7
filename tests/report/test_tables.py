from tests.report.printed import printed
from topoplan.report.tables import stage_name, stage_span, table_of


def test_figures_stand_between_two_kinds_of_text() -> None:
    table = table_of("part", right=("s", "%"), last=("what",))
    table.add_row("gemm", "1.5", "50", "linear layers")
    text = printed(lambda console: console.print(table), width=60)
    assert text.splitlines()[-1].split() == ["gemm", "1.5", "50", "linear", "layers"]


def test_stages_are_named_alone_or_from_first_to_last() -> None:
    assert (stage_span([3]), stage_name([3])) == ("3", "Stage 3")
    assert (stage_span([3, 4, 5]), stage_name([3, 4, 5])) == ("3-5", "Stages 3 to 5")
