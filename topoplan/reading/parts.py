"""Parts: pieces of configuration in a file, such as a YAML file, a script, or one code block of a Markdown document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartKind = Literal["yaml", "json", "shell", "log", "hosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of configuration, as text."""

    kind: PartKind
    name: str
    """The file as the user named it."""
    text: str
    """The text, in which line breaks lost by copying a page are restored."""
    lines: tuple[int, ...] = ()
    """For each line of `text`, its line in the file; empty if they are identical."""
    label: str = ""
    """Which piece of the file this is, such as `bash block 2`; empty for a whole file."""
    file: str = ""
    """The file that the surrounding script writes this text to, as a here-document."""
    unfolded: bool = False
    """True if lost line breaks were restored."""
    is_excerpt: bool = False
    """True for an excerpt of trainer keys without a model, next to a complete configuration that it modifies."""

    @property
    def is_makefile(self) -> bool:
        """Whether the commands are recipes of a Makefile."""
        return self.name.endswith(("akefile", ".mk"))

    def file_line(self, line: int) -> int:
        """Convert a line of `text` to a line of the file."""
        if not self.lines:
            return line
        return self.lines[min(max(line, 1), len(self.lines)) - 1]

    def place(self, line: int | None) -> str:
        """Return `file:line`, or only the file if there is no line."""
        if line is None:
            return f"{self.name}:{self.lines[0]}" if self.lines else self.name
        return f"{self.name}:{self.file_line(line)}"
