"""Launch commands in the comment at the top of a configuration: `# accelerate launch ... train.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from topoplan.reading.kinds import looks_like_command
from topoplan.reading.parts import Part

_COMMENT = re.compile(r"#[ \t]?(.*)")
_CONTINUED = re.compile(r"\\[ \t]*$")


def commands_in_comments(part: Part) -> Iterator[Part]:
    """Yield the commands in the comment at the top of a YAML file as one script, with its lines; nothing if none."""
    top = takewhile(lambda line: line.startswith("#") or not line.strip(), part.text.splitlines())
    lines: list[str] = []
    goes_on = found = False
    for line in top:
        match = _COMMENT.match(line)
        text = match[1] if match else ""
        is_command = goes_on or looks_like_command(text)
        goes_on = is_command and _CONTINUED.search(text) is not None
        found = found or is_command
        lines.append(text if is_command else "")
    if found:
        text = "\n".join(lines) + "\n"
        numbers = tuple(range(1, len(lines) + 2))
        yield Part(kind="shell", name=part.name, text=text, lines=numbers, label="comment")
