"""A piece of configuration in a file: a whole YAML file, a script, one code block of a Markdown document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartKind = Literal["yaml", "json", "shell", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of configuration, as text."""

    kind: PartKind
    name: str
    """The file as the user named it."""
    text: str
    """Line breaks that were lost on the way (a page that was copied) are put back."""
    lines: tuple[int, ...] = ()
    """Line in the file of each line of `text`; empty when they are the same."""
    label: str = ""
    """Which piece of the file it is, such as `bash block 2`; empty for a whole file."""
    file: str = ""
    """The file that the script around it writes it to, as a here-document."""
    unfolded: bool = False
    """Line breaks had to be put back."""
    is_piece: bool = False
    """Keys of a trainer that name no model, beside a whole configuration: what to change in it, as articles show it."""

    @property
    def is_makefile(self) -> bool:
        """Its commands are recipes of make."""
        return self.name.endswith(("akefile", ".mk"))

    def file_line(self, line: int) -> int:
        """The line in the file of a line of `text`."""
        if not self.lines:
            return line
        return self.lines[min(max(line, 1), len(self.lines)) - 1]

    def place(self, line: int | None) -> str:
        """`file:line`, or the file alone."""
        if line is None:
            return f"{self.name}:{self.lines[0]}" if self.lines else self.name
        return f"{self.name}:{self.file_line(line)}"
