"""Check that a bundle is complete: half a bundle, or a mix of two, would train something that nobody planned.

While `generate` replaces the files of a bundle, a marker replaces MAIN_FILE. It is put in place atomically before any
other file changes, and replaced atomically after the last one has. No trainer starts without MAIN_FILE, however it is
started; every way of copying a bundle copies the marker; and the next complete bundle overwrites it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from topoplan.errors import SpecError
from topoplan.specs.json_source import parse_json
from topoplan.specs.source import parse_source, shown_path
from topoplan.terminal import plain
from topoplan.trainers.trainer import MAIN_FILE, PLAN_FILE
from topoplan.units import named, quote

INCOMPLETE = "# INCOMPLETE BUNDLE"
"""The start of the marker, which the node scripts look for too."""

Digests = Mapping[str, frozenset[str]]
"""File name -> SHA-256 of each content that can be overwritten without losing anybody's work."""

_HEAD = f"""\
{INCOMPLETE}: `topoplan generate` is still writing it, or was interrupted. No run can start with this file.
# To write it again, in this directory: topoplan generate --from {PLAN_FILE} -o .
"""
_KEY = "incomplete_bundle_of_topoplan"  # refused as an unknown key by every trainer
_LINES = {
    "id": re.compile(r"^# .* on .*: plan (\S+)$", re.MULTILINE),
    "run": re.compile(r"^log_dir=\"\$PWD\"/logs/(\S+-[0-9a-f]{8})/node-\d+$", re.MULTILINE),
}
"""Key of a plan -> the line with its value in a trainer's file or a node script."""


def digest(data: bytes) -> str:
    """Return the SHA-256 as in manifests."""
    return hashlib.sha256(data).hexdigest()


def again(directory: Path, *options: str) -> str:
    """Return the command that writes a directory's bundle again; plain `generate` if there is no plan in it yet."""
    plan = directory / PLAN_FILE
    where = ("--from", shown_path(plan), "-o", shown_path(directory)) if plan.is_file() else ()
    return shlex.join(["topoplan", "generate", *where, *options])


# The marker ----------------------------------------------------------------------------------------------------------


def mark_text(digests: Digests) -> str:
    """Return the marker, which records the new content of each file and the content that it replaces."""
    return _HEAD + json.dumps({_KEY: {name: sorted(known) for name, known in sorted(digests.items())}}, indent=2) + "\n"


def read_mark(directory: Path) -> Digests | None:
    """Return the digests in a directory's marker; empty if the marker is damaged, None if there is none."""
    try:
        with (directory / MAIN_FILE).open("rb") as file:
            if file.read(len(INCOMPLETE)) != INCOMPLETE.encode():
                return None
            text = file.read()
    except OSError:
        return None
    try:
        entries = json.loads(text[text.index(b"{") :])[_KEY]
        return {str(name): frozenset(map(str, known)) for name, known in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def refuse_incomplete(path: Path) -> None:
    """Raise SpecError for a directory with a marker, and for a file listed in one."""
    directory = path if path.is_dir() else path.parent
    known = read_mark(directory)
    if known is not None and (directory == path or path.name == MAIN_FILE or path.name in known):
        raise SpecError(
            "is incomplete: `topoplan generate` was interrupted, or is still writing it",
            where=shown_path(directory),
            remedy=f"write it again: {again(directory)}",
        )


def refuse_lacking(directory: Path, names: Iterable[str]) -> None:
    """Raise SpecError for a bundle without one of these files, with the command that writes it again."""
    if missing := [name for name in names if not (directory / name).is_file()]:
        remedy = f"write it again: {again(directory)}"
        raise SpecError(f"lacks {named(missing)}", where=shown_path(directory), remedy=remedy)


# Content -------------------------------------------------------------------------------------------------------------


def is_nobodys(name: str, data: bytes, fresh: bytes) -> bool:
    """Return whether a file's content, if it is not `fresh`, is no work that could be lost: empty, or truncated."""
    return not data.strip() or (name.endswith(".sh") and fresh.startswith(data))


def refuse_unusable(directory: Path, files: Mapping[str, bytes], fresh: Mapping[str, bytes]) -> None:
    """Raise SpecError for a file that no run can start with: empty, truncated, or not valid for its suffix. `fresh` is
    what the bundle's plan gives. Edits that keep a file valid are the user's own business."""
    for name, data in files.items():
        if data == fresh[name]:
            continue
        place, suffix = shown_path(directory / name), Path(name).suffix
        if is_nobodys(name, data, fresh[name]):
            what = f"is truncated after {len(data)} of {len(fresh[name])} bytes" if data.strip() else "is empty"
            raise SpecError(what, where=place, remedy=f"write it again: {again(directory)}")
        try:
            if suffix in (".yaml", ".yml"):
                parse_source(data.decode("utf-8-sig", "replace"), name=place)
            elif suffix == ".json":
                parse_json(data.decode("utf-8-sig", "replace"), name=place)
        except SpecError as error:
            remedy = f"repair it, or write the bundle again: {again(directory, '--force')}"
            raise SpecError(
                error.what,
                where=error.where,
                expected=error.expected,
                remedy="; ".join(filter(None, (error.remedy, remedy))),
            ) from None


def mixture(
    directory: Path, files: Mapping[str, bytes], fresh: Mapping[str, bytes], listed: Digests
) -> tuple[str, str] | None:
    """Return the evidence that a directory mixes two bundles, and the remedy; None if there is no evidence.

    Mixtures come from interrupted copies, and from earlier versions that were interrupted while writing. A file edited
    by a person is neither as `listed` (in the manifest) nor as `fresh` (from the plan), and is no evidence.
    """
    as_listed = {name for name, data in files.items() if digest(data) in listed.get(name, ())}
    as_planned = {name for name, data in files.items() if data == fresh[name]}
    if as_planned - as_listed and as_listed - as_planned:
        one, other = named(sorted(as_listed - as_planned)), named(sorted(as_planned - as_listed))
        return f"is a mixture of two bundles: {one} of one, {other} of the other", f"write it again: {again(directory)}"
    plan = json.loads(files[PLAN_FILE])
    for name in sorted(files.keys() - as_listed - as_planned):
        text = files[name].decode("utf-8", "replace")
        for key, line in _LINES.items():
            found = line.search(text)
            if found and found[1] != plan.get(key):
                what = f"{name} is of {found[1]}, and {PLAN_FILE} of {quote(plan.get(key))}"
                mend = f"write it again as {PLAN_FILE} has it, over what was edited: {again(directory, '--force')}"
                return f"is a mixture of two bundles: {what}", mend
    return None


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
    """Raise SpecError if a file of the bundle is a symbolic link, or is reached through one. Otherwise a bundle from
    elsewhere could make topoplan send the user's private keys to its hosts."""
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
    """Return the scripts of a bundle that differ from `fresh`, what would be written now. They run on the hosts as the
    user, so edits are reported before they start, but accepted: they may be intended."""
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
    texts = [plain(line.strip()) for line in lines if line.strip()]
    return named((f"`{text[:_LONGEST_QUOTE]}`" for text in texts), _MOST_QUOTED) or "an empty line"
