"""Files that are named but missing: what was not examined must not look free of faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import PurePath

from topoplan import catalog
from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.configurations import UnknownKindError
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import line_of
from topoplan.reading.named_files import close_name, find, has_directory, is_relative
from topoplan.reading.parts import Part
from topoplan.reading.setup import Setup
from topoplan.reading.words import is_open
from topoplan.specs.source import path_of

_FILE = re.compile(r"[\w./~-]*[./][\w./~-]*")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WORDS = re.compile(r"[-./_]")
_MISSPELT = 0.8
"""Minimum similarity, from 0 to 1, at which a word counts as a misspelling of another."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report unreadable files, missing files that configurations name, and misspelt names of models."""
    yield from _unread(setup)
    yield from _of_trainers(setup)
    yield from _models(setup)
    given = {PurePath(part.name).name for part in setup.parts}
    for part, line, key, name in _of_starters(setup):
        if PurePath(name).name not in given and not part.label and is_relative(name) and find(part, name) is None:
            rule = RULES["file-missing" if _is_sure(setup, part, name) else "file-missing.elsewhere"]
            yield rule.found(part, line, key=key, name=name, remedy=close_name(part, name))


def _unread(setup: Setup) -> Iterator[Finding]:
    for part, error in setup.unread:
        if _is_data(part):
            continue
        unknown = isinstance(error, UnknownKindError)
        rule = RULES["file-unreadable.unknown" if unknown else "file-unreadable"]
        line = re.fullmatch(r":(\d+)(?::\d+)?", error.where.removeprefix(part.name))
        why = "; ".join(filter(None, (rule.why, error.expected)))
        place = int(line[1]) if line else None
        yield rule.found(replace(part, lines=()), place, what=error.what, why=why, remedy=error.remedy)


def _is_data(part: Part) -> bool:
    """Whether a part holds data, which rules on the configuration that names it read: records, or their index."""
    start = r"\s*\{" if part.kind == "log" else r"\s*\[\s*\{"
    return PurePath(part.name).name == "dataset_info.json" or re.match(start, part.text) is not None


def _of_trainers(setup: Setup) -> Iterator[Finding]:
    """Report configurations that were not found, unless another given file may be the one meant."""
    has_other = any(setup.model_key(one) and not one.from_command for one in setup.configurations)
    unread = {PurePath(part.name).name for part, _ in setup.unread}
    for launch in setup.launches:
        name = launch.config_file
        if not name or launch.file_configuration is not None or launch.part.label or PurePath(name).name in unread:
            continue
        if has_other:
            close = close_name(launch.part, name) if is_relative(name) and find(launch.part, name) is None else ""
            if PurePath(name).suffix in close or re.search(rf"\b{re.escape(PurePath(name).stem)}\.ya?ml\b", close):
                line = line_of(launch, re.compile(re.escape(name)))
                yield RULES["file-missing"].on(launch, line, key="the command", name=name, remedy=close)
            continue
        if is_open(name):
            reason = f"the name {name} is known only when the script runs"
        else:
            reason = f"{name} is neither beside this file nor below the working directory"
        line = line_of(launch, re.compile(re.escape(name)))
        yield RULES["launch-file-not-found"].on(launch, line, reason=reason)


def _of_starters(setup: Setup) -> Iterator[tuple[Part, int | None, str, str]]:
    """Yield part, line, key and name of every DeepSpeed, accelerate and text file that is named."""
    for one in setup.with_deepspeed:
        name = one.get("deepspeed")
        if isinstance(name, str) and _FILE.fullmatch(name) and not setup.uses_mca(one):
            yield one.part, one.line("deepspeed"), "deepspeed", name
    text_keys = {one.trainer: one.text_keys for one in setup.recognizers}
    for one in setup.configurations:
        for key in text_keys.get(one.trainer, ()):
            name = one.get(key)
            if isinstance(name, str) and name.endswith(".txt") and _FILE.fullmatch(name):
                yield one.part, one.line(key), key, name
    for one in setup.of("accelerate"):
        block, key = one.get("deepspeed_config"), "deepspeed_config_file"
        name = block.get(key) if isinstance(block, Mapping) else None
        if isinstance(name, str):
            yield one.part, one.line("deepspeed_config", key), key, name
    for launch in setup.launches:
        option = launch.options.get("config_file") if launch.starter == "accelerate" else None
        if option is not None and not option.assumed:
            yield launch.part, option.line, "--config_file", option.value


def _models(setup: Setup) -> Iterator[Finding]:
    """Report models whose name differs from a known one in one word that occurs in no known name."""
    for one in setup.complete_configurations:
        name = setup.named_model(one) or ""
        if one.part.is_excerpt or catalog.knows_model(name) or not _HUB_NAME.fullmatch(name):
            continue
        if meant := _misspelt_model(name):
            yield RULES["model-misspelt"].at(one, path_of(setup.model_key(one)), name=name, meant=meant)


def _misspelt_model(name: str) -> str:
    """Return the known name that a misspelt one is closest to; empty if none is close enough."""
    words = _WORDS.split(name)
    for known in catalog.model_names():
        theirs = _WORDS.split(known)
        pairs = [pair for pair in zip(words, theirs, strict=False) if pair[0] != pair[1]]
        if len(words) == len(theirs) and len(pairs) == 1:
            ((word, right),) = pairs
            if word.isalpha() and word not in _known_words() and get_close_matches(word, [right], cutoff=_MISSPELT):
                return known
    return ""


@cache
def _known_words() -> frozenset[str]:
    return frozenset(word for name in catalog.model_names() for word in _WORDS.split(name))


def _is_sure(setup: Setup, part: Part, name: str) -> bool:
    """Whether a file is certainly missing: its directory exists, or a DeepSpeed file was given that nothing names."""
    named = {PurePath(one).name for _, _, _, one in _of_starters(setup)}
    others = [one for one in setup.of("deepspeed") if PurePath(one.part.name).name not in named]
    return has_directory(part, name) or any(not one.from_command and one.part is not part for one in others)
