"""Split the output of the collecting script into its sections."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

OVERTIME = 124
"""Exit code of a section whose tool exceeded its time limit or its output limit."""
NOT_INSTALLED = 127

_HEADER = re.compile(rb"^@@topoplan ([A-Za-z0-9_-]{1,40}) ([0-9]{1,3}) ([0-9]{1,9})\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The output of one tool."""

    name: str
    code: int
    text: str
    """Output of the tool; bytes that are not UTF-8 are replaced."""
    is_whole: bool = True
    """Whether none of the output was lost on the way."""

    @property
    def problem(self) -> str:
        """Why there is no usable output, as a phrase; empty if the tool worked and nothing was lost."""
        if self.code == NOT_INSTALLED:
            return "not installed"
        if self.code == OVERTIME:
            return "no answer in time"
        if self.code != 0:
            said = [line.strip() for line in self.text.splitlines() if line.strip()]
            return said[0][:200] if said else f"exit code {self.code}"
        return "" if self.is_whole else "its answer was cut off"


def read_sections(output: bytes) -> tuple[Section, ...]:
    """Return the sections in `output`, in order. Output of the login shell before, between or after them is skipped.

    A section that is cut (by an output limit, or by the end of the connection) is marked as not whole and has the part
    that is there.
    """
    found: list[Section] = []
    position = 0
    while header := _HEADER.search(output, position):
        start, end = header.end(), header.end() + int(header[3])
        # A length that leads past the next header, or not to the end of a line, shows that bytes are missing.
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
    """Return the `label<TAB>value` lines of a section."""
    return [(label, value.strip()) for label, tab, value in (line.partition("\t") for line in text.splitlines()) if tab]


def number(text: str) -> int | None:
    """Return a whole number, or None for anything else, including numbers of more than 18 digits."""
    word = text.strip()
    return int(word) if re.fullmatch(r"-?[0-9]{1,18}", word, re.ASCII) else None


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse a numeric address, which may name its interface (`fe80::1%eth0`); None for anything else."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
