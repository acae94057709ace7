"""Configurations that a script writes itself: `cat > train.yaml <<'EOF'`.

Read are those that say literally what the file will hold: quoted, or without anything that the shell puts in place
(Bash Reference Manual, 3.6.6 Here Documents).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.reading.parts import Part, PartKind

_OPENING = re.compile(r"[ \t]*(?:sudo[ \t]+)?(?:cat|tee)\b.*?<<(-?)[ \t]*(['\"]?)(\w+)\2(?!\S)")
_TARGET = re.compile(r"(?:>|\btee\b)[ \t]*[\"']?([^\s\"'<>|;&]+\.(ya?ml|json))[\"']?(?!\S)")


def here_documents(script: Part) -> Iterator[Part]:
    """The YAML and JSON files that a script writes, each with its lines in the script."""
    lines = script.text.split("\n")
    at = 0
    while at < len(lines):
        opening, target = _OPENING.match(lines[at]), _TARGET.search(lines[at])
        at += 1
        if opening is None:
            continue
        tabs, quote, delimiter = opening.groups()
        first = at
        while at < len(lines) and (lines[at].lstrip("\t") if tabs else lines[at]).rstrip("\r") != delimiter:
            at += 1
        text = "\n".join(line.lstrip("\t") if tabs else line for line in lines[first:at])
        if target is None or at == len(lines) or not text.strip() or (not quote and re.search(r"[$`\\]", text)):
            continue
        kind: PartKind = "json" if target.group(2) == "json" else "yaml"
        numbers = tuple(script.file_line(number) for number in range(first + 1, at + 1))
        yield Part(
            kind=kind,
            name=script.name,
            text=text + "\n",
            lines=numbers,
            label=f"here-document {target.group(1)}",
            file=target.group(1),
        )
