"""The output of the collecting script, back into its sections."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

OVERTIME = 124
"""Code of a section whose tool was not done in time, or said too much."""
NOT_INSTALLED = 127

_HEADER = re.compile(rb"^@@topoplan ([A-Za-z0-9_-]{1,40}) ([0-9]{1,3}) ([0-9]{1,9})\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one tool said."""

    name: str
    code: int
    """Its exit code."""
    text: str
    """Its output; bytes that are not UTF-8 are replaced."""
    is_whole: bool = True
    """None of it was lost on the way."""

    @property
    def problem(self) -> str:
        """Why there is nothing to read, as a phrase; empty where the tool worked."""
        if self.code == NOT_INSTALLED:
            return "not installed"
        if self.code == OVERTIME:
            return "no answer in time"
        if self.code != 0:
            said = [line.strip() for line in self.text.splitlines() if line.strip()]
            return said[0][:200] if said else f"exit code {self.code}"
        return ""


def read_sections(output: bytes) -> tuple[Section, ...]:
    """The sections in `output`, in order. What a login prints before, between or after them is passed over.

    A section that is cut (by a limit on the output, or by the end of the connection) is not whole, and has what there
    is of it.
    """
    found: list[Section] = []
    position = 0
    while header := _HEADER.search(output, position):
        start, end = header.end(), header.end() + int(header[3])
        # A length that leads past the next header, or not to the end of a line, tells that bytes are missing.
        whole = end < len(output) and output[end : end + 1] == b"\n"
        position = end
        if not whole:
            following = _HEADER.search(output, start)
            position = end = following.start() if following else len(output)
        found.append(
            Section(
                name=header[1].decode(),
                code=int(header[2]),
                text=output[start:end].decode("utf-8", "replace"),
                is_whole=whole,
            )
        )
    return tuple(found)


def pairs(text: str) -> list[tuple[str, str]]:
    """The `label<TAB>value` lines of a section."""
    return [(label, value.strip()) for label, tab, value in (line.partition("\t") for line in text.splitlines()) if tab]


def number(text: str) -> int | None:
    """A whole number, or None for anything else; nothing longer than a machine can mean."""
    word = text.strip()
    return int(word) if re.fullmatch(r"-?[0-9]{1,18}", word, re.ASCII) else None


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A numeric address, which may name its interface (`fe80::1%eth0`); None for anything else."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
