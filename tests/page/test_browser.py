"""The page in a real browser, used as by a person."""

from pathlib import Path
from typing import Any

import pytest

from tests.page.asked import FLAGSHIP, HOSTILE, QUESTIONS, hostile_spec, ranked, run
from tests.page.conftest import Open, awaited

pytestmark = pytest.mark.page


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the address of each question's page, by the question's name."""
    folder = tmp_path_factory.mktemp("pages")

    def address(name: str) -> str:
        target = folder / f"{name}.html"
        if not target.exists():
            assert run("rank", *QUESTIONS[name], "--html", str(target)).exit_code == (name == "nowhere")
        return target.as_uri()

    return address


def serious(page: Any) -> list[str]:
    """Return the problems that axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def first_paint_ms(open_page: Open, address: str, times: int = 8) -> float:
    """Return the shortest of some times until the first paint: others may have the processor for long."""
    paint = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    return float(min(awaited(open_page(address), paint) for _ in range(times)))


@pytest.mark.parametrize("name", ["flagship", "moe", "lora"])
def test_each_part_as_a_person_uses_it(name: str, written: Any, open_page: Open) -> None:
    page, expected = open_page(written(name)), ranked(name)
    plans = expected["plans"]
    best = plans[0]

    answer = page.locator("#answer")
    assert best["id"] in answer.inner_text()
    assert expected["next"] in answer.inner_text()

    points = page.locator("#plans svg .point[data-id]")
    assert points.count() == len(plans)
    page.locator(f'.point[data-id="{plans[1]["id"]}"]').dispatch_event("click")  # points of similar plans overlap
    assert page.locator(f'[id="pick-{plans[1]["id"]}"]').is_checked()
    page.locator(f'[id="compare-{best["id"]}"]').check()
    more = page.locator("#difference").inner_text()
    assert "compared with the picked one" in more
    page.locator(f'[id="compare-{best["id"]}"]').uncheck()
    page.locator(f'[id="pick-{best["id"]}"]').check()

    memory, step = page.locator("#plan .two > div").all()
    assert f"{best['memory']['device_gib']:.1f} GiB" in memory.inner_text()
    weights = memory.locator("details", has_text="weights").first
    weights.locator("summary").first.click()
    weights.get_by_text(".py::").first.wait_for()
    step.locator("details summary").first.click()
    step.locator("details details").first.wait_for()

    for picture in page.locator("#pictures img").all():
        assert picture.evaluate("one => one.naturalWidth") > 300
    width = page.locator("#pictures img").first.bounding_box()["width"]
    page.get_by_role("button", name="Larger: Timeline").click()
    assert page.locator("#pictures img").first.bounding_box()["width"] > 1.3 * width

    page.locator("#file").select_option("plan.json")
    assert best["id"] in page.locator("#files pre").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save the file").click()
    assert best["id"] in Path(download.value.path()).read_text(encoding="utf-8")


def test_filters_leave_what_they_say(written: Any, open_page: Open) -> None:
    page, plans = open_page(written("flagship")), ranked("flagship")["plans"]
    page.locator("#filter-tp").select_option("1")
    left = [plan for plan in plans if plan["layout"]["tp"] == 1]
    assert page.locator("#plans tbody tr").count() == len(left) < len(plans)
    assert page.locator("#plans svg .point[data-id]").count() == len(left)
    assert page.get_by_role("status").inner_text() == f"{len(left)} of {len(plans)} plans"


def test_where_nothing_fits_there_is_what_would(written: Any, open_page: Open) -> None:
    page, expected = open_page(written("nowhere")), ranked("nowhere")
    assert expected["plans"] == []
    text = page.locator("#answer").inner_text()
    assert "no layout fits" in text
    assert next(way["command"] for way in expected["ways_out"] if way["plan"]) in text
    out = page.locator("#plans svg .point.out")
    assert out.count() > 0
    out.first.hover(force=True)
    assert "GiB too much" in page.locator("#plans .hint").inner_text()
    assert page.locator("#files").is_hidden()


def test_with_the_keyboard_alone(written: Any, open_page: Open) -> None:
    page, plans = open_page(written("flagship")), ranked("flagship")["plans"]
    page.locator(f'[id="pick-{plans[0]["id"]}"]').focus()
    page.keyboard.press("ArrowDown")
    awaited(page, "id => document.activeElement.id === id", f"pick-{plans[1]['id']}")
    assert page.locator("#plan .said").first.inner_text().startswith(plans[1]["id"].replace("-", " ")[:8])
    page.locator("#plan .terms summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#plan .terms details[open]").count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")])
def test_nothing_serious_stands_in_anybodys_way(width: int, scheme: str, written: Any, open_page: Open) -> None:
    for name in ("flagship", "nowhere"):
        page = open_page(written(name), width=width, scheme=scheme)
        for summary in page.locator("#plan .terms summary").all()[:2]:
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page) == []


def test_hostile_names_are_text(tmp_path: Path, open_page: Open) -> None:
    spec, target = hostile_spec(tmp_path), tmp_path / "x.html"
    assert run("rank", str(spec), "--top", "2", "--html", str(target)).exit_code == 0
    page = open_page(target.as_uri())
    assert HOSTILE in page.locator("#command").inner_text()
    assert page.locator("img[src=x]").count() == 0


def test_two_plans_of_explain(tmp_path: Path, open_page: Open) -> None:
    target = tmp_path / "two.html"
    assert run("explain", *FLAGSHIP, "--plan", "1", "--versus", "2", "--html", str(target)).exit_code == 0
    page, plans = open_page(target.as_uri()), ranked("flagship")["plans"]
    text = page.locator("#answer").inner_text()
    assert plans[0]["id"] in text
    assert plans[1]["id"] in text
    assert page.locator("#difference").count() == 1


def test_a_plan_that_does_not_fit_is_on_the_chart(tmp_path: Path, open_page: Open) -> None:
    target, wanted = tmp_path / "out.html", "tp1-pp1-dp1-mbs1"
    assert run("explain", *QUESTIONS["nowhere"], "--plan", wanted, "--html", str(target)).exit_code == 0
    page = open_page(target.as_uri(), width=390)
    assert "it does not fit" in page.locator("#answer").inner_text()
    point, chart = (page.locator(one).bounding_box() for one in ("#plans svg .point", "#plans svg"))
    assert chart["y"] < point["y"] < chart["y"] + chart["height"]
    assert "does not fit" in page.locator("#files").inner_text()


def test_first_paint_is_soon(written: Any, open_page: Open) -> None:
    assert first_paint_ms(open_page, written("flagship")) < 1000
