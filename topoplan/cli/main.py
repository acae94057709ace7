"""The command line: its verbs, and what a user sees when something goes wrong.

Each verb has a file of its own and imports what it needs when it runs, so that `topoplan --help` loads none of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from topoplan import __version__
from topoplan.cli.commands import METAVAR, PROGRAM, Commands
from topoplan.cli.completion import mend_zsh
from topoplan.cli.output import complaint
from topoplan.cli.verbs import meant
from topoplan.errors import INTERRUPTED, InputError, TopoplanError, nearest

_COMPLETING = f"_{PROGRAM.upper()}_COMPLETE"
"""Set by a shell that requests completions."""

# The base class of typer's usage errors. Older typers take it from click, newer ones bundle a copy.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def app(*, completion: bool = True) -> typer.Typer:
    """Return the whole command line; options that install shell `completion` take a moment to create."""
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
    """Run the command line and exit: 0 on success, 1 if nothing fits or a run failed, 2 for bad input."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the calling process, as with `<&-`
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    # A name that the terminal cannot show (a non-UTF-8 path, a Latin-1 locale) must not end the program.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`topoplan rank ... | head`). Redirect stdout, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except PermissionError as error:
        code = _refused(error)
    except OSError as error:  # for example, the disk behind `> file` is full
        more = "; this shell lets a program open too few: see `ulimit -n`" if error.errno == errno.EMFILE else ""
        code = _complain(f"{error.strerror or error}{more}", 1)
    if arguments is None and sys.getprofile() is None:
        # Normally, Python would free its objects one by one, which takes a tenth of a small search's time. It would
        # also unwind daemon threads that still wait for a host, and those inside foreign code then sometimes abort the
        # process.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    verb = arguments[:1] and not arguments[0].startswith("-")
    command = typer.main.get_command(app(completion=not verb))
    if _COMPLETING in os.environ:
        with contextlib.suppress(Exception):  # an error message would garble the line that the user is typing
            command.main([], prog_name=PROGRAM)
        return 1
    try:
        # Not `command.main`, which treats a closed pipe as a failure.
        with command.make_context(PROGRAM, arguments) as context:
            code = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit:  # raised by typer after installing shell completion
        mend_zsh()
        raise
    except TopoplanError as error:
        return _complain(str(error), error.exit_code)
    except _UsageError as error:
        return _complain(_usage(error, arguments), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except typer.Abort:  # at a question of `init`, which writes after the last answer
        sys.stderr.write("\n")
        return _complain("interrupted; nothing was written", INTERRUPTED)
    return code if isinstance(code, int) else 0


_EXPECTED = {
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Input should be a valid number, unable to parse string as a number": "expected a number",
}
"""typer's messages for invalid numbers, in topoplan's words."""


def _usage(error: Any, arguments: list[str]) -> str:
    """Return what is wrong with the words of a command line, and what to do about it."""
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


def _refused(error: PermissionError) -> int:
    """Complain of a file that the system refuses, such as one in a directory of another user. Returns the exit code."""
    from topoplan.specs.source import shown_path

    if error.filename is None:
        return _complain(str(error.strerror or error), 1)
    path = Path(os.fsdecode(error.filename))
    how = "cannot be used" if os.access(path, os.R_OK) else "cannot be read"
    return _complain(f"{shown_path(path)}: {how}: {error.strerror}", InputError.exit_code)


def _complain(message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{complaint(message)}\n")
    return code
