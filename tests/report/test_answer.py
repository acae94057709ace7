"""The last lines of `topoplan rank`: the best plan, a safe plan, and the next command."""

from dataclasses import replace

from tests.report.printed import printed
from tests.samples import make_plan, make_ranking, make_spec
from topoplan.planner.plan import Ranking
from topoplan.report.answer import Answer, answer_of, answer_to_dict, print_answer

TROUBLED = make_plan(tp=2, pp=2, device_gib=77.5, step_s=3.0, caveats=("a fault",))
ROOMY = make_plan(tp=4, device_gib=44.0, step_s=3.3)


def answer(ranking: Ranking, *words: str) -> Answer:
    found = answer_of(ranking, top=10, words=words or ("spec.yaml",))
    assert found is not None
    return found


def test_best_safe_and_next_are_the_last_lines() -> None:
    text = printed(print_answer, answer(make_ranking(TROUBLED, ROOMY, safe=1)), width=72)
    assert text.splitlines() == [
        "",
        "Best  tp2-pp2-dp8-mbs1",
        "      3.00 s per step ±12%, 77.5 of 79.6 GiB; tight; caveat",
        "Safe  tp4-pp1-dp8-mbs1",
        "      plan 2, 10% slower; 3.30 s per step ±12%, 44.0 of 79.6 GiB",
        "Next  topoplan generate spec.yaml --plan tp2-pp2-dp8-mbs1",
    ]


def test_a_command_is_quoted_for_a_shell_and_never_broken() -> None:
    long = answer(make_ranking(ROOMY), "my specs/a.yaml", "--set", "lengths={128: 5000}", "--model", "m" * 90)
    assert (
        f"topoplan generate 'my specs/a.yaml' --set 'lengths={{128: 5000}}' --model {'m' * 90} --plan {ROOMY.id}\n"
        in (printed(print_answer, long, width=80))
    )


def test_what_is_safe_may_be_the_best_plan_or_none() -> None:
    assert "Safe  same plan: no caveats" in printed(print_answer, answer(make_ranking(ROOMY, safe=0)))
    assert "Safe  none: every plan has a caveat" in printed(print_answer, answer(make_ranking(TROUBLED)))


def test_a_best_plan_that_no_files_can_be_written_of_leads_to_the_safe_one() -> None:
    spec = make_spec(trainer={"pipeline_model_parallel_size": 3})
    refused = answer(make_ranking(TROUBLED, ROOMY, safe=1, spec=spec))
    assert refused.refused
    assert refused.next.endswith(f"--plan {ROOMY.id}")
    assert "no files can be written for the best plan" in printed(print_answer, refused)


def test_warnings_are_those_of_the_bundle_too() -> None:
    plan = replace(ROOMY, warnings=("of the plan",))
    (warnings,) = answer(make_ranking(plan)).warnings
    assert warnings[0] == "of the plan"
    assert any("number of warm-up steps is a guess" in warning for warning in warnings)


def test_as_json() -> None:
    view = answer_to_dict(answer(make_ranking(TROUBLED, ROOMY, safe=1)))
    assert view["best"]["tags"] == ["tight", "caveat"]
    assert (view["safe"]["rank"], view["safe"]["id"]) == (2, ROOMY.id)
    assert view["next"] == view["best"]["command"] == f"topoplan generate spec.yaml --plan {TROUBLED.id}"
    assert view["refused"] is None
    nothing = answer_to_dict(answer_of(make_ranking(), top=10, words=()))
    assert nothing == {"best": None, "safe": None, "refused": None, "next": None}
