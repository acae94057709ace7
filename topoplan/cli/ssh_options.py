"""Options of the verbs that log in to hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.completion import runs

if TYPE_CHECKING:
    from topoplan.remote.identities import Access, NewKey

AcceptNew = Annotated[
    bool,
    typer.Option("--accept-new", help="Take and note the keys of hosts that no known-hosts file names."),
]
RunReference = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of the run or the beginning of it; the last one by default.",
        show_default=False,
        autocompletion=runs,
    ),
]
Grace = Annotated[float, typer.Option("--grace", metavar="SECONDS", min=0, max=3600, help="From SIGTERM to SIGKILL.")]


def time_of(option: str) -> Callable[[str], float]:
    """What reads the time of an option, in seconds."""

    def seconds(given: str) -> float:
        from topoplan.errors import InputError, UnitError
        from topoplan.units import parse_seconds, quote

        try:
            return parse_seconds(given)
        except UnitError:
            expected = "expected one such as 90s, 30min or 2h"
            raise InputError(f"{quote(given)!r} is no time", where=option, expected=expected) from None

    return seconds


LostHostAfter = Annotated[
    float | None,
    typer.Option(
        "--lost-host-after",
        metavar="TIME",
        help="Give a host up that was not seen for so long, such as 30min; by default never.",
        parser=time_of("--lost-host-after"),
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        metavar="TIME",
        help="End the run when no step came for so long, such as 1h; by default never.",
        parser=time_of("--hang-after"),
    ),
]


def access(*, accept_new: bool) -> Access:
    """Who we are and what is accepted. Passphrases of keys are asked for where there is a terminal."""
    from topoplan.remote.identities import Access

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
