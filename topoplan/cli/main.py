"""The command line: which verbs there are, and what a user sees when something is wrong.

Each verb has a file of its own and imports what it needs when it runs, so that `topoplan --help` reads none of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import typer

from topoplan import __version__
from topoplan.cli.exit_codes import BROKEN_PIPE, INTERRUPTED
from topoplan.cli.options import spread
from topoplan.errors import TopoplanError

VERBS = (
    *("rank", "generate", "explain", "what-if", "size", "table", "check", "timeline", "topology"),
    *("probe", "preflight", "launch", "status", "logs", "attach", "stop", "runs"),
    *("predict", "validate", "models", "gpus", "profile", "schema", "version"),
)
"""Each is a function in the module of its name, in the order of `topoplan --help`."""

# The base of typer's own complaints about options. Older typers take it from click, newer ones carry a copy.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def app(*verbs: str) -> typer.Typer:
    """The command line with these verbs."""
    found = typer.Typer(
        name="topoplan",
        help="Rank parallel layouts of LLM fine-tuning on a GPU cluster, and write the files that start one.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    found.callback()(_topoplan)
    for verb in verbs:
        name = verb.replace("-", "_")
        found.command(verb)(spread(getattr(import_module(f"topoplan.cli.{name}"), name)))
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
    # A name that the terminal cannot show (a path that is not UTF-8, a Latin-1 locale) must not end the program.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`topoplan rank ... | head`). Point stdout elsewhere, or Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except OSError as error:  # the disk behind `> file` is full, for one
        code = _complain(error.strerror or str(error), 1)
    if arguments is None and threading.active_count() > 1:
        # A thread that still waits for a host. Python ends such threads by unwinding them, and those that are in the
        # code of another language then abort the process at times.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    # The options of all verbs take longer to read than many a verb takes to run.
    named = arguments[:1] if arguments and arguments[0] in VERBS else VERBS
    command = typer.main.get_command(app(*named))
    try:
        code = command.main(arguments or ["--help"], prog_name="topoplan", standalone_mode=False)
    except TopoplanError as error:
        return _complain(str(error), error.exit_code)
    except _UsageError as error:
        return _complain(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _usage(error: Exception) -> str:
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see `{context.command_path if context else 'topoplan'} --help`"


def _complain(message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {message}\n")
    return code
