import json
from dataclasses import replace

import pytest

from tests.report.printed import printed
from tests.samples import make_plan, make_spec
from topoplan.planner.plan import Plan
from topoplan.planner.what_if import Fate, Found, Outcome
from topoplan.report.what_if import outcomes_to_dict, print_outcomes
from topoplan.specs.spec import Spec

SPEC = make_spec(samples=10_000)
OLD = make_plan(tp=2, step_s=3.0)
NEW = make_plan(tp=4, step_s=1.5)
BEFORE = Found(spec=SPEC, best=OLD)


def case(plan: Plan | None = NEW, *, spec: Spec | None = None, fate: Fate | None = None, **changes: str) -> Outcome:
    found = Found(spec=spec or make_spec(nodes=8, samples=10_000), best=plan, reason="" if plan else "no layout fits")
    return Outcome(changes=changes or {"nodes": "8"}, found=found, fate=fate)


def rendered(*cases: Outcome, before: Found = BEFORE, width: int = 100) -> str:
    return printed(print_outcomes, SPEC, before, cases, width=width)


def flat(text: str) -> str:
    return " ".join(text.split())


RANKED = Fate(layout=make_plan(tp=2).layout, plan=OLD, rank=3, slower=0.05)


def test_one_case_is_before_and_after_with_its_change() -> None:
    text = flat(rendered(case(fate=RANKED)))
    assert "What if nodes=8?" in text
    assert "best plan tp2 pp1 dp16 mbs1 tp4 pp1 dp8 mbs1" in text
    assert "GPUs 32 64 +100%" in text
    assert "step, s 3.00 1.50 -50%" in text
    assert "hours 0.47 0.22 -0.25, -54%" in text
    assert "The previous best plan, tp2 pp1 dp16 mbs1, becomes tp2 pp1 dp16 mbs1: plan 3, 5.3% slower" in text


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        (Fate(layout=OLD.layout, plan=OLD, rank=1), "is still the best, as tp2 pp1 dp16 mbs1."),
        (Fate(layout=OLD.layout, plan=OLD, rank=2, slower=0.001), "plan 2, as fast as the best."),
        (Fate(layout=OLD.layout, plan=OLD, slower=-0.1), "skipped by the search, 10.0% faster than the best."),
        (Fate(layout=OLD.layout, rule="memory", reason="2 GiB over", fix="x"), "does not fit: 2 GiB over; x."),
        (Fate(layout=None, rule="layout", reason="64 % 12 = 4"), "is illegal: 64 % 12 = 4."),
    ],
)
def test_the_fate_of_the_old_best_plan_is_told(fate: Fate, words: str) -> None:
    assert words in flat(rendered(case(fate=fate)))


def test_that_the_batch_is_held_is_said_where_the_gpus_change() -> None:
    text = flat(rendered(case(spec=make_spec(nodes=3))))
    assert "global_batch_size stays at 64 sequences" in text
    assert "not a multiple of 24 GPUs" in text
    assert "held at" not in rendered(case(spec=SPEC, ib_bandwidth="1Gb/s"))
    assert "held at" not in rendered(case(spec=make_spec(nodes=3), nodes="3", global_batch_size="48"))


def test_a_case_in_which_nothing_fits_says_so() -> None:
    text = flat(rendered(case(None)))
    assert "after: no layout fits" in text
    assert "best plan tp2 pp1 dp16 mbs1 none" in text


def test_a_spec_in_which_nothing_fits_may_be_rescued() -> None:
    text = flat(rendered(case(), before=Found(spec=SPEC, reason="no layout fits; nearest: x")))
    assert "before: no layout fits; nearest: x" in text
    assert "best plan none tp4 pp1 dp8 mbs1" in text


def many() -> list[Outcome]:
    illegal = Fate(layout=None, rule="layout", reason="64 % 12 = 4")
    return [
        case(nodes="8", seq_len="4096", template="x", fate=RANKED),
        case(nodes="3", seq_len="4096", template="x", fate=illegal),
        case(None, nodes="1", seq_len="4096", template="x"),
        replace(case(nodes="2", seq_len="8192", template="x"), found=Found(spec=None, reason="pin", is_legal=False)),
    ]


def test_many_cases_have_a_row_each_and_columns_for_what_changes() -> None:
    lines = [" ".join(line.split()) for line in rendered(*many(), width=120).splitlines()]
    assert "What if nodes=8,3,1,2, seq_len=4096,8192, template=x?" in lines
    assert any(line.startswith("nodes seq_len best plan GPUs GiB") for line in lines)
    assert any(line.startswith("unchanged tp2 pp1 dp16 mbs1 32 58.3 3.00") for line in lines)
    assert any(line.startswith("8 4096 tp4 pp1 dp8 mbs1 64 58.3 1.50") and line.endswith("5% slower") for line in lines)
    assert any(line.startswith("1 4096 nothing fits") for line in lines)
    assert any(line.startswith("2 8192 nothing legal") for line in lines)
    assert "- nodes=3, seq_len=4096: the old best is illegal: 64 % 12 = 4" in lines
    assert "- nodes=2, seq_len=8192: pin" in lines


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        (Fate(layout=OLD.layout, rule="memory", reason="2 GiB over"), "does not fit"),
        (Fate(layout=None, rule="layout", reason="64 % 12 = 4"), "not allowed"),
        (Fate(layout=OLD.layout, plan=OLD, rank=1), "still best"),
        (Fate(layout=OLD.layout, plan=OLD, rank=2, slower=0.001), "as fast"),
        (Fate(layout=OLD.layout, plan=OLD, rank=None, slower=0.33), "49% slower"),
        (Fate(layout=OLD.layout, plan=OLD, rank=2, slower=-0.02), "2% faster"),
        (None, "-"),
    ],
)
def test_the_old_best_has_words_in_a_row(fate: Fate | None, words: str) -> None:
    lines = rendered(case(nodes="8", fate=fate), case(nodes="3"), width=120).splitlines()
    assert any(line.split()[0] == "8" and line.rstrip().endswith(f" {words}") for line in lines if line)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_columns_leave_before_anything_is_cut(width: int) -> None:
    text = rendered(*many(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_trainer_is_said_where_the_plans_have_different_ones() -> None:
    other = replace(NEW, trainer="swift")
    text = rendered(case(other, finetuning="lora"), case(finetuning="qlora"), width=80)
    rows = [line.split() for line in text.splitlines() if line.startswith(("lora", "qlora"))]
    assert [(row[0], row[5]) for row in rows] == [("lora", "ms-swift"), ("qlora", "LLaMA-Factory")]
    assert "trainer" not in rendered(*many(), width=120)
    assert "trainer LLaMA-Factory ms-swift" in flat(rendered(case(other)))
    assert outcomes_to_dict(SPEC, BEFORE, [case(other)])["cases"][0]["plan"]["trainer"] == "swift"


def test_hours_are_left_out_where_the_samples_are_not_known() -> None:
    spec = make_spec()
    cases = [case(spec=spec, nodes="1"), case(spec=spec, nodes="2")]
    assert "hours" not in rendered(*cases, before=Found(spec=spec, best=OLD))


def test_the_document_holds_every_case() -> None:
    view = outcomes_to_dict(SPEC, BEFORE, many())
    assert json.loads(json.dumps(view)) == view
    assert view["schema"] == "topoplan.what-if/1"
    assert view["before"]["plan"]["id"] == OLD.id
    first, second, third, last = view["cases"]
    assert first["set"] == {"nodes": "8", "seq_len": "4096", "template": "x"}
    assert first["plan"]["job_time"]["hours"] == pytest.approx(0.216, abs=0.001)
    assert (first["old_best"]["rank"], first["old_best"]["slower"]) == (3, 0.05)
    assert second["old_best"]["reason"] == "64 % 12 = 4"
    assert third["plan"] is None
    assert last["reason"] == "pin"
