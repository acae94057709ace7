"""The served page in a real browser: the question, what-if, and their effects."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.page.asked import CONFIG, FLAGSHIP, HOSTILE, LARGE, ROOT, SPEC, ranked
from tests.page.conftest import Open, awaited
from tests.page.test_browser import first_paint_ms, serious
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import Questions, server_of

pytestmark = pytest.mark.page


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Provide a function that serves a page with or without a spec, and returns its address."""
    with ExitStack() as stack:

        def address(spec: str | None = None, **options: Any) -> str:
            server = stack.enter_context(server_of(Questions(spec, SpecOptions(**options)), port=0))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.address

        yield address


def rank(page: Any) -> None:
    page.get_by_role("button", name="Rank", exact=True).click()


def title(page: Any, words: str) -> None:
    """Wait until the page's title contains the words."""
    awaited(page, "words => document.querySelector('h1').innerText.includes(words)", words)


def test_numbers_are_those_of_the_command_line(serve: Callable[..., str], open_page: Open) -> None:
    address, best = serve(FLAGSHIP[0]), ranked("flagship")["best"]
    assert first_paint_ms(open_page, address) < 1000
    page = open_page(address)
    assert best["id"] in page.locator("#answer").inner_text()
    assert f"{best['device_gib']:.1f} GiB" in page.locator("#plan").inner_text()
    page.locator("#plan .terms summary").first.click()
    page.locator("#file").select_option("plan.json")
    assert best["id"] in page.locator("#files pre").inner_text()


def test_a_question_is_asked_and_mended(serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve())
    assert page.locator("#answer").is_hidden()
    page.locator("#ask-gpu").fill("h10")
    rank(page)
    wrong = page.locator('[id="ask-gpu"][aria-invalid]')
    wrong.wait_for()
    assert "GPU 'h10' is not known" in page.locator("#wrong-gpu").inner_text()
    page.locator("#ask-gpu").fill("h100-sxm-80gb")
    page.locator('[id="ask-set.ib_bandwidth"]').fill("fast")
    rank(page)
    page.locator('[id="ask-set.ib_bandwidth"][aria-invalid]').wait_for()
    page.locator('[id="ask-set.ib_bandwidth"]').fill("200Gb/s")
    rank(page)
    title(page, "4 x 8 h100-sxm-80gb: Qwen/Qwen3-8B")
    assert page.locator("[aria-invalid]").count() == 0
    assert "--set ib_bandwidth=200Gb/s" in page.locator("#command").inner_text()


def test_the_best_plan_follows_a_slider(serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve(FLAGSHIP[0]))
    page.locator("#slide-nodes").focus()
    page.keyboard.press("ArrowLeft")
    title(page, "2 x 8 ")
    page.locator("#slide-nodes").press("ArrowRight")
    title(page, "4 x 8 ")
    page.locator("#slide-nodes").press("ArrowRight")  # above 32 GPUs, a button starts the search
    page.get_by_role("button", name="Search them").click()
    title(page, "8 x 8 ")
    page.get_by_role("button", name="The best along it").first.click()
    page.locator("#whatif tbody tr").first.wait_for()
    values = page.locator("#whatif tbody th").all_inner_texts()
    assert values == ["1", "2", "4", "8", "16", "32", "64"]
    rows = {row.locator("th").inner_text(): row.inner_text() for row in page.locator("#whatif tbody tr").all()}
    assert ranked("flagship")["best"]["id"] in rows["4"]


def test_a_link_holds_all_of_the_question(tmp_path: Path, serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve())
    give(page, tmp_path, {"mine.yaml": SPEC.replace("Qwen/Qwen3-8B", "config.json"), "config.json": json.dumps(CONFIG)})
    title(page, "mine, 1 x 8 h100-sxm-80gb: Mine-8B")
    page.locator("#ask-batch").fill("32")
    rank(page)
    title(page, "32 x 4,096 tokens")
    rows = page.locator("#plans tbody tr")
    rows.nth(2).get_by_role("radio").check()
    rows.nth(0).get_by_role("checkbox").check()
    page.locator("#difference").wait_for()
    again = open_page(page.url)
    title(again, "mine, 1 x 8 h100-sxm-80gb: Mine-8B")
    again.locator("#difference").wait_for()
    for part in ("#title", "#command code", "#answer", "#plans tbody", "#difference", "#dropped"):
        assert again.locator(part).inner_text() == page.locator(part).inner_text()
    assert again.locator("#plans tbody tr").nth(2).get_by_role("radio").is_checked()


def test_rubbish_in_a_link_is_left_aside(serve: Callable[..., str], open_page: Open) -> None:
    address = serve(FLAGSHIP[0], pin=["tp=4,pp=1"])
    for rubbish in ("%", "null", '{"values":3}', "<img src=x onerror=alert(1)>", "a" * 50_000):
        title(open_page(f"{address}#{quote(rubbish)}"), "4 x 8 ")
    odd = {
        "values": {"nodes": "2", "constructor": "x", "gpu": 3},
        "spec": "/etc/passwd",
        "files": {"a": 1},
        "picked": 7,
    }
    title(open_page(f"{address}#{quote(json.dumps(odd))}"), "2 x 8 ")
    wrong = {"values": {"nodes": HOSTILE}, "picked": [HOSTILE, {}]}
    page = open_page(f"{address}#{quote(json.dumps(wrong))}")
    assert HOSTILE[:9] in page.locator("#wrong-nodes").inner_text()
    assert page.locator("img[src=x]").count() == 0


def give(page: Any, folder: Path, files: dict[str, str | bytes]) -> None:
    """Choose files in the form."""
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    page.locator("#files-chosen").set_input_files([folder / name for name in files])


def drop(page: Any, name: str, content: str) -> None:
    """Drop a file on the form."""
    put = "([name, text]) => { const all = new DataTransfer(); all.items.add(new File([text], name)); return all; }"
    page.locator("#question form").dispatch_event("drop", {"dataTransfer": page.evaluate_handle(put, [name, content])})


def test_files_of_somebodys_own(tmp_path: Path, serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve())
    give(page, tmp_path, {"config.json": b" " * 50_000_000})
    page.get_by_text("config.json has 50,000 kB").wait_for()
    give(page, tmp_path, {"config.json": b"{"})
    page.locator("#wrong-model", has_text="config.json:1: is not JSON").wait_for()
    drop(page, "config.json", json.dumps(CONFIG))
    title(page, "4 x 8 h100-sxm-80gb: Mine-8B")
    drop(page, "train.yaml", (ROOT / "docs" / "example-train.yaml").read_text(encoding="utf-8"))
    page.locator("#command code", has_text="--job train.yaml").wait_for()
    assert "--model config.json" in page.locator("#command code").inner_text()
    assert "the job" in page.locator("#dropped").inner_text()
    page.get_by_role("button", name="Remove config.json").click()
    page.locator("#ask-nodes").fill("2")
    rank(page)
    title(page, "2 x 8 h100-sxm-80gb: Qwen/Qwen3-8B")
    drop(page, "<b>.yaml", "gpu: h100\nnodes: 1\n model: x")
    page.locator("#problem", has_text="<b>.yaml:3").wait_for()
    drop(page, "<b>.yaml", SPEC)
    title(page, "1 x 8 h100-sxm-80gb: Qwen/Qwen3-8B")
    assert "topoplan rank '<b>.yaml'" in page.locator("#command code").inner_text()


def test_a_long_search_shows_how_far_it_is_and_can_be_stopped(serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve())
    for name, value in LARGE.items():
        page.locator(f"#ask-{name}").fill(value)
    rank(page)
    page.locator("#searching", has_text="%").wait_for()
    page.locator("#ask-nodes").fill("64")  # the page stays responsive
    page.locator("#stop").click()
    page.locator("#answer", has_text="stopped").wait_for()
    page.locator("#stop").wait_for(state="hidden")
    page.wait_for_timeout(500)
    assert page.locator("#searching").inner_text() == ""


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_nothing_serious_stands_in_anybodys_way(
    width: int, scheme: str, serve: Callable[..., str], open_page: Open
) -> None:
    page = open_page(serve(FLAGSHIP[0]), width=width, scheme=scheme)
    page.locator("#ask-gpu").fill("h10")
    rank(page)
    page.locator("[aria-invalid]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious(page) == []
