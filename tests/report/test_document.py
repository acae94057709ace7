import json
from pathlib import Path

import jsonschema
import pytest

from tests.samples import make_ranking, usual_ranking
from topoplan.report.document import ranking_to_dict

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
