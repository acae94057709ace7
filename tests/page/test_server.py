"""What the served page gives to whom, without a browser; and that its numbers are those of the command line."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.page.asked import FLAGSHIP, ranked, run
from topoplan.cli.options import SpecOptions
from topoplan.cli.page import Questions
from topoplan.errors import InputError
from topoplan.page.server import HOST, MOST_BYTES, PageServer
from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec

REST = {"model": "Qwen/Qwen3-8B", "seq_len": "4k", "batch": "8"}
NOTHING: dict[str, Any] = {"question": {"options": {}, "spec": None}}


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
    """Status and text; `Content_Type` is the header of that name."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
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
    assert json.loads(text) == {"error": {"message": "--gpu: no", "where": "--gpu"}}


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
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
    connection.putrequest("POST", f"/{server.token}/echo")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(50 * MOST_BYTES))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_only_this_machine_can_reach_it(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_answers_are_those_of_the_command_line() -> None:
    questions = Questions(FLAGSHIP[0], SpecOptions())
    page = questions.answer(NOTHING)
    expected = ranked("flagship")
    assert page["ranking"]["plans"][:10] == expected["plans"]
    assert {**page["ranking"], "plans": [], "elapsed_s": 0} == {**expected, "plans": [], "elapsed_s": 0}
    best = expected["best"]["id"]
    details = questions.details({**NOTHING, "id": best})
    assert details["explain"] == json.loads(run("explain", *FLAGSHIP, "--plan", best, "--json").stdout)
    along = questions.along({**NOTHING, "key": "nodes", "values": [2, 4]})
    assert [case["plan"]["id"] for case in along["cases"]][1] == best


def test_a_value_on_top_of_the_spec_is_an_option() -> None:
    questions = Questions(FLAGSHIP[0], SpecOptions())
    asked = {"options": {"nodes": "2", "overrides": ["samples=1000"]}, "spec": None}
    page = questions.answer({"question": asked})
    assert page["command"] == f"topoplan rank {FLAGSHIP[0]} --nodes 2 --set samples=1000"
    assert page["ranking"]["cluster"]["nodes"] == 2


def test_a_dropped_spec_takes_the_place_of_all_else() -> None:
    text = "gpu: h100\nnodes: 1\nmodel: Qwen/Qwen3-8B\njob: {seq_len: 4096, global_batch_size: 16}\n"
    page = Questions(FLAGSHIP[0], SpecOptions(nodes="3")).answer({"question": {"options": {}, "spec": text}})
    assert page["ranking"]["cluster"]["nodes"] == 1
    assert page["command"] == "topoplan rank SPEC"


@pytest.mark.parametrize(
    ("question", "where"),
    [
        (None, ""),
        ([], ""),
        ({"options": {"gpu": 3}, "spec": None}, "--gpu"),
        ({"options": {"profile": "/etc/passwd"}, "spec": None}, ""),
        ({"options": {"overrides": [1]}, "spec": None}, "--overrides"),
        (
            {"options": {"gpu": "h10"} | REST, "spec": None},
            "--gpu h10: gpu",
        ),
        ({"options": {}, "spec": "a: [" * 10}, "SPEC:2:1"),
        ({"options": {}, "spec": 7}, ""),
    ],
)
def test_rubbish_is_told_with_its_place(question: Any, where: str) -> None:
    with pytest.raises(InputError) as raised:
        Questions(None, SpecOptions()).answer({"question": question})
    assert raised.value.where == where


def test_a_stopped_search_answers_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Questions(FLAGSHIP[0], SpecOptions())

    def stopped_half_way(spec: Spec, progress: Callable[[int, int], bool]) -> Ranking:
        def stops(done: int, total: int) -> bool:
            if done == total // 2:
                questions.stop({})
            return progress(done, total)

        return rank(spec, progress=stops)

    monkeypatch.setattr("topoplan.planner.search.rank", stopped_half_way)
    assert 0 < questions.answer(NOTHING)["ranking"]["searched"] < 1
    assert questions.progress({}) == {"done": 0, "total": 0}


def test_the_question_without_spec_begins_with_an_example() -> None:
    assert Questions(None, SpecOptions()).first() is None
    assert Questions(None, SpecOptions(gpu="h100", model="Qwen/Qwen3-8B", seq_len="4k", batch="16")).first() is not None
