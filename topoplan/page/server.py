"""Serve the page on the loopback interface, at an address with a secret, for the local browser only."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Mapping
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from topoplan.page.form import Answer, reply

HOST = "127.0.0.1"
MOST_BYTES = 1_000_000
"""Size limit of a request."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Serves one page, and answers its questions by name. Every request needs the token."""

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], str], answers: Mapping[str, Answer]) -> None:
        """`page` is called for each visit; an answer is called with the JSON object of the request, in its own thread.
        Raises OSError if the port is taken."""
        super().__init__((HOST, port), _Visit)
        self.page, self.answers = page, answers
        self.token = secrets.token_urlsafe(24)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has disconnected; report any other error as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The URL to open."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Visit(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "topoplan", ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log to the terminal."""

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
            # A form on another site cannot send this type without a preflight request, which is not answered.
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
        """Return whether a request has the token, and comes from no other site and for no other host name."""
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        token = self.path.split("/")[1:2] or [""]
        right = compare_digest(token[0].encode(), self.server.token.encode())
        return right and host in own and origin in (None, f"http://{host}")

    def _asked_for(self) -> str:
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
