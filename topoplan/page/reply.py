"""Answer a page's question as JSON, or return the error in it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from topoplan.errors import TopoplanError
from topoplan.page.form import field_of, files_of

Answer = Callable[[Mapping[str, Any]], Any]


def reply(answer: Answer, asked: Any) -> Any:
    """Return the answer; `error` holds the message of the command line, and the form field that it is about."""
    given = asked if isinstance(asked, dict) else {}
    try:
        return answer(given)
    except TopoplanError as error:
        field = field_of(getattr(error, "where", ""), str(error), files_of(given.get("question")))
        return _error(str(error), field)
    except ModuleNotFoundError as error:
        return _error(f"this needs the package {error.name}, which is not here")
    except Exception as error:  # a defect triggered by one question must not end the page
        traceback.print_exc(file=sys.stderr)
        return _error(f"a defect of topoplan, {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _error(message: str, field: str = "") -> dict[str, Any]:
    return {"error": {"message": message, "field": field}}
