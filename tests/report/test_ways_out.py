from tests.samples import make_ranking, make_rejection
from topoplan.errors import NoLayoutFitsError
from topoplan.planner.plan import STOPPED, TOO_LONG, Change, Counts, WayOut
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


def test_a_search_that_is_interrupted_says_so_and_sends_nobody_to_rank_again() -> None:
    error = nothing_fits(make_ranking(searched=0.19))
    assert error.exit_code == 130
    (line,) = str(error).splitlines()
    assert line.startswith("interrupted before a layout was found that fits: h100-4x8")
    assert line.endswith("stopped after 19% of the search")


def test_ways_out_that_are_interrupted_do_not_take_too_long() -> None:
    def lost(kind: str, unfinished: str) -> WayOut:
        return WayOut(change=Change(kind=kind, words=""), unfinished=unfinished)

    error = nothing_fits(make_ranking(ways_out=(lost("nodes", ""), lost("gpu", TOO_LONG), lost("seq_len", STOPPED))))
    assert error.exit_code == 130
    first, *lines = str(error).splitlines()
    assert first.startswith("no layout fits")
    assert lines == [
        "tried, without success: up to 16 times the nodes",
        "search not completed, because it takes too long: a GPU with more memory",
        "search not completed, because it was interrupted: sequences down to an eighth",
    ]
