"""Shell arithmetic over known variables: `$((16 / $gpus))` and `$(expr 16 / $gpus)`.

Integers as in bash (Bash Reference Manual, 6.5 Shell Arithmetic): division truncates toward zero.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_EXPRESSION = re.compile(r"\$\(\((.*)\)\)|\$\(\s*expr\s+(.*)\)|`\s*expr\s+(.*)`", re.DOTALL)
_NAME = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$?([A-Za-z_]\w*)", re.ASCII)
_MOST_CHARS = 200
_MOST = 2**63
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


def worked_out(text: str, value: Callable[[str], str | None]) -> str | None:
    """Return the result of an arithmetic expansion as text; `value` looks up variables.

    None if it is not arithmetic or uses an unknown variable.
    """
    match = _EXPRESSION.fullmatch(text)
    if match is None or len(text) > _MOST_CHARS:
        return None
    written = next(filter(None, match.groups()), "").replace("\\*", "*").replace("'*'", "*").replace('"', "")
    try:
        put = _NAME.sub(lambda name: f" {int(value(name[1] or name[2]) or '')} ", written)
        return str(_number(ast.parse(put.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    """Evaluate a node; raise ValueError for anything but integer arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))):
        found = apply(_number(node.left), _number(node.right))
        if abs(found) < _MOST:
            return found
    raise ValueError
