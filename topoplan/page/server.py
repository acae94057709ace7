"""The page on the loopback interface: one address with a secret in it, for this machine's browser alone."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Mapping
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from topoplan.page.reply import Answer, reply

HOST = "127.0.0.1"
MOST_BYTES = 1_000_000
"""Of what a page may send."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Serves one page, and answers what it asks by name. Nobody without the token gets anything."""

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], str], answers: Mapping[str, Answer]) -> None:
        """`page` is made for each visit; an answer is called with the JSON object that was sent, in a thread of its
        own. Raises OSError where the port is taken."""
        super().__init__((HOST, port), _Visit)
        self.page, self.answers = page, answers
        self.token = secrets.token_urlsafe(24)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error; any other is told as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Visit(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "topoplan", ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is not for a log."""

    def do_GET(self) -> None:
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN)
        elif self._asked_for() != "":
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page())

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN)
        elif (answer := self.server.answers.get(self._asked_for())) is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif self.headers.get_content_type() != "application/json":
            # Another site's form cannot send this kind without asking first, which nobody answers.
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        elif not length.isdecimal() or int(length) > MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._answer(answer, self.rfile.read(int(length)))

    def _answer(self, answer: Answer, content: bytes) -> None:
        try:
            said = reply(answer, json.loads(content))
        except (ValueError, RecursionError):
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(said, allow_nan=False))

    def _is_ours(self) -> bool:
        """Whether the visitor has the token, and is no page of another site or under another name of this machine."""
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        token = self.path.split("/")[1:2] or [""]
        right = compare_digest(token[0].encode(), self.server.token.encode())
        return right and host in own and origin in (None, f"http://{host}")

    def _asked_for(self) -> str:
        """What stands behind the token."""
        return self.path.partition(f"/{self.server.token}/")[2]

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{status.phrase}\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": kind, "Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
