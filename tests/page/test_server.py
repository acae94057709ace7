"""What the page server returns to which requests, without a browser."""

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from topoplan.errors import InputError
from topoplan.page.server import HOST, MOST_BYTES, PageServer


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    def refuses(asked: Any) -> Any:
        raise InputError("no", where="--gpu")

    with PageServer(0, lambda: "the page", {"echo": lambda asked: asked, "refuses": refuses}) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: PageServer, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    """Return status and text of a request; underscores in header names stand for hyphens."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if body is None else "POST"
    kind = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path.replace("TOKEN", server.token), body, kind | named)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_who_has_the_address_gets_the_page(server: PageServer) -> None:
    assert ask(server, "/TOKEN/") == (200, "the page")
    assert ask(server, "/TOKEN/echo", '{"a": 1}') == (200, '{"a": 1}')
    status, text = ask(server, "/TOKEN/refuses", "{}")
    assert status == 200
    assert json.loads(text) == {"error": {"message": "--gpu: no", "field": "gpu"}}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/", None, {}, 403),
        ("/wrong/", None, {}, 403),
        ("/wrong/echo", "{}", {}, 403),
        ("/TOKEN/other", None, {}, 404),
        ("/TOKEN/../../etc/passwd", None, {}, 404),
        ("/TOKEN/other", "{}", {}, 404),
        ("/TOKEN/", None, {"Host": "evil.example"}, 403),
        ("/TOKEN/echo", "{}", {"Host": "evil.example:80"}, 403),
        ("/TOKEN/echo", "{}", {"Origin": "https://evil.example"}, 403),
        ("/TOKEN/echo", "{}", {"Origin": "null"}, 403),
        ("/TOKEN/echo", "{}", {"Content_Type": "text/plain"}, 415),
        ("/TOKEN/echo", "{}", {"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ("/TOKEN/echo", "not JSON", {}, 400),
        ("/TOKEN/echo", "[" * 100_000, {}, 400),
        ("/TOKEN/echo", "{}", {"Content_Length": "-1"}, 413),
    ],
)
def test_everybody_else_gets_nothing(
    path: str, body: str | None, headers: dict[str, str], status: int, server: PageServer
) -> None:
    got, text = ask(server, path, body, **headers)
    assert got == status
    assert "page" not in text


def test_fifty_megabytes_are_not_read(server: PageServer) -> None:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=120)
    connection.putrequest("POST", f"/{server.token}/echo")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(50 * MOST_BYTES))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_only_this_machine_can_reach_it(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
