"""Check a bundle's files on disk for symbolic links and for edited scripts.

Scripts run on the hosts as the user, so edits are reported before they start, but accepted: they may be intended.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from topoplan.errors import SpecError
from topoplan.specs.source import shown_path
from topoplan.terminal import plain
from topoplan.units import named

_MOST_PLACES = 3
_MOST_QUOTED = 2
_LONGEST_QUOTE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedScript:
    """A script that differs from what topoplan writes for its plan."""

    name: str
    line: int
    """Line of the first difference."""
    places: tuple[str, ...]
    """The differences, as phrases."""

    @property
    def summary(self) -> str:
        """The first differences, and how many more there are."""
        more = len(self.places) - _MOST_PLACES
        return "; ".join(self.places[:_MOST_PLACES]) + (f"; and {more} more" if more > 0 else "")


def refuse_links(directory: Path, names: Iterable[str]) -> None:
    """Raise SpecError if a file of the bundle is a symbolic link, or is reached through one.

    Otherwise a bundle from elsewhere could make topoplan send the user's private keys to its hosts.
    """
    for name in names:
        parts = PurePosixPath(name).parts
        for end in range(1, len(parts) + 1):
            path = directory.joinpath(*parts[:end])
            if path.is_symlink():
                raise SpecError(
                    f"is a link to {shown_path(path.readlink())}; files of a bundle are not read through links",
                    where=shown_path(path),
                    remedy="replace it with a copy if the file is meant for the hosts",
                )


def edited_scripts(found: Mapping[str, bytes], fresh: Mapping[str, str]) -> tuple[EditedScript, ...]:
    """Return the scripts of a bundle that differ from `fresh`, what would be written now."""
    return tuple(
        _edited(name, found[name].decode(errors="replace"), text)
        for name, text in fresh.items()
        if is_script(text) and name in found and found[name] != text.encode()
    )


def is_script(text: str) -> bool:
    """Return whether a file of a bundle is a program."""
    return text.startswith("#!")


def _edited(name: str, found: str, fresh: str) -> EditedScript:
    theirs, ours = found.split("\n"), fresh.split("\n")
    changes = [
        (start, end, missing_from, missing_to)
        for tag, start, end, missing_from, missing_to in difflib.SequenceMatcher(
            None, theirs, ours, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    ]
    places = []
    for start, end, missing_from, missing_to in changes:
        if start == end:
            places.append(f"after line {start} lacks {_quote(ours[missing_from:missing_to])}")
        else:
            lines = f"line {start + 1} is" if end - start == 1 else f"lines {start + 1} to {end} are"
            how = "new" if missing_from == missing_to else "changed"
            places.append(f"{lines} {how}: {_quote(theirs[start:end])}")
    return EditedScript(name=name, line=min(changes[0][0] + 1, len(theirs)), places=tuple(places))


def _quote(lines: list[str]) -> str:
    """Quote the first non-empty lines in backquotes, with a count of the rest."""
    texts = [plain(line.strip()) for line in lines if line.strip()]
    return named((f"`{text[:_LONGEST_QUOTE]}`" for text in texts), _MOST_QUOTED) or "an empty line"
