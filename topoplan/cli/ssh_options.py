"""Options of the verbs that log in to hosts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from topoplan.launch.keys import Access, NewKey

AcceptNew = Annotated[
    bool,
    typer.Option("--accept-new", help="Take and note the keys of hosts that no known-hosts file names."),
]
RunReference = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", help="Id of the run or the beginning of it; the last one by default.", show_default=False
    ),
]


def access(*, accept_new: bool) -> Access:
    """Who we are and what is accepted. Passphrases of keys are asked for where there is a terminal."""
    from topoplan.launch.keys import Access

    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    return Access(ask=_ask if on_terminal else None, accept_new=accept_new, on_new_key=_tell)


def _ask(question: str) -> str | None:
    import getpass

    try:
        return getpass.getpass(question, stream=sys.stderr)
    except EOFError:
        return None


def _tell(new: NewKey) -> None:
    sys.stderr.write(f"topoplan: {new.host}: new host key {new.key.fingerprint} noted in {new.file}\n")
