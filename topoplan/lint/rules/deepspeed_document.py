"""Finds DeepSpeed configurations: a JSON file, or the `deepspeed:` block of a trainer's YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import as_whole, at
from topoplan.specs.source import KeyPath

RULES = read_rules(__package__, "deepspeed.toml")
ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One DeepSpeed configuration and where it was found."""

    holder: Configuration
    path: KeyPath
    """Path of the block in `holder`; empty for a file of its own."""
    data: Mapping[str, Any]
    trainer: Configuration | None
    """The trainer's configuration that uses it, if known."""
    launches: tuple[Launch, ...]
    default_of: Callable[[str], Any]
    """The trainer's default of one of its keys; None if it is not known."""

    def get(self, *path: str | int) -> Any:
        """Return the value at a path; None also for "auto", which DeepSpeed drops and the trainer fills in."""
        value = at(self.data, path)
        return None if value == "auto" else value

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 without ZeRO."""
        stage = as_whole(self.get(ZERO, "stage"))
        return stage if stage in (1, 2, 3) else 0

    def finding(self, rule: str, path: KeyPath, **said: Any) -> Finding:
        """Return a finding at a path of the document, with `said` as for `Rule.at`."""
        return RULES[f"deepspeed-{rule}"].at(self.holder, (*self.path, *path), **said)


def documents(setup: Setup) -> Iterator[Document]:
    """Yield the DeepSpeed configurations of a setup, each with the trainer's configuration that uses it, if clear."""
    named = [one for one in setup.with_deepspeed if one.get("deepspeed") is not None]
    users = [one for one in named if not setup.uses_mca(one)]
    found: list[tuple[Configuration, KeyPath, Any, Configuration | None]] = []
    for one in users:
        block = one.get("deepspeed")
        if isinstance(block, Mapping):
            found.append((one, ("deepspeed",), block, one))
    files_named = [one for one in users if isinstance(one.get("deepspeed"), str)]
    blocks = {id(one.get("deepspeed")) for one in named}
    own = [one for one in setup.of("deepspeed") if id(one.source.data) not in blocks]
    user = files_named[0] if len(files_named) == len(own) == 1 else None
    found += [(one, (), one.source.data, user) for one in own]
    for holder, path, data, trainer in found:
        recognizer = setup.recognizer(trainer.trainer) if trainer else None
        yield Document(
            holder=holder,
            path=path,
            data=data,
            trainer=trainer,
            launches=setup.launches,
            default_of=recognizer.default_of if recognizer else lambda _: None,
        )
