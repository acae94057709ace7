"""Scripts that bash reads otherwise than they look: broken continuations, unclosed quotes, variables nobody sees."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from topoplan.reading.finding import Edit, Finding
from topoplan.reading.parts import Part
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Launch, Setup, Variable
from topoplan.reading.shell import Script
from topoplan.units import shown

RULES = read_rules(__package__, "shell.toml")

_READ_BY_PROCESSES = re.compile(
    r"NCCL_\w+|TORCH_NCCL_\w+|GLOO_\w+|USE_MCA|FORCE_TORCHRUN|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_(?:CUDA_)?ALLOC_CONF"
    r"|NODE_RANK|NPROC_PER_NODE|OMP_NUM_THREADS|HF_HOME|HF_ENDPOINT|WANDB_\w+|TOKENIZERS_PARALLELISM"
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_READ_BY_TRAINERS = frozenset(["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"])
"""By `llamafactory-cli` and `swift`, which start torchrun with them; torchrun itself reads none of them."""


def findings(setup: Setup) -> Iterator[Finding]:
    """What bash makes of each script."""
    for script in setup.scripts:
        if not script.part.unfolded:
            yield from _of_script(script, [one for one in setup.launches if one.part is script.part])


def _of_script(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    if "\r" in script.part.text:
        yield from _windows_lines(script.part)
        return  # every other finding would follow from it
    if script.unclosed is not None:
        opening, line = script.unclosed
        yield RULES["shell-unclosed-quote"].found(script.part, line, opening=opening)
        return
    yield from _options_as_commands(script, started)
    yield from _not_exported(script, started)
    yield from _typographic(script, started)
    yield from _commands_for_variables(script, started)


def _windows_lines(part: Part) -> Iterator[Finding]:
    lines = part.text.split("\n")
    first = next(number for number, line in enumerate(lines, start=1) if "\r" in line)
    text = part.text.replace("\r\n", "\n").replace("\r", "").removesuffix("\n")
    edits = (Edit(first_line=1, last_line=len(text.split("\n")), text=text),) if not part.lines else ()
    yield RULES["shell-windows-lines"].found(part, first, edits=edits)


def _options_as_commands(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """A line that begins with an option, behind a command that starts training: the two were meant to be one."""
    lines = script.part.text.split("\n")
    starts = {launch.last_line for launch in started}
    for before, command in zip(script.commands, script.commands[1:], strict=False):
        word = command.words[0]
        if before.last_line not in starts or not re.match(r"--[A-Za-z]", word.text) or word.quoted:
            continue
        edits, reason = _joined(lines, before.last_line, command.first_line)
        option, rule = word.text.partition("=")[0], RULES["shell-broken-continuation"]
        yield rule.found(script.part, command.first_line, option=option, reason=reason, edits=edits)


def _joined(lines: list[str], last: int, first: int) -> tuple[tuple[Edit, ...], str]:
    between = lines[last : first - 1]
    line = lines[last - 1]
    if between and any(one.lstrip().startswith("#") for one in between):
        kept = tuple(
            Edit(first_line=number, last_line=number, text="")
            for number, one in enumerate(between, start=last + 1)
            if one.lstrip().startswith("#") or not one.strip()
        )
        return kept, "a comment ends the command: bash does not continue it behind one"
    if re.search(r"\\[ \t]+$", line):
        edit = Edit(first_line=last, last_line=last, text=line.rstrip())
        return (edit,), f"blanks stand behind the backslash at the end of line {last}"
    if between:
        return (), "an empty line ends the command"
    edit = Edit(first_line=last, last_line=last, text=f"{line.rstrip()} \\")
    return (edit,), f"line {last} does not end with a backslash"


_DASHES = re.compile(r"(?<!\S)[\N{HYPHEN}-\N{HORIZONTAL BAR}\N{MINUS SIGN}]+-?(?=[A-Za-z])")
_DOUBLE = "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_SINGLE = "\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"
_EQUALS = "\N{FULLWIDTH EQUALS SIGN}"
_TYPOGRAPHIC = re.compile(rf"{_DASHES.pattern}|(?:(?<!\S)|(?<==))[{_DOUBLE}{_SINGLE}]|(?<=\w){_EQUALS}", re.ASCII)
_TYPED = str.maketrans(_DOUBLE + _SINGLE + _EQUALS, "\"\"''=")
_EXPORT = re.compile(r"\s*export\s+[^'\"#]*")


def _lines(started: Sequence[Launch]) -> set[int]:
    """Lines of the commands that start training."""
    return {line for one in started for line in range(one.first_line, one.last_line + 1)}


def _typographic(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Dashes and quotes as text editors and chats put them in place of those that were typed."""
    launched = _lines(started)
    if not launched:
        return
    words = [word for command in script.commands if command.first_line in launched for word in command.words]
    lines = script.part.text.split("\n")
    texts = [(word.line, word.text) for word in words if not word.quoted]
    texts += [(number, match[0]) for number, line in enumerate(lines, start=1) if (match := _EXPORT.match(line))]
    told: set[int] = set()
    for number, text in texts:
        typed = _TYPOGRAPHIC.search(text)
        if typed is None or number in told:
            continue
        told.add(number)
        line = lines[number - 1]
        new = _DASHES.sub("--", line).translate(_TYPED)
        meant = re.search("[#'\"]", line)  # perhaps: in a comment, or in a text
        yield RULES["shell-typographic"].found(
            script.part,
            number,
            text=shown(text.strip()),
            typed=typed[0],
            edits=() if meant else (Edit(first_line=number, last_line=number, text=new),),
        )


_IN_BRACKETS = re.compile(r"(?<![\\$])\$\(([A-Z][A-Z0-9_]*)\)")


def _commands_for_variables(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """`$(MASTER_ADDR)`, as Kubernetes and make write variables."""
    if script.part.is_makefile:
        return
    lines = script.part.text.split("\n")
    for number in sorted(_lines(started)):
        line = lines[number - 1] if number <= len(lines) else ""
        match = _IN_BRACKETS.search(line)
        if match is None or re.search(rf"\b{match[1]}\s*\(\)|\bfunction\s+{match[1]}\b", script.part.text):
            continue
        edit = Edit(first_line=number, last_line=number, text=_IN_BRACKETS.sub(r"${\1}", line))
        yield RULES["shell-command-for-variable"].found(
            script.part, number, written=match[0], name=match[1], edits=(edit,)
        )


def _not_exported(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Set for the shell alone, by a name that only a process could read."""
    if not started:
        return
    options_alone = all(launch.starter for launch in started)  # torchrun and its like take options instead
    used = set(_USED.findall(script.part.text))
    exported = {variable.name for variable in script.variables}
    for variable in script.not_exported:
        if variable.name in used or variable.name in exported or not _READ_BY_PROCESSES.fullmatch(variable.name):
            continue
        if options_alone and variable.name in _READ_BY_TRAINERS:
            continue
        yield RULES["env-not-exported"].found(script.part, variable.line, name=variable.name, edits=_exported(variable))


def _exported(variable: Variable) -> tuple[Edit, ...]:
    line = variable.part.text.split("\n")[variable.line - 1]
    match = re.match(rf"(\s*){re.escape(variable.name)}=", line)
    if match is None:
        return ()
    text = f"{match.group(1)}export {line.lstrip()}"
    return (Edit(first_line=variable.line, last_line=variable.line, text=text),)
