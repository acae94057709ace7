"""Whether a bundle is whole: half of one, or two halves, would train something that nobody planned.

While `generate` replaces the files of a bundle, a mark stands in place of MAIN_FILE. It is put there in one step before
any other file changes, and goes in one step after the last one has. No trainer starts without that file, whoever
starts it; every way of copying a bundle takes it along; and the next copy of a whole bundle overwrites it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from topoplan.errors import SpecError
from topoplan.specs.json_source import parse_json
from topoplan.specs.source import parse_source, shown_path
from topoplan.trainers.trainer import MAIN_FILE, PLAN_FILE
from topoplan.units import named, quote

INCOMPLETE = "# INCOMPLETE BUNDLE"
"""How the mark begins; the node scripts look for it too."""

Digests = Mapping[str, frozenset[str]]
"""File name -> SHA-256 of each content that is not somebody's own work."""

_HEAD = f"""\
{INCOMPLETE}: `topoplan generate` is writing it, or was ended while it did. Nothing can start with this file.
# To write it again, in this directory: topoplan generate --from {PLAN_FILE} -o .
"""
_KEY = "incomplete_bundle_of_topoplan"  # of which every trainer says that it is none of its keys
_LINES = {
    "id": re.compile(r"^# .* on .*: plan (\S+)$", re.MULTILINE),
    "run": re.compile(r"^log_dir=\"\$PWD\"/logs/(\S+-[0-9a-f]{8})/node-\d+$", re.MULTILINE),
}
"""Keys of a plan -> the line that tells it in a trainer's file, and in a node script."""


def digest(data: bytes) -> str:
    """SHA-256, as manifests have it."""
    return hashlib.sha256(data).hexdigest()


def again(directory: Path, *options: str) -> str:
    """The command that writes the bundle in a directory again; `generate` alone where there is no plan in it yet."""
    plan = directory / PLAN_FILE
    where = ("--from", shown_path(plan), "-o", shown_path(directory)) if plan.is_file() else ()
    return shlex.join(["topoplan", "generate", *where, *options])


# The mark ------------------------------------------------------------------------------------------------------------


def mark_text(digests: Digests) -> str:
    """The mark; it knows the new content of each file and the one that it replaces."""
    return _HEAD + json.dumps({_KEY: {name: sorted(known) for name, known in sorted(digests.items())}}, indent=2) + "\n"


def read_mark(directory: Path) -> Digests | None:
    """What the mark in a directory knows; nothing of a mark that is damaged; None where there is no mark."""
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
    """Raise SpecError for a directory with a mark, and for a file of such a bundle."""
    directory = path if path.is_dir() else path.parent
    known = read_mark(directory)
    if known is not None and (directory == path or path.name == MAIN_FILE or path.name in known):
        raise SpecError(
            "is not whole: `topoplan generate` was ended while it wrote it, or is writing it now",
            where=shown_path(directory),
            remedy=f"write it again: {again(directory)}",
        )


# Content -------------------------------------------------------------------------------------------------------------


def is_nobodys(name: str, data: bytes, fresh: bytes) -> bool:
    """Whether this content of a file, which is not `fresh`, holds no work that could be lost: empty, or broken off."""
    return not data.strip() or (name.endswith(".sh") and fresh.startswith(data))


def refuse_unusable(directory: Path, files: Mapping[str, bytes], fresh: Mapping[str, bytes]) -> None:
    """Raise SpecError for a file that no run can start with: empty, cut off, or not what its suffix says.

    `fresh` is what the plan of the bundle gives; an edit that leaves a file what it is, is the user's own business.
    """
    for name, data in files.items():
        if data == fresh[name]:
            continue
        place, suffix = shown_path(directory / name), Path(name).suffix
        if is_nobodys(name, data, fresh[name]):
            what = f"is cut off behind {len(data)} of {len(fresh[name])} bytes" if data.strip() else "is empty"
            raise SpecError(what, where=place, remedy=f"write it again: {again(directory)}")
        try:
            if suffix in (".yaml", ".yml"):
                parse_source(data.decode("utf-8-sig", "replace"), name=place)
            elif suffix == ".json":
                parse_json(data.decode("utf-8-sig", "replace"), name=place)
        except SpecError as error:
            remedy = f"mend it, or write the bundle again: {again(directory, '--force')}"
            raise SpecError(
                error.what,
                where=error.where,
                expected=error.expected,
                remedy="; ".join(filter(None, (error.remedy, remedy))),
            ) from None


def mixture(
    directory: Path, files: Mapping[str, bytes], fresh: Mapping[str, bytes], listed: Digests
) -> tuple[str, str] | None:
    """What shows that the files of `directory` are of two bundles, and what mends it; None where nothing shows it.

    Earlier versions left that when they were ended, and so does a copy that breaks off. A file that a person edited is
    neither as `listed` (in the manifest beside it) nor as `fresh` (by its plan), and no sign of it.
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
