"""Split files into parts, determining the kind of each file by its suffix and content."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from topoplan.errors import SpecError
from topoplan.reading.comments import commands_in_comments
from topoplan.reading.here_documents import here_documents
from topoplan.reading.hostfile import is_hostfile
from topoplan.reading.kinds import names_a_job, sets_variables, starts_training
from topoplan.reading.markdown import is_markdown, markdown_parts
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.unfold import lines_of_unfolded, unfold_shell, unfold_yaml
from topoplan.specs.source import MAX_FILE_BYTES, decoded, read_text, shown_path

STANDARD_INPUT = "-"
_WANTED = "give a trainer's YAML or JSON, a launch script, or a document with one of these"
_BUNDLE = "train.yaml"
_SCRIPT_SUFFIXES = frozenset([".sh", ".bash", ".sbatch", ".slurm", ".zsh"])
_DOCUMENT_SUFFIXES = frozenset([".md", ".markdown", ".mdx"])
_SUFFIXES = _SCRIPT_SUFFIXES | _DOCUMENT_SUFFIXES | {".yaml", ".yml", ".json"}
_SHEBANG = re.compile(r"#![^\n]{0,200}\b(?:ba|z|da|k)?sh\b")
_MARK = re.compile(r"^(?=---(?:[ \t]|$))", re.MULTILINE)
_CONTENT = re.compile(r"^(?!---)[ \t]*[^\s#]", re.MULTILINE)
_MARK_LINE = re.compile(r"\A---[^\n]*")
_KEY_LINE = re.compile(r"[ ]*(?:- )?[\"']?[A-Za-z_][\w.-]*[\"']?:(?:\s|$)")


def read_parts(paths: Sequence[str], keys: Collection[str]) -> tuple[Part, ...]:
    """Return the parts of files, of `-` for standard input, and of topoplan bundles (directories), in order.

    `keys` are the trainers' keys, which identify pasted text. Raises SpecError for a file that is missing, empty, too
    large, not text, or without any configuration.
    """
    parts: list[Part] = []
    for path in dict.fromkeys(paths):
        if path == STANDARD_INPUT:
            parts += file_parts(_standard_input(), keys, name="standard input")
        elif (directory := Path(path)).is_dir():
            for file in bundle_files(directory):
                parts += file_parts(read_text(file, wanted=_WANTED), keys, name=shown_path(file))
        else:
            parts += file_parts(read_text(directory, wanted=_WANTED), keys, name=shown_path(directory))
    return tuple(parts)


def file_parts(text: str, keys: Collection[str], *, name: str) -> tuple[Part, ...]:
    """Return the parts of one file. Raises SpecError if there is none."""
    if not text.strip():
        raise SpecError("is empty", where=name, remedy=_WANTED)
    kind = _kind(text, keys, suffix=Path(name).suffix.lower())
    if kind == "document":
        parts = markdown_parts(text, keys, name=name)
        if not parts:
            raise SpecError(
                "holds no configuration",
                where=name,
                expected="looked for code blocks with a trainer's YAML, a DeepSpeed JSON or a launch command",
                remedy="paste the command or the configuration itself, or give its file",
            )
        return parts
    unfolded = unfold_yaml(text, keys) if kind == "yaml" else unfold_shell(text) if kind == "shell" else None
    if unfolded is None:
        part = Part(kind=kind, name=name, text=text)
        if kind == "yaml":
            return (*_documents(part), *commands_in_comments(part))
        return (part, *here_documents(part)) if kind == "shell" else (part,)
    return (Part(kind=kind, name=name, text=unfolded, lines=_lines_of(text, unfolded), unfolded=True),)


def _documents(part: Part) -> tuple[Part, ...]:
    """Return the documents of a YAML file, as separate parts if there are several."""
    starts = [0, *(match.end() for match in _MARK.finditer(part.text)), len(part.text)]
    texts = [part.text[first:last] for first, last in pairwise(starts)]
    said = [_CONTENT.search(one) is not None for one in texts]
    if sum(said) < 2:
        return (part,)
    found = []
    for number, (text, first) in enumerate(zip(texts, starts, strict=False), start=1):
        line = part.text.count("\n", 0, first) + 1
        lines = tuple(range(line, line + text.count("\n") + 1))
        if said[number - 1]:
            whole = _MARK_LINE.sub("", text)
            found.append(replace(part, text=whole, lines=lines, label=f"document {number}"))
    return tuple(found)


def _kind(text: str, keys: Collection[str], *, suffix: str) -> PartKind | Literal["document"]:
    if suffix == ".json":
        return "json"
    if suffix in _DOCUMENT_SUFFIXES:
        return "document"
    if suffix in _SCRIPT_SUFFIXES or _SHEBANG.match(text):
        return "shell"
    if suffix in (".yaml", ".yml"):
        return "yaml"
    return _kind_by_content(text, keys)


def _kind_by_content(text: str, keys: Collection[str]) -> PartKind | Literal["document"]:
    """Determine the kind of a file without a distinctive suffix, or of pasted text."""
    if text.lstrip().startswith("{"):
        return "json"
    if is_hostfile(text):
        return "hosts"
    if is_markdown(text):
        return "document"
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    key_lines = sum(_KEY_LINE.match(line) is not None for line in lines)
    if key_lines * 2 > len(lines) and not starts_training(text):
        return "yaml"
    if unfold_yaml(text, keys) is not None and names_a_job(text, keys, kind="yaml"):
        return "yaml"
    if starts_training(text) or sets_variables(text):
        return "shell"
    return "document"


def _lines_of(text: str, unfolded: str) -> tuple[int, ...]:
    lines = text.splitlines()
    return lines_of_unfolded(unfolded, lines, range(1, len(lines) + 1))


def _standard_input() -> str:
    stream = getattr(sys.stdin, "buffer", None)
    content = stream.read(MAX_FILE_BYTES + 1) if stream is not None else sys.stdin.read().encode()
    return decoded(content, name="standard input", wanted=_WANTED)


def is_bundle(directory: Path) -> bool:
    """Whether a directory is a topoplan bundle."""
    return (directory / _BUNDLE).is_file()


def known_files(directory: Path) -> list[Path]:
    """Return the files of a directory whose suffix suggests that they configure or launch training."""
    return sorted(entry for entry in directory.iterdir() if entry.suffix.lower() in _SUFFIXES and entry.is_file())


def bundle_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of a topoplan bundle that configure the run. Raises SpecError if it is not a bundle."""
    if not is_bundle(directory):
        try:
            found = sorted(entry.name for entry in directory.iterdir() if entry.suffix in _SUFFIXES)
        except OSError as error:
            raise SpecError(f"cannot be read: {error.strerror}", where=shown_path(directory)) from None
        remedy = f"it holds {', '.join(found[:3])}: give the files themselves" if found else _WANTED
        raise SpecError(
            f"is a directory without {_BUNDLE}, no topoplan bundle", where=shown_path(directory), remedy=remedy
        )
    return (directory / _BUNDLE, *sorted([*directory.glob("node-*.sh"), *directory.glob("*.sbatch")]))
