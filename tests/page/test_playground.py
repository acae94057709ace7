"""The planner in the browser gives the same numbers for the same question."""

import json
import math
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import playground
from tests.page.asked import LARGE, SHIPPED
from tests.page.conftest import LIMIT_MS, Open
from tests.page.test_browser import first_paint_ms
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import _EXAMPLE, Questions

pytestmark = pytest.mark.page


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target: Path = tmp_path_factory.mktemp("site") / "playground"
    try:
        playground.build(target)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Pyodide or its wheel cannot be had here: {error}")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(target))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


ENGINE = """() => {
  const worker = new Worker("worker.js", { type: "module" });
  window.answerOf = (name, body) => new Promise((answer) => {
    worker.onmessage = ({ data }) => data.said && answer(data.said);
    worker.postMessage({ name, body });
  });
}"""


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Return the differences of two documents. Numbers are rounded to six digits, and the last digit may differ because
    another Python may sum in a different way."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, pair in pairs for found in differences(*pair, f"{place}[{at}]")]
    is_close = isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1.5e-5)
    return [] if one == other or is_close else [f"{place}: {one!r} here {other!r}"]


def test_numbers_are_those_of_this_python(address: str, open_page: Open) -> None:
    """Compares the whole page, and the details of the best plan, for all shipped specs."""
    page = open_page(address)
    page.evaluate(ENGINE)

    def asked(name: str, body: dict[str, Any]) -> tuple[Any, Any]:
        page.evaluate("([name, body]) => { window.told = answerOf(name, body); }", [name, body])
        here = getattr(Questions(None, SpecOptions()), name)(body)  # computed while the browser works
        return page.evaluate("told"), json.loads(json.dumps(here))

    for path in SHIPPED:
        question = {"options": {}, "spec": path.name, "files": {path.name: path.read_text(encoding="utf-8")}}
        there, here = asked("answer", {"question": question})
        assert there["ranking"].pop("elapsed_s") > 0 < here["ranking"].pop("elapsed_s")
        assert differences(there, here) == [], path.name
        there, here = asked("details", {"question": question, "id": here["ranking"]["best"]["id"]})
        assert differences(there["explain"], here["explain"]) == [], path.name
        assert there["bundle"] == here["bundle"], path.name


def test_it_is_there_soon(address: str, open_page: Open) -> None:
    assert first_paint_ms(open_page, address) < 1000


def ask(page: Any, **values: str) -> None:
    for name, value in values.items():
        page.locator(f"#ask-{name}").fill(value)
    page.get_by_role("button", name="Rank", exact=True).click()


def test_a_question_is_asked_and_mended(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.set_default_timeout(2 * LIMIT_MS)
    ask(page)
    page.locator("#files pre").wait_for()
    expected = Questions(None, SpecOptions()).answer({"question": {"options": _EXAMPLE, "spec": None}})
    best = expected["ranking"]["best"]
    assert page.locator("h1").inner_text() == expected["title"]
    assert page.locator("#answer strong").first.inner_text() == best["id"]
    assert f"{best['device_gib']:.1f} GiB" in page.locator("#plan").inner_text()
    shown = page.locator("#plans tbody tr th").all_inner_texts()
    assert shown == list(expected["labels"].values())
    ask(page, gpu="h10")
    page.locator('[id="ask-gpu"][aria-invalid]').wait_for()


def test_a_long_search_shows_how_far_it_is_and_can_be_stopped(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.set_default_timeout(2 * LIMIT_MS)
    ask(page, **LARGE)
    page.locator("#searching", has_text="Starting Python").wait_for()
    page.locator("#searching", has_text="%").wait_for()
    page.locator("#ask-nodes").fill("64")  # the page stays responsive
    page.locator("#stop").click()
    page.locator("#problem", has_text="stopped").wait_for()
    page.locator("#stop").wait_for(state="hidden")
    ask(page, gpu="h100", nodes="1", model="Qwen/Qwen3-8B", seq_len="4096", batch="16")
    page.locator("#files pre").wait_for()
