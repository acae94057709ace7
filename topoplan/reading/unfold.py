"""Restore line breaks in YAML and shell text that lost them when a page was copied.

A whole file is then on one line, and nothing marks the end of its comments. What can be inferred: a comment ends where
the next key or command begins, and a key directly after `#` is commented out. Only flat YAML can be restored, because
its indentation is lost too.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

_KEY = re.compile(r"(?<!\S)([a-z][a-z0-9_]*):(?=\s|$)")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|\{[^{}]*\}|\[[^\[\]]*\]")
_COMMENT = re.compile(r"(?<!\S)#")
_TITLE = re.compile(r"#\s*(?:={2,}|-{2,}|#)")
_COMMON_KEYS = frozenset(
    [
        *("adapter_name_or_path", "bf16", "cutoff_len", "dataset", "dataset_dir", "deepspeed", "do_train", "fp16"),
        *("finetuning_type", "flash_attn", "learning_rate", "lora_rank", "lora_target", "model", "model_name_or_path"),
        *("optim", "output_dir", "packing", "plot_loss", "seed", "stage", "system", "template", "tokenizer"),
    ]
)

_EXPORT = r"export\s+[A-Za-z_]\w*="
_LAUNCHER = (
    r"(?:torchrun|deepspeed|accelerate\s+launch)\s+(?:\\\s*)?--?\w"
    r"|python3?\s+-m\s+torch\.distributed\.(?:run|launch)\s"
    r"|(?:llamafactory-cli|lmf)\s+(?:train|sft|dpo|rm)\s|(?:swift|megatron)\s+(?:sft|pt|rlhf)\s"
    r"|python3?\s+\S{1,300}\.py\s"
)
_PREFIXED = rf"(?:[A-Z_][A-Z0-9_]{{0,80}}=\S{{1,300}}\s+(?:\\\s*)?){{0,12}}(?:{_LAUNCHER})"
_SHELL_BREAK = re.compile(
    rf"(?<!\S)(?:(?P<comment>\#)|(?P<command>{_EXPORT}|{_PREFIXED}|(?:cd|source|conda|pip|unset|mkdir|git)\s+\S))"
)
_CONTINUED = re.compile(r"(?<!\S)\\[ \t]+(?=\S)")
_MOST_CHARS = 200_000


def unfold_yaml(text: str, known: Collection[str]) -> str | None:
    """Return the text with one key per line; None if it did not lose its line breaks. `known` are trainers' keys."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or len(text) > _MOST_CHARS:
        return None
    keys = sum(len(_key_starts(line, known)) for line in lines)
    if keys < 2 * len(lines):
        return None
    return "\n".join(out for line in lines for out in _unfold_yaml_line(line, known))


def _key_starts(line: str, known: Collection[str]) -> list[int]:
    """Return where the keys of a folded line begin, outside quotes and brackets.

    Inside comments, only known keys and names with an underscore count as keys.
    """
    covered = [match.span() for match in _QUOTED.finditer(line)]
    comments = [match.start() for match in _COMMENT.finditer(line)]
    found: list[int] = []
    inside = 0
    for match in _KEY.finditer(line):
        at, name = match.start(), match.group(1)
        while inside < len(covered) and covered[inside][1] <= at:
            inside += 1
        if inside < len(covered) and covered[inside][0] <= at:
            continue
        last_key = found[-1] if found else -1
        in_comment = bisect_left(comments, at) > bisect_right(comments, last_key)
        if name in known or name in _COMMON_KEYS or "_" in name or not (in_comment or found):
            found.append(at)
    return found


def _unfold_yaml_line(line: str, known: Collection[str]) -> list[str]:
    """Return the keys and comments of a folded line, one per line; a comment after a value stays on its line."""
    starts = set(_key_starts(line, known))
    cuts = sorted({0} | starts | {match.start() for match in _COMMENT.finditer(line)})
    out: list[str] = []
    commented_out = False
    for cut, end in zip(cuts, [*cuts[1:], len(line)], strict=True):
        piece = line[cut:end].strip()
        if not piece:
            continue
        if piece.startswith("#"):
            commented_out = piece == "#" and end in starts
            if not commented_out:
                # After a value, a comment explains the value; further comments get lines of their own.
                explains = out and not out[-1].startswith("#") and "  #" not in out[-1] and not _TITLE.match(piece)
                if explains:
                    out[-1] += "  " + piece
                else:
                    out.append(piece)
        elif commented_out:
            out.append("# " + piece)
            commented_out = False
        else:
            out.append(piece)
    return out


def unfold_shell(text: str) -> str | None:
    """Return the text with one command, option or comment per line; None if it did not lose its line breaks."""
    if len(text) > _MOST_CHARS:
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    if not any(_is_folded(line) for line in lines):
        return None
    return "\n".join(out for line in lines for out in (_unfold_shell_line(line) if _is_folded(line) else [line]))


def _is_folded(line: str) -> bool:
    """Whether a line holds several commands or options: a backslash before an option, or more than one export."""
    return bool(re.search(r"(?<!\S)\\[ \t]+--?\w", line)) or len(re.findall(rf"(?<!\S){_EXPORT}", line)) > 1


def _unfold_shell_line(line: str) -> list[str]:
    covered = [match.span() for match in re.finditer(r"\"[^\"]*\"|'[^']*'|\$\([^()]*\)", line)]
    cuts = {0}
    inside = 0
    for match in _SHELL_BREAK.finditer(line):
        at = match.start()
        while inside < len(covered) and covered[inside][1] <= at:
            inside += 1
        if inside < len(covered) and covered[inside][0] <= at:
            continue
        cuts.add(at)
    ordered = sorted(cuts)
    out: list[str] = []
    for cut, end in zip(ordered, [*ordered[1:], len(line)], strict=True):
        piece = line[cut:end].strip()
        if not piece:
            continue
        if piece.startswith("#") and out and re.match(_EXPORT, out[-1]) and "  #" not in out[-1]:
            out[-1] += "  " + piece
        elif piece.startswith("#"):
            out.append(piece)
        else:
            out += _CONTINUED.sub("\\\\\n", piece).split("\n")
    return out


def lines_of_unfolded(unfolded: str, lines: Sequence[str], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the original line of each new line; both texts have the same non-blank characters in the same order."""
    sizes = [len(re.sub(r"\s+", "", line)) for line in lines]
    out: list[int] = []
    at = used = 0
    for line in unfolded.split("\n"):
        while at + 1 < len(sizes) and used >= sizes[at]:
            used -= sizes[at]
            at += 1
        out.append(numbers[at])
        used += len(re.sub(r"\s+", "", line))
    return tuple(out)
