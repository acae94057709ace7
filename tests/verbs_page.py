"""Generates docs/verbs.md: the verbs in their groups, from the table that the help is based on."""

from itertools import groupby
from pathlib import Path

from topoplan.cli.verbs import VERBS, Verb

PAGE = Path(__file__).parents[1] / "docs" / "verbs.md"
_HEAD = """# Verbs

Made by `make readme` from the table of verbs. `topoplan VERB --help` has the options of each.
`topoplan --install-completion` teaches bash, zsh or fish to complete them, with the names of GPUs, models, plans,
bundles and runs.
"""


def verbs_page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for group, verbs in groupby(VERBS, key=lambda verb: verb.group):
        parts.append(f"## {group}\n\n" + "\n".join(map(_entry, verbs)))
    return "\n".join(parts)


def _entry(verb: Verb) -> str:
    others = (("for short", verb.short), ("formerly", verb.was))
    named = "".join(f" ({words} `topoplan {name}`)" for words, name in others if name)
    return f"### {verb.name}\n\n{verb.summary}{named}\n\n`topoplan {verb.example}`\n"
