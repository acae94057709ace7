"""The planner in the browser: the same question has the same numbers there."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import playground
from tests.page.conftest import Open
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


def test_numbers_are_those_of_this_python(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.set_default_timeout(60_000)
    page.get_by_role("button", name="Rank", exact=True).click()
    page.locator("#files pre").wait_for()
    expected = Questions(None, SpecOptions()).answer({"question": {"options": _EXAMPLE, "spec": None}})
    best = expected["ranking"]["best"]
    assert page.locator("h1").inner_text() == expected["title"]
    assert page.locator("#answer strong").first.inner_text() == best["id"]
    assert f"{best['device_gib']:.1f} GiB" in page.locator("#plan").inner_text()
    shown = page.locator("#plans tbody tr th").all_inner_texts()
    assert shown == list(expected["labels"].values())

    page.locator("#ask-gpu").fill("h10")
    page.get_by_role("button", name="Rank", exact=True).click()
    page.locator('[id="ask-gpu"][aria-invalid]').wait_for()
