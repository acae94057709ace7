"""Scripts that bash reads differently from how they look: broken continuations, open quotes, unexported variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import zip_longest

from topoplan.lint.rules.environment import known_names
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.launch_facts import SOURCES_FILES, has_exports, is_in_double_quotes, lines_of
from topoplan.reading.launches import BROKEN_CONTINUATION, cut_off
from topoplan.reading.parts import Part
from topoplan.reading.recognizer import Recognizers
from topoplan.reading.rules import read_rules
from topoplan.reading.session import Script
from topoplan.reading.setup import Launch, Setup, Variable
from topoplan.reading.wrappers import SHELLS
from topoplan.specs.passed_on import output_variables
from topoplan.units import shown

RULES = read_rules(__package__, "shell.toml")
CUT_OFF = "shell-broken-continuation"
"""The rule on commands whose last lines are no part of them."""

_READ_BY_PROCESSES = re.compile(
    r"NCCL_\w+|TORCH_NCCL_\w+|GLOO_\w+|USE_MCA|FORCE_TORCHRUN|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_(?:CUDA_)?ALLOC_CONF"
    r"|NODE_RANK|NPROC_PER_NODE|NNODES|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES|USE_MEGATRON_BRIDGE|USE_V1"
    r"|VLLM_\w+|RAY_\w+|USE_HF|USE_MODELSCOPE_HUB|HF_\w+|DISABLE_VERSION_CHECK|OMP_NUM_THREADS|HF_HOME|HF_ENDPOINT|WANDB_\w+|TOKENIZERS_PARALLELISM"
)
_SPACED_EXPORT = re.compile(r"(\s*export\s+)([A-Za-z_]\w*)(?:[ \t]+=[ \t]*|=[ \t]+)(?=[^\s#;&|])")
_SPACED_LIST = re.compile(r"\s*export\s+([A-Za-z_]\w*)=[^\s'\"$`(]+[ \t]+([0-9,][^\s#;&|]*)")
_SPACED = re.compile(r"(\s*)([A-Za-z_]\w*)[ \t]+=[ \t]*(?=[^\s=])")
_SET = re.compile(
    r"(?:^|[\s;(&|])(?:for\s+|(?:read|mapfile)\s+(?:-\S+\s+)*)?([A-Za-z_]\w*)(?=\+?=|\s+in\b|\[|\s*$)", re.MULTILINE
)
_PLAIN_USE = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w{3,})(?:\}|(?![\w:]))")
_OF_SLURM = re.compile(r"(?<!\\)\$\{?(SLURM_\w+)(?:\}|(?![\w:]))")
_MISSPELT = 0.85
"""Minimum similarity, from 0 to 1, at which a name counts as a misspelling of another."""
_ONE_LETTER = 0.93
"""Minimum similarity among names that may differ by a word, such as NCCL_MIN_NCHANNELS and NCCL_MIN_P2P_NCHANNELS."""
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_KNOWN = re.compile(r"(?:SLURM_|CUDA_VISIBLE_DEVICES|(?:PYTHON|LD_LIBRARY_)?PATH|HOME|USER|TMPDIR)")
"""Variables that a job has from outside, and that stay exported when a script sets them."""
_READ_BY_TRAINERS = frozenset(["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"])
"""Variables that `llamafactory-cli` and `swift` read and pass to torchrun; torchrun itself reads none of them."""
_READ_BY_OTHERS = frozenset(
    [
        *("FORCE_TORCHRUN", "USE_MCA", "USE_MEGATRON_BRIDGE", "USE_RAY", "USE_MODELSCOPE_HUB"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"),
        *("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "DISABLE_VERSION_CHECK"),
        *("HF_ENDPOINT", "HF_HUB_OFFLINE", "WANDB_MODE", "WANDB_PROJECT"),
    ]
)


def findings(setup: Setup) -> Iterator[Finding]:
    """Report what bash makes of each script."""
    for script in setup.scripts:
        if not script.part.unfolded:
            started = [one for one in setup.launches if one.part is script.part]
            yield from _of_script(script, started, setup.recognizers)


def _of_script(script: Script, started: Sequence[Launch], recognizers: Recognizers) -> Iterator[Finding]:
    if "\r" in script.part.text:
        yield from _windows_lines(script.part)
        return  # every other finding would be a consequence
    if script.unclosed is not None:
        opening, line = script.unclosed
        yield RULES["shell-unclosed-quote"].found(script.part, line, opening=opening)
        return
    yield from _spaced_assignments(script)
    yield from _misspelt_variables(script, started)
    yield from _misspelt_settings(script, started)
    yield from _unset_variables(script, started)
    yield from _cut_off(script, recognizers)
    yield from _not_exported(script, started)
    yield from _empty_inside(script, started)
    yield from _typographic(script, started)
    yield from _commands_for_variables(script, started)


def _windows_lines(part: Part) -> Iterator[Finding]:
    lines = part.text.split("\n")
    first = next(number for number, line in enumerate(lines, start=1) if "\r" in line)
    text = part.text.replace("\r\n", "\n").replace("\r", "").removesuffix("\n")
    edits = (Edit(first_line=1, last_line=len(text.split("\n")), text=text),) if not part.lines else ()
    yield RULES["shell-windows-lines"].found(part, first, edits=edits)


def _spaced_assignments(script: Script) -> Iterator[Finding]:
    """Report `export A = 1` and `A = 1`, which bash does not treat as assignments."""
    lines = script.part.text.split("\n")
    of_commands = {one.first_line for one in script.commands if [w.text[:1] for w in one.words[1:2]] == ["="]}
    for number, line in enumerate(lines, start=1):
        match = _SPACED_EXPORT.match(line) or (number in of_commands and _SPACED.match(line)) or None
        if of_list := _SPACED_LIST.match(line):
            yield RULES["shell-spaced-assignment.list"].found(script.part, number, name=of_list[1], rest=of_list[2])
        if match is None:
            continue
        edit = Edit(first_line=number, last_line=number, text=f"{match[1]}{match[2]}={line[match.end() :].lstrip()}")
        yield RULES["shell-spaced-assignment"].found(script.part, number, name=match[2], edits=(edit,))


def _misspelt_variables(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report `$NAME` in a launch command when the script only sets a very similar name."""
    names = set(_SET.findall(script.part.text)) | {one.name for one in script.variables}
    lines = script.part.text.split("\n")
    for number, line in enumerate(lines, start=1):
        for match in _OF_SLURM.finditer(line):
            close = get_close_matches(match[1], output_variables() - {match[1]}, n=1, cutoff=_MISSPELT)
            if match[1] not in output_variables() | names and close:
                yield RULES["shell-misspelt-variable"].found(script.part, number, name=match[1], close=close[0])
    if SOURCES_FILES.search(script.part.text):
        return
    for number in sorted(_lines(started)):
        line = lines[number - 1] if number <= len(lines) else ""
        for match in _PLAIN_USE.finditer(line):
            others = names - _set_from(script.part.text, match[1])
            close = get_close_matches(match[1], others, n=1, cutoff=_MISSPELT)
            if match[1] not in names and close:
                yield RULES["shell-misspelt-variable"].found(script.part, number, name=match[1], close=close[0])


def _set_from(text: str, name: str) -> set[str]:
    """Return the variables set from another one: in `NODE_RANK=$BT_NODE_RANK`, the latter is no misspelling."""
    return set(re.findall(rf"(?<![\w-])(\w+)=[\"']?\$\{{?{name}\b", text))


def _misspelt_settings(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report a variable that nothing reads (`NNODE=2`) and whose name resembles one that trainers read and is unset."""
    read, listed = _READ_BY_TRAINERS | _READ_BY_OTHERS, known_names() | {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}
    own = {one.name: one for launch in started for one in launch.variables if one.part is script.part}
    used = set(_USED.findall(script.part.text))
    for name, variable in own.items():
        if name in read | listed or name in used:
            continue
        close = get_close_matches(name, read - own.keys(), n=1, cutoff=_MISSPELT) or get_close_matches(
            name, listed - own.keys(), n=1, cutoff=_ONE_LETTER
        )
        if close and close[0][0] == name[0] and _is_slip(name, close[0]):
            yield RULES["shell-misspelt-variable.setting"].found(script.part, variable.line, name=name, close=close[0])


def _is_slip(name: str, close: str) -> bool:
    """Whether two names differ by letters rather than by whole words, unlike PYTORCH_NPU_ and
    PYTORCH_HIP_ALLOC_CONF."""
    if name.replace("_", "") == close.replace("_", ""):
        return True
    pairs = zip_longest(name.split("_"), close.split("_"), fillvalue="")
    return all(get_close_matches(one, [other], cutoff=0.6) for one, other in pairs)


def _unset_variables(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report `$name` that a script never sets; only lower-case names, as environment variables are upper-case."""
    text = script.part.text
    if script.part.lines or not started or SOURCES_FILES.search(text) or "<<" in text:
        return
    ends = re.search(r"^\s*set\s+(?:-[a-z]*u|-o\s+nounset)", text, re.MULTILINE) is not None
    names, seen = set(_SET.findall(text)), _lines(started)
    for number, line in enumerate(text.split("\n"), start=1):
        for match in _PLAIN_USE.finditer("" if line.lstrip().startswith("#") else line):
            name = match[1]
            if name in names or not re.fullmatch("[a-z][a-z0-9_]+", name) or not (ends or number in seen):
                continue
            if number in seen and get_close_matches(name, names, n=1, cutoff=_MISSPELT):
                continue  # reported as misspelt
            names.add(name)
            if not re.search(
                rf"'[^']*\${{?{name}[^']*'|\b(?:printf -v|getopts|local|declare|typeset)\b.*\b{name}\b", text
            ):
                rule = RULES["shell-unset-variable" if ends else "shell-unset-variable.empty"]
                yield rule.found(script.part, number, name=name)


def _cut_off(script: Script, recognizers: Recognizers) -> Iterator[Finding]:
    """Report lines after a launch command that were meant to be part of it."""
    lines = script.part.text.split("\n")
    for before, command in cut_off(script, recognizers):
        edits, reason = _joined(lines, before.last_line, command.first_line)
        option, rule = command.words[0].text.partition("=")[0], RULES[CUT_OFF]
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
    if BROKEN_CONTINUATION.search(line):
        edit = Edit(first_line=last, last_line=last, text=line.rstrip())
        return (edit,), f"spaces follow the backslash at the end of line {last}"
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
    """Return the line numbers of the commands that start training."""
    return {line for one in started for line in range(one.first_line, one.last_line + 1)}


def _typographic(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report dashes and quotes that a text editor or chat has replaced with typographic ones."""
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
        meant = re.search("[#'\"]", line)  # the character may be intentional in a comment or a string
        yield RULES["shell-typographic"].found(
            script.part,
            number,
            text=shown(text.strip()),
            typed=typed[0],
            edits=() if meant else (Edit(first_line=number, last_line=number, text=new),),
        )


_IN_BRACKETS = re.compile(r"(?<![\\$])\$\(([A-Z][A-Z0-9_]*)\)")


def _commands_for_variables(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report `$(MASTER_ADDR)`, which is how Kubernetes and make, but not bash, expand variables."""
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
    """Report variables set without export although only a child process could read them."""
    if not started:
        return
    options_alone = all(launch.starter for launch in started)  # torchrun and other launchers take options instead
    used = set(_USED.findall(script.part.text))
    exported = {variable.name for variable in script.variables}
    for variable in script.not_exported:
        if variable.name in used or variable.name in exported or not _READ_BY_PROCESSES.fullmatch(variable.name):
            continue
        if options_alone and variable.name in _READ_BY_TRAINERS:
            continue
        yield RULES["env-not-exported"].found(script.part, variable.line, name=variable.name, edits=_exported(variable))


def _empty_inside(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """Report variables set without export that only the shell reads which a command starts: `srun bash -c '... $X'`."""
    exported = {variable.name for variable in script.variables}
    own = {one.name: one for one in script.not_exported if one.name not in exported and not _KNOWN.match(one.name)}
    for launch in started:
        if not SHELLS.intersection(launch.wrappers) or not has_exports(launch) or is_in_double_quotes(launch):
            continue
        words = " ".join([*(option.value for option in launch.options.values()), *launch.arguments])
        written = "\n".join(line for _, line in lines_of(launch))
        for name in sorted(own.keys() & set(_USED.findall(words)) - {one.name for one in launch.variables}):
            if re.search(rf"'\"?\${{?{name}\b|\b{name}=", written):
                continue  # between quotes of this shell, or handed on: srun --export=ALL,NAME=$NAME
            yield RULES["env-not-exported.inside"].found(
                script.part, own[name].line, name=name, shell=launch.wrappers[-1], edits=_exported(own[name])
            )


def _exported(variable: Variable) -> tuple[Edit, ...]:
    line = variable.part.text.split("\n")[variable.line - 1]
    match = re.match(rf"(\s*){re.escape(variable.name)}=", line)
    if match is None:
        return ()
    text = f"{match.group(1)}export {line.lstrip()}"
    return (Edit(first_line=variable.line, last_line=variable.line, text=text),)
