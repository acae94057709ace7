"""An answer to a page as JSON, or what is wrong with its question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from topoplan.errors import TopoplanError

Answer = Callable[[Mapping[str, Any]], Any]


def reply(answer: Answer, asked: Any) -> Any:
    """What is answered; `error` has the message of the command line, and the option or file that it is about."""
    try:
        return answer(asked if isinstance(asked, dict) else {})
    except TopoplanError as error:
        return {"error": {"message": str(error), "where": getattr(error, "where", "")}}
