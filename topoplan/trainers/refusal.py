"""Why a trainer cannot run a job or a layout, as data for the search, `generate` and `check` alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from topoplan.errors import InputError, LayoutError, SpecError


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a trainer would refuse, ignore, or train differently from the plan; texts are those of an `InputError`."""

    rule: str
    """Identifier for programs."""
    what: str
    _: KW_ONLY
    where: str = ""
    expected: str = ""
    remedy: str = ""
    kind: type[InputError] | None = None
    """Class of the error to raise; if None, LayoutError if `where` is a key of the layout, else SpecError."""
    is_predicted: bool = False
    """True if memory and time of a refused job are predicted all the same."""

    @property
    def error(self) -> InputError:
        """The error to raise if the user explicitly asked for what is refused."""
        kind = self.kind or (LayoutError if self.where.startswith("layout.") else SpecError)
        return kind(self.what, where=self.where, expected=self.expected, remedy=self.remedy)


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise the first refusal as an error, if there is one."""
    for refusal in refusals:
        raise refusal.error
