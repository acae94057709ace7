"""The verbs as typer commands, each imported only when it is called."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from topoplan.cli.options import expand_options
from topoplan.cli.verbs import SHOW, VERBS, Verb, below, named
from topoplan.errors import InputError

PROGRAM = "topoplan"
"""Name of the command group of all verbs."""
METAVAR = "VERB ..."
"""What usage lines call the verb of a group."""


class Commands(TyperGroup):
    """The verbs under `topoplan`, or under one of its verbs. Only the options of the verb that is called are loaded:
    loading all of them takes longer than many a verb runs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._parent = "" if self.name == PROGRAM else self.name or ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the listed verbs."""
        return [verb.word for verb in below(self._parent)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a word, whether it is listed or not."""
        verb = named(self._parent, cmd_name)
        return command(verb) if verb else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help if a group that does nothing by itself is called without a verb."""
        return super().parse_args(ctx, args or ([] if self.invoke_without_command else ["--help"]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a verb by any of its names, and return it with the remaining words."""
        word, *rest = args
        verb = named(self._parent, word)
        if verb is None:
            if ctx.resilient_parsing:  # for shell completion
                return None, None, rest
            options = [name for option in self.params for name in option.opts]
            raise _unknown(ctx.command_path, self._parent, word, options)
        if verb.was == word and not self._parent and "--json" not in rest and not ctx.resilient_parsing:
            sys.stderr.write(f"{PROGRAM}: `{PROGRAM} {word}` is now `{PROGRAM} {verb.name}`\n")
        return verb.name.removeprefix(f"{self._parent} "), command(verb), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs by group, each with its example."""
        verbs = below(self._parent)
        width = max(len(verb.word) for verb in verbs)
        for group, of_group in groupby(verbs, key=lambda verb: "Verbs" if self._parent else verb.group):
            with formatter.section(group):
                for verb in of_group:
                    formatter.write(f"  {verb.word:{width}}  {verb.summary}\n      $ {PROGRAM} {verb.example}\n")


def command(verb: Verb) -> Any:
    """Return a verb as a typer command, with its options."""
    settings: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None}
    parent: dict[str, Any] = {"cls": Commands, "subcommand_metavar": METAVAR, **settings}
    words: dict[str, Any] = {"name": verb.word, "short_help": verb.summary, "help": verb.summary}
    if verb.name == SHOW:
        found = typer.Typer(**parent, **words)
        found.callback()(lambda: None)
        return typer.main.get_command(found)
    module = import_module(f"topoplan.cli.{(verb.parent or verb.word).replace('-', '_')}")
    function = getattr(module, verb.word.replace("-", "_"))
    words["help"] += f"\n\n{inspect.getdoc(function)}"
    if below(verb.name):
        found = typer.Typer(**parent, **words, invoke_without_command=True)
        found.callback()(expand_options(function))
    else:
        found = typer.Typer(**settings)
        found.command(**words, epilog=f"\b\nExample:\n  $ {PROGRAM} {verb.example}")(expand_options(function))
    return typer.main.get_command(found)


def _unknown(typed: str, parent: str, word: str, options: Sequence[str]) -> InputError:
    """Return the error for an unknown verb, with a suggestion for a typing error, or a forgotten verb or hyphens."""
    with contextlib.suppress(OSError):  # the word is too long for a file name
        where = Path(word)
        if word and not parent and where.exists():
            verb = "launch" if where.is_dir() else "rank"
            return InputError(
                f"{word!r} is not a command", remedy=f"write one before it, as in `{PROGRAM} {verb} {word}`"
            )
    names = {name: verb.name for verb in VERBS for name in (verb.word, verb.short, verb.was) if name}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    remedy = f"did you mean `{PROGRAM} {names[close[0]]}`?" if close else f"`{typed} --help` lists what there is"
    if f"--{word}" in options:
        remedy = f"did you mean `{typed} --{word}`?"
    return InputError(f"{word!r} is not a command", where=typed if parent else "", remedy=remedy)
