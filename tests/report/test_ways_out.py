from tests.samples import make_ranking, make_rejection
from topoplan.errors import NoLayoutFitsError
from topoplan.planner.plan import Counts
from topoplan.report.ways_out import nothing_fits


def test_a_lack_of_memory_exits_with_1_and_shows_the_nearest_misses() -> None:
    error = nothing_fits(
        make_ranking(
            counts=Counts(candidates=7, illegal=3, out_of_memory=4),
            rejected=(
                make_rejection(rule="tp_node", reason="tp 16 > 8 GPUs of a node", tp=16),
                make_rejection(reason="stage 0 needs 92.3 GiB of 79.6", fix="4 more nodes make it fit"),
            ),
        )
    )
    assert isinstance(error, NoLayoutFitsError)
    assert error.exit_code == 1
    lines = str(error).splitlines()
    assert lines[0].startswith("no layout fits: h100-4x8")
    assert lines[0].endswith("7 layouts: 0 fit, 4 out of memory, 3 illegal")
    assert lines[2] == "  - tp1 pp1 dp32 mbs1: stage 0 needs 92.3 GiB of 79.6; 4 more nodes make it fit"
    assert lines[3] == "`topoplan rank` on the spec shows which changes would make a layout fit"
    assert len(lines) == 4
