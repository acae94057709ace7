"""The command line: which verbs there are, and what a user sees when something is wrong.

Each verb has a file of its own and imports what it needs when it runs, so that `topoplan --help` reads none of it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from topoplan import __version__
from topoplan.cli.commands import METAVAR, PROGRAM, Commands
from topoplan.cli.completion import mend_zsh
from topoplan.cli.interrupts import INTERRUPTED
from topoplan.cli.verbs import meant
from topoplan.errors import TopoplanError, nearest

_COMPLETING = f"_{PROGRAM.upper()}_COMPLETE"
"""Set by a shell that asks what could be typed next."""

# The base of typer's own complaints about options. Older typers take it from click, newer ones carry a copy.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def app(*, completion: bool = True) -> typer.Typer:
    """The whole command line; the options that install `completion` in a shell take a moment to make."""
    found = typer.Typer(
        name=PROGRAM,
        cls=Commands,
        subcommand_metavar=METAVAR,
        help="Rank parallel layouts of LLM fine-tuning on a GPU cluster, and write the files that start one.",
        epilog="`topoplan VERB --help` has a verb's options. Exit code 0: it worked; 1: nothing fits, or a run failed;"
        " 2: bad input.",
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    found.callback()(_topoplan)
    return found


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"topoplan {__version__}\n")
        raise typer.Exit


def _topoplan(
    _version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 when it worked, 1 when nothing fits, 2 for bad input."""
    # A command makes thousands of objects that it needs to the end: to look for garbage among them is for nothing.
    gc.set_threshold(100_000)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started this, as with `<&-`
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    # A name that the terminal cannot show (a path that is not UTF-8, a Latin-1 locale) must not end the program.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`topoplan rank ... | head`). Point stdout elsewhere, or Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # the disk behind `> file` is full, for one
        more = "; this shell lets a program open too few: see `ulimit -n`" if error.errno == errno.EMFILE else ""
        code = _complain(f"{error.strerror or error}{more}", 1)
    if arguments is None and sys.getprofile() is None:
        # Python would free its objects one by one, a tenth of what a small search takes. It would also end threads that
        # still wait for a host by unwinding them, and those that are in the code of another language then abort the
        # process at times.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    verb = arguments[:1] and not arguments[0].startswith("-")
    command = typer.main.get_command(app(completion=not verb))
    if _COMPLETING in os.environ:
        with contextlib.suppress(Exception):  # the line that a person is typing has no place for it
            command.main([], prog_name=PROGRAM)
        return 1
    try:
        # Not `command.main`, which takes a reader that has left for a failure.
        with command.make_context(PROGRAM, arguments) as context:
            code = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit:  # how typer ends when it has installed what a shell reads
        mend_zsh()
        raise
    except TopoplanError as error:
        return _complain(str(error), error.exit_code)
    except _UsageError as error:
        return _complain(_usage(error, arguments), 2)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


_EXPECTED = {
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Input should be a valid number, unable to parse string as a number": "expected a number",
}
"""What typer's words for a wrong number mean."""


def _usage(error: Any, arguments: list[str]) -> str:
    """What is wrong with the words of a command line, and what to do about it."""
    verb = meant(arguments)
    message, remedy = error.format_message().rstrip("."), ""
    for typers, words in _EXPECTED.items():
        message = message.replace(typers, words)
    if getattr(error, "possibilities", None) is not None:
        message, remedy = error.message, nearest(error.option_name, error.possibilities)
    elif message.startswith("Missing "):
        remedy = f"as in `{PROGRAM} {verb.example}`" if verb else ""
    help_of = f"`{PROGRAM} {verb.name} --help` has all options" if verb else f"see `{PROGRAM} --help`"
    return "; ".join(filter(None, (message, remedy, help_of)))


def _complain(message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {message}\n")
    return code
