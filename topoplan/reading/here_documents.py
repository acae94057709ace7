"""Configurations that a script writes as here-documents: `cat > train.yaml <<'EOF'`.

Only those that state the file's content literally are read: quoted ones, or ones in which the shell expands nothing
(Bash Reference Manual, 3.6.6 Here Documents).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from topoplan.reading.parts import Part, PartKind
from topoplan.reading.shell_syntax import Shell

_OPENING = re.compile(r"[ \t]*(?:sudo[ \t]+)?(?:cat|tee)\b")
_TARGET = re.compile(r"(?:>|\btee\b)[ \t]*[\"']?([^\s\"'<>|;&]+\.(ya?ml|json))[\"']?(?!\S)")


def here_documents(script: Part) -> Iterator[Part]:
    """Yield the YAML and JSON files that a script writes, each with its lines in the script."""
    if "<<" not in script.text or _TARGET.search(script.text) is None:
        return
    lines = script.text.split("\n")
    for document in Shell(script.text, name=script.name).here_documents():
        opening, first, last = lines[document.line - 1], document.line + 1, document.last_line
        target = _TARGET.search(opening)
        text = "\n".join(line.lstrip("\t") if document.tabs else line for line in lines[first - 1 : last])
        if target is None or _OPENING.match(opening) is None or not text.strip():
            continue
        if not document.quoted and re.search(r"[$`\\]", text):
            continue
        kind: PartKind = "json" if target.group(2) == "json" else "yaml"
        yield Part(
            kind=kind,
            name=script.name,
            text=text + "\n",
            lines=tuple(script.file_line(number) for number in range(first, last + 1)),
            label=f"here-document {target.group(1)}",
            file=target.group(1),
        )
