"""The served page in a real browser: the question, what-if, and everything behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.page.asked import FLAGSHIP, ranked
from tests.page.conftest import Open
from tests.page.test_browser import serious
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import Questions, server_of

pytestmark = pytest.mark.page


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """The address of the page of a spec, or of none."""
    with ExitStack() as stack:

        def address(spec: str | None = None, **options: str) -> str:
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
    """Waits until the page is about something else."""
    page.wait_for_function("words => document.querySelector('h1').innerText.includes(words)", arg=words)


def test_numbers_are_those_of_the_command_line(serve: Callable[..., str], open_page: Open) -> None:
    page, best = open_page(serve(FLAGSHIP[0])), ranked("flagship")["best"]
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
    page.keyboard.press("ArrowRight")
    title(page, "8 x 8 ")
    page.get_by_role("button", name="The best along it").first.click()
    page.locator("#whatif tbody tr").first.wait_for()
    values = page.locator("#whatif tbody th").all_inner_texts()
    assert values == ["1", "2", "4", "8", "16", "32", "64"]
    rows = {row.locator("th").inner_text(): row.inner_text() for row in page.locator("#whatif tbody tr").all()}
    assert ranked("flagship")["best"]["id"] in rows["4"]


def test_a_link_holds_the_question(serve: Callable[..., str], open_page: Open) -> None:
    address = serve(FLAGSHIP[0])
    page = open_page(address)
    page.locator("#ask-nodes").fill("2")
    rank(page)
    title(page, "2 x 8 ")
    page.wait_for_function("location.hash.length > 1")
    again = open_page(page.url)
    title(again, "2 x 8 ")


def test_rubbish_in_a_link_is_left_aside(serve: Callable[..., str], open_page: Open) -> None:
    address = serve(FLAGSHIP[0])
    for rubbish in ("%", "null", "%7B%22values%22:3%7D", "<img src=x onerror=alert(1)>", "a" * 50_000):
        title(open_page(f"{address}#{rubbish}"), "4 x 8 ")


def test_a_spec_of_somebodys_own(tmp_path: Path, serve: Callable[..., str], open_page: Open) -> None:
    page = open_page(serve())

    def give(text: bytes) -> None:
        spec = tmp_path / "<b>.yaml"
        spec.write_bytes(text)
        page.locator("#spec-file").set_input_files(spec)

    give(b"#" * 50_000_000)
    page.get_by_text("too large for a spec").wait_for()
    give(b"gpu: h100\nnodes: 1\n model: x")
    page.locator("#problem", has_text="SPEC:").wait_for()
    give(b"gpu: h100\nnodes: 1\nmodel: Qwen/Qwen3-8B\njob: {seq_len: 4096, global_batch_size: 16}\n")
    title(page, "1 x 8 h100-sxm-80gb: Qwen/Qwen3-8B")


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
