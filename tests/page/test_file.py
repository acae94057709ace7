"""The page as a single file, without a browser."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.page.asked import FLAGSHIP, HOSTILE, LORA, answers_of, hostile_spec, ranked, run
from topoplan.page import html

STATIC = Path(html.__file__).parent / "static"


def unpacked(answers: dict[str, Any], plan: str, part: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(answers["blobs"][answers["plans"][plan][part]])))


def test_fifty_plans_are_a_file_of_at_most_a_megabyte_and_a_half(tmp_path: Path) -> None:
    target = tmp_path / "plans.html"
    assert run("rank", *FLAGSHIP, "--top", "50", "--html", str(target)).exit_code == 0
    answers = answers_of(target.read_text(encoding="utf-8"))
    assert target.stat().st_size <= 1_500_000
    assert len(answers["page"]["ranking"]["plans"]) == 50
    assert len(answers["plans"]) >= 40, "how many can be looked at in full"


def test_numbers_are_those_of_the_command_line(tmp_path: Path) -> None:
    target = tmp_path / "plans.html"
    assert run("rank", *FLAGSHIP, "--html", str(target)).exit_code == 0
    answers, expected = answers_of(target.read_text(encoding="utf-8")), dict(ranked("flagship"))
    assert answers["page"]["ranking"] | {"elapsed_s": 0} == expected | {"elapsed_s": 0}
    best = expected["best"]["id"]
    explained = json.loads(run("explain", *FLAGSHIP, "--plan", best, "--json").stdout)
    assert unpacked(answers, best, "explain") == explained
    bundle = unpacked(answers, best, "bundle")
    written = tmp_path / "bundle"
    assert run("generate", *FLAGSHIP, "-o", str(written)).exit_code == 0
    assert all((written / name).read_text(encoding="utf-8") == text for name, text in bundle["files"].items())
    assert bundle["commands"][0] == expected["next"]


def test_names_cannot_end_the_data(tmp_path: Path) -> None:
    """Whatever names contain, the page has exactly its own two script elements."""
    spec, target = hostile_spec(tmp_path), tmp_path / "plans.html"
    assert run("rank", str(spec), "--top", "2", "--html", str(target)).exit_code == 0
    text = target.read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert HOSTILE in answers_of(text)["page"]["command"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    target = tmp_path / "notes.html"
    target.write_text("mine", encoding="utf-8")
    done = run("rank", *LORA, "--html", str(target))
    assert done.exit_code != 0
    assert target.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("other", ["--json", "--csv"])
def test_one_form_at_a_time(other: str) -> None:
    assert run("rank", *LORA, other, "--html", "x.html").exit_code != 0


def test_modules_build_on_earlier_ones_alone() -> None:
    """The modules are concatenated into one script, in which each name may be defined only once."""
    names = [f"./{name}.js" for name in html._MODULES]
    assert {path.stem for path in STATIC.glob("*.js")} - {"worker"} == set(html._MODULES)
    declared: list[str] = []
    for place, name in enumerate(html._MODULES):
        text = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        assert set(re.findall(r'^import .* from "(.*)";$', text, re.MULTILINE)) <= set(names[:place]), name
        declared += re.findall(r"^(?:export )?(?:async )?(?:function|const|let) (\w+)", text, re.MULTILINE)
    assert sorted(declared) == sorted(set(declared))
    assert not re.search(r"^(import|export) ", html.script(), re.MULTILINE)
    assert "innerHTML" not in html.script()
