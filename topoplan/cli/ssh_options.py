"""Options of the verbs that log in to hosts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topoplan.cli.completion import runs
from topoplan.cli.options import argument, option
from topoplan.errors import InputError, UnitError

if TYPE_CHECKING:
    from topoplan.remote.identities import Access, NewKey

AcceptNew = Annotated[bool, option("--accept-new", "Accept and record the keys of unknown hosts.")]
RunReference = Annotated[str, argument("RUN", "Id of the run or the beginning of it; the last one by default.", runs)]
NoPreflight = Annotated[bool, option("--no-preflight", "Do not check the hosts first.")]
Grace = Annotated[float, option("--grace SECONDS", "Time between SIGTERM and SIGKILL.", min=0, max=3600)]


def time_option(option: str, help_words: str) -> Any:
    """Return an option whose value is a time such as 30min, in seconds."""

    def seconds(given: str) -> float:
        from topoplan.units import parse_seconds, quote

        try:
            return parse_seconds(given)
        except UnitError:
            expected = "expected one such as 90s, 30min or 2h"
            raise InputError(f"{quote(given)!r} is no time", where=option, expected=expected) from None

    return typer.Option(option, metavar="TIME", help=help_words, parser=seconds)


LostHostAfter = Annotated[
    float | None,
    time_option(
        "--lost-host-after", "Give up on a host that is unreachable for so long, such as 30min; by default never."
    ),
]
HangAfter = Annotated[
    float | None,
    time_option("--hang-after", "End the run after so long without a step, such as 1h; by default never."),
]


def access(*, accept_new: bool) -> Access:
    """Return the SSH credentials and host-key policy. On a terminal, passphrases of keys are asked for."""
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
