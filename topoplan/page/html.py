"""Build the page as a single file: markup, style, script and answers, with nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

MARK = "<!-- written by topoplan, a page of plans -->\n"
"""The start of every page written by topoplan."""
MOST_BYTES = 1_500_000

_MODULES = ("dom", "engine", "chart", "table", "terms", "plan", "pictures", "files", "question", "whatif", "main")
"""The page's JavaScript modules, in dependency order."""
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def answers_html(page: Mapping[str, Any], details: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the page with embedded answers; details of further plans are dropped once the file gets too large."""
    blobs: dict[str, str] = {}
    plans: dict[str, dict[str, str]] = {}
    answers = {"page": page, "plans": plans, "blobs": blobs}
    size = len(_html(answers))
    for name, parts in details:
        packed = {part: _packed(content) for part, content in parts.items()}
        new = {key: text for key, text in packed.values() if key not in blobs}
        size += sum(len(text) + len(key) + 8 for key, text in new.items()) + 150
        if plans and size > MOST_BYTES:
            break
        blobs |= new
        plans[name] = {part: key for part, (key, _) in packed.items()}
    return _html(answers)


def live_html(form: Mapping[str, Any]) -> str:
    """Return a page that queries the server it came from; `form` is what can be asked."""
    return _html({"form": form}, connect="'self'")


def playground_html(form: Mapping[str, Any]) -> str:
    """Return a page that queries the worker next to it, `static/worker.js`."""
    return _html({"form": form, "worker": "worker.js"}, connect="'self'; worker-src 'self'")


def script() -> str:
    """Return the modules as one script, because browsers do not import modules from local files."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _static(f"{name}.js"))) for name in _MODULES)


def _packed(content: Any) -> tuple[str, str]:
    """Return key and text (JSON, deflated, in base64) of content that is stored once, however many plans share it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(text).hexdigest()[:16], base64.b64encode(zlib.compress(text, 9)).decode()


def _html(answers: Mapping[str, Any], *, connect: str = "'none'") -> str:
    # Escaped, so that a browser sees no end of a script, comment or entity inside a JSON string.
    embedded = json.dumps(answers, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        embedded = embedded.replace(sign, f"\\u{ord(sign):04x}")
    style, code = _static("page.css"), script()
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data:;"
        f" connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    filled = {"policy": policy, "style": style, "script": code, "answers": embedded}
    return MARK + re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], _static("page.html"))


def _static(name: str) -> str:
    return (files("topoplan.page") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return a text's hash as a source expression of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
