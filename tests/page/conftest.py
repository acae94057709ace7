"""Debian's Chromium under Playwright. A request to another machine is blocked and fails the test, and so does any
message in the console."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.waiting import LIMIT_S, wait_until

Open = Callable[..., Any]
LIMIT_MS = 1000 * LIMIT_S


def awaited(page: Any, function: str, argument: object = None) -> Any:
    """Return the first true value of a JavaScript function in a page.

    Playwright's `wait_for_function` evaluates its text in the page on every try but the first, which the page's policy
    forbids.
    """
    found: list[Any] = []
    wait_until(lambda: found.append(page.evaluate(function, argument)) or found[-1], function)
    return found[-1]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[page]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine: apt install chromium")
    with playwright.sync_playwright() as running:
        # Run as root, as in a container, Chromium cannot use its sandbox.
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=LIMIT_MS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Provide a function that opens an address, at a width and in a color scheme, and waits until the page is drawn."""
    complaints: list[str] = []
    contexts = []

    def is_of_this_machine(address: str) -> bool:
        parts = urlsplit(address)
        return parts.scheme in ("file", "data", "blob") or parts.hostname == "127.0.0.1"

    def checked(route: Any) -> None:
        if is_of_this_machine(route.request.url):
            route.continue_()
        else:
            complaints.append(f"asked for {route.request.url}")
            route.abort()

    def opened(address: str, *, width: int = 1440, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.route("**/*", checked)
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
