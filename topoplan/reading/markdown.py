"""Find the pieces of configuration in a document: Markdown, or text copied from a page.

Recognized are fenced blocks; blocks of a copied page, preceded by a line with the language and one that says "copy
code"; JSON and commands between paragraphs without a fence; and a command whose flags the document explains one by one
in its headings.

Four rules, based on what each block contains, separate configuration from illustration:

1. YAML and JSON count if they are complete: they name a model, or are a DeepSpeed or accelerate configuration. A few
   keys ("the differences are") show an alternative. They only count in a document without a complete configuration.
2. Shell blocks count if they start training or set environment variables, each once: a block that sets a variable three
   times shows alternatives. Options without a command, and commands without arguments, are illustrations.
3. If headings are single options or assignments, the headings together form the command, and the blocks below them are
   examples. A launcher without arguments among these blocks gives the beginning of the command.
4. A block that contains `...` is an illustration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from topoplan.reading.kinds import PROGRAMS, looks_like_command, names_a_job, sets_variables, starts_training
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.starters import options_of
from topoplan.reading.unfold import lines_of_unfolded, unfold_shell, unfold_yaml

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)")
_OWN_TOKENS = ("fence", "heading_open")
_LANGUAGES: dict[str, PartKind] = {
    **dict.fromkeys(("yaml", "yml"), "yaml"),
    **dict.fromkeys(("json", "jsonc", "json5"), "json"),
    **dict.fromkeys(
        ("bash", "sh", "shell", "console", "zsh", "shellscript", "shell-session", "cmd", "terminal"), "shell"
    ),
}
_OTHER_LANGUAGES = frozenset(
    ["python", "py", "c", "cpp", "toml", "ini", "dockerfile", "diff", "xml", "html", "mermaid"]
)
_COPY_LINE = re.compile(r"(?:展开代码|复制代码|代码复制|复制|copy code|copy|expand code)", re.IGNORECASE)
_HEADING = re.compile(r"[ ]{0,3}#{1,6}[ \t]+(?P<text>.*?)[ \t]*#*[ \t]*")
_CODE_SPAN = re.compile(r"(?:[\d.]+[ \t]+)?(`+)[ ]?(?P<code>.+?)[ ]?\1")
_HEADING_OPTION = re.compile(r"--?[A-Za-z][\w-]*(?:[= ].*)?")
_HEADING_VARIABLE = re.compile(r"(?:export )?[A-Z_][A-Z0-9_]*=\S+")
_PROMPT = re.compile(r"^(?:\([\w.-]{1,60}\) ?)?(?:[\w.-]{1,60}@[\w.-]{1,60}:[^$#\s]{0,200})?\$ (?=\S)")
_LEFT_OUT = re.compile(r"(?:^|[ \t\[{(])(?:\.{3}|…|\.{6})(?:$|[ \t\]}),\\])", re.MULTILINE)
_FEWEST_HEADINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block of code in the document."""

    kind: PartKind
    text: str
    lines: tuple[int, ...]
    unfolded: bool
    explains_heading: bool
    """True if the block is below a heading that is an option or an assignment."""


@dataclass(frozen=True, slots=True)
class _HeadingFlag:
    text: str
    line: int


def markdown_parts(text: str, keys: Collection[str], *, name: str) -> tuple[Part, ...]:
    """Return the configuration in a document, empty if there is none. `keys` are those of known trainers."""
    lines = text.splitlines()
    blocks, headings = _read(lines, keys)
    composed = _composed(blocks, headings, name) if len(headings) >= _FEWEST_HEADINGS else None
    if any(block.kind == "shell" and names_a_job(block.text, keys) and not block.explains_heading for block in blocks):
        composed = None  # the document has the complete command too, and the headings explain it
    if len(headings) >= _FEWEST_HEADINGS:
        blocks = [block for block in blocks if not block.explains_heading]
    chosen = _chosen(blocks, keys)
    pieces = _pieces(blocks, chosen, keys) if chosen else []
    named = zip(blocks, _named(blocks, name, pieces), strict=True)
    parts = [part for block, part in named if block in chosen or block in pieces]
    return (composed, *parts) if composed else tuple(parts)


# Reading -------------------------------------------------------------------------------------------------------------


@cache
def _parser() -> MarkdownIt:
    """Return a parser for fences and headings at any indentation, because pasted text has lost that of its lists."""
    from markdown_it import MarkdownIt

    return MarkdownIt("zero").enable(["fence", "heading", "blockquote"]).disable("inline")


def _read(lines: Sequence[str], keys: Collection[str]) -> tuple[list[_Block], list[_HeadingFlag]]:
    blocks: list[_Block] = []
    headings: list[_HeadingFlag] = []
    below_flag = False
    last_brace = max((at for at, line in enumerate(lines) if line.rstrip() == "}"), default=-1)
    tokens = _parser().parse("\n".join(lines))
    begins = {token.map[0]: place for place, token in enumerate(tokens) if token.map and token.type in _OWN_TOKENS}
    at = 0
    while at < len(lines):
        token = tokens[begins[at]] if at in begins else None
        language = ""
        if token is not None and token.type == "heading_open":
            text = tokens[begins[at] + 1].content
            flag = _heading_flag(text, at + 1)
            below_flag = flag is not None or (below_flag and not text)
            if flag is not None:
                headings.append(flag)
            at += 1
            continue
        if token is not None and token.map is not None:
            code = token.content.removesuffix("\n").split("\n")
            numbers, at = list(range(at + 2, at + 2 + len(code))), max(token.map[1], at + 1)
            language = token.info.strip().lower().partition(" ")[0].strip("{}.")
        elif at + 1 < len(lines) and _is_copied(lines, at):
            language = lines[at].strip().lower()
            code, numbers, at = _copied(lines, at + 2)
        elif _COPY_LINE.fullmatch(lines[at].strip()):
            code, numbers, at = _copied(lines, at + 1)
        else:
            code, numbers, at = _loose(lines, at, last_brace)
        if block := _block(code, numbers, language, keys, below_flag=below_flag):
            blocks.append(block)
    return blocks, headings


def _heading_flag(text: str, line: int) -> _HeadingFlag | None:
    span = _CODE_SPAN.fullmatch(text)
    if span is None:
        return None
    code = span.group("code").strip()
    if _HEADING_OPTION.fullmatch(code) or _HEADING_VARIABLE.fullmatch(code):
        return _HeadingFlag(code, line)
    return None


def _is_copied(lines: Sequence[str], at: int) -> bool:
    language = lines[at].strip().lower()
    known = language in _LANGUAGES or language in _OTHER_LANGUAGES
    return known and _COPY_LINE.fullmatch(lines[at + 1].strip()) is not None


def _copied(lines: Sequence[str], at: int) -> tuple[list[str], list[int], int]:
    """Return the code of a copied page, up to the next empty line."""
    code: list[str] = []
    numbers: list[int] = []
    while at < len(lines) and (lines[at].strip() or not code):
        if lines[at].strip():
            code.append(lines[at])
            numbers.append(at + 1)
        at += 1
    return code, numbers, at


def _loose(lines: Sequence[str], at: int, last_brace: int) -> tuple[list[str], list[int], int]:
    """Return an unfenced JSON object or command (or no code), its line numbers, and the index of the next line."""
    start = at
    if lines[at].rstrip() == "{" and at < last_brace:
        end = next(here for here in range(at, last_brace + 1) if lines[here].rstrip() == "}")
        return list(lines[at : end + 1]), list(range(at + 1, end + 2)), end + 1
    if looks_like_command(_PROMPT.sub("", lines[at])):
        while at < len(lines) and lines[at].strip():
            continued = lines[at].rstrip().endswith("\\")
            at += 1
            if not continued and not (at < len(lines) and looks_like_command(_PROMPT.sub("", lines[at]))):
                break
        return list(lines[start:at]), list(range(start + 1, at + 1)), at
    return [], [], at + 1


# Blocks --------------------------------------------------------------------------------------------------------------


def _block(
    code: Sequence[str], numbers: Sequence[int], language: str, keys: Collection[str], *, below_flag: bool
) -> _Block | None:
    text = "\n".join(code)
    if not text.strip() or language in _OTHER_LANGUAGES:
        return None
    kind = _LANGUAGES.get(language) or _kind_of_code(text, keys)
    if kind is None or _LEFT_OUT.search(text):
        return None
    if kind == "shell":
        text = "\n".join(_PROMPT.sub("", line) for line in code)
    unfolded = unfold_yaml(text, keys) if kind == "yaml" else unfold_shell(text) if kind == "shell" else None
    lines = tuple(numbers)
    if unfolded is not None:
        lines = lines_of_unfolded(unfolded, code, numbers)
        text = unfolded
    return _Block(kind=kind, text=text, lines=lines, unfolded=unfolded is not None, explains_heading=below_flag)


def _kind_of_code(text: str, keys: Collection[str]) -> PartKind | None:
    if text.lstrip().startswith("{"):
        return "json"
    if starts_training(text) or sets_variables(text):
        return "shell"
    if names_a_job(text, keys, kind="yaml"):
        return "yaml"
    return None


def _chosen(blocks: Sequence[_Block], keys: Collection[str]) -> list[_Block]:
    """Select the blocks that are configuration; see rules 1 and 2 in the docstring of the module."""
    documents = [block for block in blocks if block.kind != "shell"]
    whole = [block for block in documents if names_a_job(block.text, keys, kind=block.kind)]
    shell = [block for block in blocks if block.kind == "shell" and _is_command(block.text)]
    if not whole and not any(names_a_job(block.text, keys) for block in shell):
        whole = [block for block in documents if _is_fragment(block, keys)]
    return [*whole, *shell]


def _is_command(text: str) -> bool:
    return starts_training(text) or sets_variables(text)


def _is_fragment(block: _Block, keys: Collection[str]) -> bool:
    return names_a_job(block.text, keys, kind=block.kind, fragment=True)


def _pieces(blocks: Sequence[_Block], chosen: Sequence[_Block], keys: Collection[str]) -> list[_Block]:
    """Return the excerpts of configurations, besides the complete ones."""
    rest = (block for block in blocks if block.kind == "yaml" and block not in chosen)
    return [block for block in rest if _is_fragment(block, keys)]


def _named(blocks: Sequence[_Block], name: str, pieces: Collection[_Block] = ()) -> Iterator[Part]:
    seen: dict[str, int] = {}
    for block in blocks:
        seen[block.kind] = number = seen.get(block.kind, 0) + 1
        yield Part(
            kind=block.kind,
            name=name,
            text=block.text,
            lines=block.lines,
            label=f"{block.kind} block {number}",
            unfolded=block.unfolded,
            is_excerpt=block in pieces,
        )


# Headings ------------------------------------------------------------------------------------------------------------


def _composed(blocks: Sequence[_Block], headings: Sequence[_HeadingFlag], name: str) -> Part | None:
    """Return the command formed by the headings, one line per heading."""
    variables = [flag for flag in headings if "=" in flag.text and not flag.text.startswith("-")]
    options = [flag for flag in headings if flag.text.startswith("-")]
    stub = _launcher(blocks) or _launcher_for(options)
    if stub is None or not options:
        return None
    words, line = stub
    starter, program = _halves(words)
    of_starter = options_of("torchrun") if starter else frozenset()
    by_starter = [flag for flag in options if _option_name(flag.text) in of_starter]
    by_program = [flag for flag in options if _option_name(flag.text) not in of_starter]
    given = {_option_name(flag.text) for flag in by_starter}
    kept = [word for word in starter if not word.startswith("-") or _option_name(word) not in given]
    pieces = [(flag.text.removeprefix("export "), flag.line) for flag in variables]
    if kept:
        pieces.append((" ".join(kept), line))
    pieces += [(flag.text, flag.line) for flag in by_starter]
    pieces.append((" ".join(program), line))
    pieces += [(flag.text, flag.line) for flag in by_program]
    text = " \\\n".join(piece for piece, _ in pieces)
    lines = tuple(number for _, number in pieces)
    return Part(kind="shell", name=name, text=text, lines=lines, label="command in the headings")


def _launcher(blocks: Sequence[_Block]) -> tuple[list[str], int] | None:
    """Return a launch of a program without arguments: `torchrun --nproc_per_node=5 --no_python swift sft`."""
    for block in blocks:
        for line, number in zip(block.text.split("\n"), block.lines, strict=True):
            words = line.split()
            _, program = _halves(words)
            if block.kind == "shell" and len(program) == 2 and starts_training(line + "\n"):
                return words, number
    return None


def _launcher_for(options: Sequence[_HeadingFlag]) -> tuple[list[str], int] | None:
    """Infer the launch from options that only one program has."""
    names = {_option_name(flag.text) for flag in options}
    starter = ["torchrun", "--no_python"] if names & {"nproc_per_node", "master_port", "nnodes"} else []
    if names & {"train_type", "tuner_type"} and "model" in names:
        return [*starter, "swift", "sft"], options[0].line
    if {"model_name_or_path", "stage"} <= names:
        launcher = ["torchrun", "-m", "llamafactory.launcher"] if starter else ["llamafactory-cli", "train"]
        return launcher, options[0].line
    return None


def _halves(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a launch where the program begins."""
    for at, word in enumerate(words):
        if word in PROGRAMS:
            return list(words[:at]), list(words[at:])
    return list(words), []


def _option_name(text: str) -> str:
    return re.split(r"[= ]", text.lstrip("-"), maxsplit=1)[0].replace("-", "_")


def is_markdown(text: str) -> bool:
    """Whether text looks like a document: it has a fence, a copied block, or a heading that is an option."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if _FENCE.fullmatch(line.lstrip("> ")) or _COPY_LINE.fullmatch(line.strip()):
            return True
        heading = _HEADING.fullmatch(line)
        if heading and _heading_flag(heading.group("text"), at):
            return True
    return False
