import csv
import io
import json
from pathlib import Path

import jsonschema
import pytest

from tests.planner.sharded_cases import DENSE, plan_of
from tests.samples import make_ranking, usual_ranking
from topoplan.report.document import COLUMNS, ranking_to_dict, write_rows

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "rank.schema.json").read_text())


@pytest.mark.parametrize("samples", [None, 1000])
@pytest.mark.parametrize("rejected", [True, False])
def test_the_document_follows_its_schema(samples: int | None, rejected: bool) -> None:
    document = ranking_to_dict(usual_ranking(samples=samples), top=10, rejected=rejected)
    jsonschema.validate(json.loads(json.dumps(document, allow_nan=False)), SCHEMA)
    assert ("rejected" in document) == rejected
    assert [plan["rank"] for plan in document["plans"]] == [1, 2, 3, 4, 5]


def test_top_limits_the_plans_but_not_the_counts() -> None:
    document = ranking_to_dict(usual_ranking(), top=2, rejected=False)
    assert len(document["plans"]) == 2
    assert document["counts"]["ranked"] == 5


def test_an_empty_ranking_is_a_document_too() -> None:
    document = ranking_to_dict(make_ranking(), top=10, rejected=False)
    jsonschema.validate(document, SCHEMA)
    assert document["plans"] == []


def rows(**job: int) -> list[dict[str, str]]:
    stream = io.StringIO()
    write_rows(stream, usual_ranking(**job), top=4)
    return list(csv.DictReader(io.StringIO(stream.getvalue())))


def test_one_row_a_plan_with_every_column() -> None:
    table = rows()
    assert [row["rank"] for row in table] == ["1", "2", "3", "4"]
    assert all(tuple(row) == COLUMNS for row in table)


def test_figures_are_plain_numbers() -> None:
    row = rows(samples=100_000)[0]
    assert float(row["step_s"]) == 3.21
    assert float(row["step_low_s"]) < float(row["step_s"]) < float(row["step_high_s"])
    assert float(row["device_gib"]) == 61.2
    assert float(row["gpu_hours"]) > 32 * float(row["hours"]) * 0.999


def test_what_a_plan_lacks_is_empty() -> None:
    row = rows()[0]
    assert row["hours"] == row["gpu_hours"] == row["pipeline_layout"] == row["tags"] == ""


def test_what_a_bundle_would_warn_of_and_the_risks_have_a_cell_each() -> None:
    row = rows()[3]
    assert row["tags"] == "tight"
    assert row["warnings"].startswith("the first step compiles kernels; job.samples is not in the spec")


def test_recompute_is_one_cell() -> None:
    assert [row["recompute"] for row in rows()] == ["none", "none", "selective core_attn", "full uniform 1"]


def test_an_empty_ranking_has_a_header() -> None:
    stream = io.StringIO()
    write_rows(stream, make_ranking(), top=4)
    assert stream.getvalue() == ",".join(COLUMNS) + "\n"


def test_a_plan_that_splits_data_alone_has_its_keys_and_no_others() -> None:
    spec, plan = plan_of(DENSE, {"backend": "deepspeed", "zero_stage": 3, "ulysses": 2}, {})
    stream = io.StringIO()
    write_rows(stream, make_ranking(plan, spec=spec), top=1)
    (row,) = csv.DictReader(io.StringIO(stream.getvalue()))
    assert (row["backend"], row["zero_stage"], row["ulysses"], row["offload_param"]) == ("deepspeed", "3", "2", "False")
    assert row["sequence_parallel"] == row["sharding"] == row["optimizer_offload_fraction"] == ""
