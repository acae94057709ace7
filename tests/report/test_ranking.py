import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.printed import printed
from tests.samples import make_plan, make_ranking, make_spec, usual_ranking
from topoplan.layout.layout import Layout, Recompute, changed
from topoplan.layout.stages import spread_pipeline_layout
from topoplan.planner.plan import Ranking
from topoplan.planner.rank import TAGS
from topoplan.report.answer import answer_of, print_answer
from topoplan.report.ranking import print_ranking, print_rejected


def rendered(ranking: Ranking, *, width: int = 100, top: int = 10) -> str:
    answer = answer_of(ranking, top=top, words=["spec.yaml"])
    assert answer is not None
    return printed(print_ranking, ranking, answer, width=width)


def row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("samples", [None, 100_000])
def test_no_line_is_wider_than_the_terminal(width: int, samples: int | None) -> None:
    text = rendered(usual_ranking(samples=samples), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_a_row_has_the_figures_of_its_plan() -> None:
    text = rendered(usual_ranking(samples=100_000), width=140)
    assert "GiB of" in text
    first = row(text, "1 ")
    for figure in (
        "tp2 pp1 dp16 mbs1",
        "61.2",
        "3.21",
        "±12%",
        "2,552",
        "13%",
        "4.26",
        "136",
        "compute 71",
        "bubble 12",
    ):
        assert figure in first


def test_the_heading_names_cluster_model_job_and_counts() -> None:
    heading = " ".join(rendered(usual_ranking()).split("\n\n")[0].split())
    assert heading == (
        "h100-4x8, 4 x 8 h100-sxm-80gb: Qwen/Qwen3-8B, full sft bf16, 64 x 4,096 tokens."
        " 1,234 layouts: 5 fit, 629 out of memory, 600 illegal."
    )


def test_hours_appear_only_with_samples() -> None:
    assert "GPU-h" not in rendered(usual_ranking())
    text = rendered(usual_ranking(samples=100_000, epochs=1.5))
    assert "GPU-h" in text
    assert "2,343 steps, 100,000 samples x 1.5 epochs" in " ".join(text.split())


def test_the_legend_explains_the_words_of_the_layouts_that_are_shown() -> None:
    split = spread_pipeline_layout(36, 2, 3, 5, 3)
    block = Recompute(granularity="full", method="block", num_layers=4)
    plan = make_plan(tp=2, pp=2, vpp=3, recompute=block, pipeline_layout=split)
    plan = replace(plan, layout=changed(plan.layout, sequence_parallel=False))
    text = " ".join(rendered(make_ranking(plan)).split())
    assert "nosp: no sequence parallelism." in text
    assert "full:block4: 4 layers of each chunk are recomputed." in text
    assert "ends5+3: 5 layers in the first chunk, 3 in the last." in text
    one = replace(plan, layout=changed(plan.layout, recompute=replace(block, num_layers=1)))
    alone = " ".join(rendered(make_ranking(one)).split())
    assert "full:block1: 1 layer of each chunk is recomputed." in alone
    assert "layers of each chunk" not in alone
    assert "offload" not in text
    assert "nosp" not in rendered(usual_ranking())


def test_top_limits_the_rows() -> None:
    text = rendered(usual_ranking(), top=2)
    assert row(text, "2 ")
    assert not any(line.startswith("3 ") for line in text.splitlines())


def test_a_layout_stays_in_one_line_before_shares_of_time_have_a_column() -> None:
    narrow = rendered(usual_ranking(samples=100_000), width=80)
    assert "tp2 pp2 vpp3 dp8 mbs1 sel:core_attn" in row(narrow, "3 ")
    assert "spent on" not in narrow


def test_alternatives_and_warnings_follow_the_table_and_what_is_out_does_not() -> None:
    text = " ".join(rendered(usual_ranking()).split())
    assert "plan 4: the first step compiles kernels" in text
    assert "tp4 in place of tp2: 4% slower" in text
    assert "stage 0 needs" not in text


def test_a_few_sentences_on_the_alternatives_are_shown() -> None:
    text = rendered(make_ranking(make_plan(), notes=tuple(f"note {number}" for number in range(5))))
    assert "Common alternatives, compared with plan 1 (2 more in --json):\n- note 0\n- note 1\n- note 2\n" in text
    assert "note 3" not in text


def test_the_legend_says_why_a_slower_plan_may_stand_first() -> None:
    slower, faster = make_plan(tp=4, step_s=3.01), make_plan(tp=2, step_s=3.0)
    words = "Plans within 1% of each other are ordered by memory."
    assert words in " ".join(rendered(make_ranking(slower, faster)).split())
    for plans in ((faster, slower), (slower, replace(faster, caveats=("a fault",)))):
        assert "ordered by memory" not in " ".join(rendered(make_ranking(*plans)).split())


def test_a_risk_is_a_tag_in_the_table_that_the_legend_explains() -> None:
    tight = make_plan(device_gib=77.0, caveats=("a fault",), band=(0.4, 1.6))
    text = rendered(make_ranking(make_plan(tp=2), tight))
    start = text.index(row(text, "2 "))
    assert all(tag in line for tag, line in zip(TAGS, text[start:].splitlines(), strict=False))
    assert all(f"{tag}: {meaning}." in " ".join(text.split()) for tag, meaning in TAGS.items())
    assert "risk" not in rendered(make_ranking(make_plan()))


def test_a_warning_of_every_plan_is_said_once_and_many_are_cut() -> None:
    plans = [make_plan(tp=tp, warnings=("same", *(f"only tp{tp} {n}" for n in range(3)))) for tp in (1, 2)]
    text = rendered(make_ranking(*plans))
    assert text.count("same") == 1
    assert text.count("only tp1") == 3
    assert "Warnings (3 more in --json):" in text


def test_brackets_in_names_are_shown_as_they_are() -> None:
    text = rendered(make_ranking(make_plan(), spec=make_spec(name="[red]lab[/red]", model_name="models/[bold]")))
    assert "[red]lab[/red]" in text
    assert "models/[bold]" in text


def test_no_colour_without_a_terminal() -> None:
    assert "\x1b" not in rendered(usual_ranking())


def test_ascii_terminals_get_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console, ranking = Console(file=stream, width=100, color_system=None, highlight=False), usual_ranking()
    answer = answer_of(ranking, top=10, words=[])
    assert answer is not None
    print_ranking(console, ranking, answer)
    print_answer(console, answer)
    stream.flush()
    assert b"+-12%" in raw.getvalue()


def test_rejected_layouts_are_grouped_by_rule() -> None:
    text = printed(print_rejected, usual_ranking())
    assert "Rejected by memory: 1 layout\n" in text
    assert text.index("Rejected by memory") < text.index("Rejected by layers")


def test_host_memory_is_a_column_where_something_is_kept_there() -> None:
    plan = make_plan()
    there = replace(plan, memory=replace(plan.memory, host_bytes=900 * 2**30))
    text = rendered(make_ranking(plan, there))
    assert " 900 " in row(text, "2 ")
    assert "host GiB: main memory that the plan needs on each node" in " ".join(text.split())
    assert "host" not in rendered(make_ranking(plan))


def test_mfu_of_adapters_counts_no_gradients_of_frozen_weights_and_says_so() -> None:
    assert "and without gradients of frozen weights" in " ".join(rendered(usual_ranking(finetuning="lora")).split())
    assert "frozen" not in rendered(usual_ranking())


def test_other_backends_and_trainers_have_a_heading_of_their_own() -> None:
    text = rendered(replace(usual_ranking(), crossings=("ddp: nothing fits",)))
    assert "Other backends and trainers, compared with plan 1:\n- ddp: nothing fits" in text
    assert "Other backends" not in rendered(usual_ranking())


def test_the_trainer_is_a_column_where_it_may_surprise() -> None:
    assert "trainer" not in rendered(usual_ranking())
    spec = make_spec(nodes=1)
    split = Layout.of(backend="fsdp2", dp=4, ulysses=2, gradient_accumulation_steps=16, distributed_optimizer=False)
    plan = replace(make_plan(), layout=split, trainer="swift")
    text = rendered(make_ranking(plan, make_plan(tp=2), spec=spec))
    assert "trainer" in text
    assert "ms-swift" in row(text, "1 ")
    assert "LLaMA-Factory" in row(text, "2 ")


def test_one_trainer_of_all_plans_has_a_sentence_unless_it_was_asked_for() -> None:
    ranking = make_ranking(replace(make_plan(), trainer="swift"))
    assert "All plans are for ms-swift." in " ".join(rendered(ranking).split())
    assert "swift" not in rendered(replace(ranking, spec=replace(ranking.spec, trainer="swift")))
    assert "All plans" not in rendered(usual_ranking())


def test_the_legend_leaves_out_what_has_no_column() -> None:
    ranking = make_ranking(make_plan(caveats=("a fault",)), spec=make_spec(samples=100_000))
    wide, narrow = (" ".join(rendered(ranking, width=width).split()) for width in (140, 50))
    for words in ("and its error band", "MFU: without", "caveat: a known", "hours: "):
        assert (words in wide, words in narrow) == (True, False)
