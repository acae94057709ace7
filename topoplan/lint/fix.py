"""Corrected copies beside the originals: findings' edits applied to the text of each part, never to a file in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from topoplan.bundle.write import write_file
from topoplan.errors import OutputError
from topoplan.reading.edits import applied
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.launch_facts import certain_count, is_remote, setting_of
from topoplan.reading.parts import Part
from topoplan.reading.read_parts import STANDARD_INPUT
from topoplan.reading.setup import Launch, Setup

MARK = "# Corrected by `topoplan check --fix` from"
"""How a corrected copy begins, after a script's shebang line if it has one."""
_MOST_ROUNDS = 4
_EMPTY_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)(?:[^#\n]*(?:\b(?:then|do|else)|[\s)]\{)|\{)[ \t]*(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*"
    r"(?=[ \t]*(?:(?:fi|done|else|elif)\b|\}))",
    re.MULTILINE,
)
"""A shell block that lost its last command, which is a syntax error in bash, up to the line that closes it."""
_COMPOUND = re.compile(r"\s*(?:(?:if|for|while|until|case|select|function)\b|[\w-]+\s*\(\)|\{)")
_SUFFIXES = {"yaml": ".yaml", "json": ".json", "shell": ".sh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A part with its edits applied."""

    before: Part
    after: Part
    """The part with the corrected text; its line numbers refer to that text."""
    findings: tuple[Finding, ...]
    """The findings that were corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A corrected file beside the original."""

    path: Path
    text: str
    mark: str
    """How the text begins, which identifies an earlier copy."""
    mode: int | None
    """Permissions of the original; None if the copy comes from a block of a document."""
    parts: tuple[Part, ...]
    """The file's parts, corrected where necessary; several if the blocks of a document form one session."""
    corrections: tuple[Correction, ...]
    """Empty if the copy only names other copies."""
    names: tuple[str, ...] = ()
    """The copies that it names, in place of their originals."""

    def line(self, part: Part, line: int) -> int:
        """Convert a line number of a part to a line number of the file."""
        if (line == 1 and self.text.startswith("#!")) or not _has_head(part):
            return line
        before = self.parts[: self.parts.index(part)]
        return line + 1 + sum(len(_lines(one.text)) + 1 for one in before)


Recheck = Callable[[Sequence[Part]], Sequence[Finding]]
"""Returns the findings on corrected parts."""


def corrected(parts: Sequence[Part], findings: Sequence[Finding], recheck: Recheck) -> tuple[Correction, ...]:
    """Apply edits until none is left, in a limited number of rounds.

    Corrected text is checked again, because a correction may make another one possible.
    """
    now = list(parts)
    done: list[list[Finding]] = [[] for _ in parts]
    for _ in range(_MOST_ROUNDS):
        changed = False
        for place, part in enumerate(now):
            text, used = apply_edits(part.text, [one for one in findings if one.part == part])
            if text != part.text:
                if part.kind == "shell" and not _EMPTY_BLOCK.search(part.text):
                    text = _EMPTY_BLOCK.sub(r"\g<0>\g<indent>  :\n", text)
                now[place] = replace(part, text=text, lines=())
                done[place] += used
                changed = True
        if not changed:
            break
        findings = recheck(now)
    return tuple(
        Correction(before=before, after=after, findings=tuple(used))
        for before, after, used in zip(parts, now, done, strict=True)
        if before.text != after.text
    )


def split_node_commands(setup: Setup) -> Iterator[Part]:
    """Yield the parts, splitting the commands for several nodes that stand in one block or on standard input.

    A single script with all of them would wait at the first command for the other nodes.
    """
    for part in setup.parts:
        launches = [one for one in setup.launches if one.part is part]
        is_file = not part.label and part.name != STANDARD_INPUT
        yield from (part,) if is_file or not _for_several_nodes(launches) else _by_command(part, launches)


def _for_several_nodes(launches: Sequence[Launch]) -> bool:
    """Whether there are several launches, each to be started by hand on a node of its own."""
    ranks = {certain_count(setting_of(one, "node_rank")) for one in launches}
    started = any(one.background or is_remote(one) for one in launches)
    return len(launches) > 1 and len(ranks) == len(launches) and None not in ranks and not started


def _by_command(part: Part, launches: Sequence[Launch]) -> Iterator[Part]:
    """Yield the text above the first command, then each command with the lines between it and the preceding command."""
    lines = part.text.split("\n")
    first = launches[0].first_line
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    ends = [first - 1, *(one.last_line for one in launches[:-1]), len(lines)]
    if any(_COMPOUND.match(line) for line in lines):
        ends = [0, len(lines)]  # the commands are inside a function or a test
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        text = "\n".join(lines[start:end]) + "\n"
        if text.strip():
            numbers = tuple(part.file_line(line) for line in range(start + 1, end + 1))
            yield replace(part, text=text, lines=numbers, label=f"{part.label}, command {number}".removeprefix(", "))


def apply_edits(text: str, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
    """Return the text with the edits of these findings, and the findings whose edits were applied.

    A finding with an edit that overlaps one of an earlier finding is left for the next round.
    """
    chosen: list[Edit] = []
    used: list[Finding] = []
    for finding in findings:
        fresh = [edit for edit in finding.edits if edit not in chosen]
        if finding.edits and not any(_overlap(one, other) for one in fresh for other in chosen):
            chosen += fresh
            used.append(finding)
    return applied(text, chosen), used


def _overlap(one: Edit, other: Edit) -> bool:
    """Whether two edits touch the same lines; an insertion touches none, but must not be inside a replaced range."""
    first, second = sorted((one, other), key=lambda edit: (edit.first_line, edit.last_line))
    return second.first_line <= first.last_line


def copies(
    corrections: Sequence[Correction],
    files: Sequence[Sequence[Part]],
    *,
    references: Collection[tuple[Part, Part]] = (),
) -> tuple[Copy, ...]:
    """Return the files to write: `train.fixed.yaml` for `train.yaml`, `article.fixed.yaml` for a block of `article.md`.

    `files` groups parts that make up one file, such as a command of a document with the variables set above it.
    `references` pairs a part with the part whose file it names: a copy names copies, so what names a corrected file is
    copied too. Other groups without a correction are left out; several of one kind from one document are numbered.
    """
    by_part = {correction.after: correction for correction in corrections}
    wanted = _copied([tuple(parts) for parts in files], by_part.keys(), references)
    targets = [(parts[-1].name, _suffix(parts[-1])) for parts in wanted]
    paths: list[Path] = []
    for place, (name, suffix) in enumerate(targets):
        number = f"-{targets[:place].count((name, suffix)) + 1}" if targets.count((name, suffix)) > 1 else ""
        paths.append(_beside(name, number + suffix))
    new_names = {parts[0]: path.name for parts, path in zip(wanted, paths, strict=True) if not parts[0].label}
    found = []
    for parts, path in zip(wanted, paths, strict=True):
        named = [file for file in _named(parts, references) if file in new_names and _names(parts, file)]
        found.append(_copy(parts, by_part, path, {file: new_names[file] for file in named}))
    return tuple(found)


def _copied(
    groups: Sequence[tuple[Part, ...]], corrected_parts: Collection[Part], references: Collection[tuple[Part, Part]]
) -> list[tuple[Part, ...]]:
    """Return the groups with a correction, and those that name a file among them, directly or through another file."""
    found = [parts for parts in groups if any(part in corrected_parts for part in parts)]
    while True:
        files = {parts[0] for parts in found if not parts[0].label}
        known = [
            parts
            for parts in groups
            if parts in found or any(_names(parts, file) for file in files.intersection(_named(parts, references)))
        ]
        if len(known) == len(found):
            return found
        found = known


def _named(parts: Sequence[Part], references: Iterable[tuple[Part, Part]]) -> list[Part]:
    """Return the parts whose files these parts name."""
    return [file for part, file in references if part in parts]


def _names(parts: Sequence[Part], file: Part) -> bool:
    """Whether a file's name stands in the text, where it can be replaced; a recipe of a Makefile is not copied."""
    return any(not part.is_makefile and _name_of(file).search(part.text) for part in parts)


def _name_of(file: Part) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(Path(file.name).name)}(?![\w.-])")


def _suffix(part: Part) -> str:
    return (not part.label and Path(part.name).suffix) or _SUFFIXES[part.kind]


def _beside(name: str, suffix: str) -> Path:
    """Return `train.fixed.yaml` for `train.yaml`, beside it, or in the working directory for standard input."""
    path = Path(name)
    if not path.is_file():
        path = Path("stdin")
    return path.with_name(f"{path.stem}.fixed{suffix}")


def _copy(
    parts: tuple[Part, ...], by_part: Mapping[Part, Correction], path: Path, new_names: Mapping[Part, str]
) -> Copy:
    main, corrections = parts[-1], tuple(by_part[part] for part in parts if part in by_part)
    original = Path(main.name)
    # Blocks of a document are separated by an empty line.
    text = "\n\n".join("\n".join(_lines(part.text)) for part in parts) + "\n"
    for file, name in new_names.items():
        text = name.join(_name_of(file).split(text))
    if not _has_head(main):
        mark = text  # JSON has no comments: only identical text is recognized as an earlier copy
    else:
        head, rest = "", text
        if text.startswith("#!"):
            head, _, rest = text.partition("\n")
            head += "\n"
        mark = head + MARK
        from_what = (corrections[0].before if corrections else main).place(None) if main.label else original.name
        text = f"{mark} {from_what}.\n{rest}"
    is_file = original.is_file() and not main.label
    mode = original.stat().st_mode & 0o777 if is_file else None
    names = tuple(new_names.values())
    return Copy(path=path, text=text, mark=mark, mode=mode, parts=parts, corrections=corrections, names=names)


def _has_head(part: Part) -> bool:
    """Whether a copy begins with MARK, which takes a line."""
    return part.kind != "json"


def _lines(text: str) -> list[str]:
    """Return the lines of a part, without trailing empty lines."""
    return text.rstrip("\n").split("\n")


def write_copies(wanted: Sequence[Copy], *, force: bool = False) -> None:
    """Write the copies. Without `force`, raise OutputError before writing any if another file is in the way."""
    for copy in wanted:
        if not force and copy.path.exists() and not _is_ours(copy):
            raise OutputError(
                "exists and was not written by `topoplan check --fix`",
                where=str(copy.path),
                remedy="move it away, or overwrite with --force",
            )
    for copy in wanted:
        write_file(copy.path, copy.text, mark=copy.mark, writer="topoplan check --fix", force=force)
        if copy.mode is not None:
            copy.path.chmod(copy.mode)


def _is_ours(copy: Copy) -> bool:
    try:
        with copy.path.open("rb") as file:
            return file.read(len(copy.mark.encode())) == copy.mark.encode()
    except OSError:
        return False
