"""Why a trainer cannot run a job or a layout: said as data, by the search, by `generate` and by `check` alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from topoplan.errors import InputError, LayoutError, SpecError


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a trainer would refuse, ignore or train otherwise than planned; phrases as `InputError` takes them."""

    rule: str
    """For programs."""
    what: str
    _: KW_ONLY
    where: str = ""
    expected: str = ""
    remedy: str = ""
    kind: type[InputError] | None = None
    """The class of the error that `generate` ends with; None is LayoutError for a key of the layout, else SpecError."""
    is_predicted: bool = False
    """Of a job: memory and time are predicted all the same."""

    @property
    def error(self) -> InputError:
        """What is raised where somebody asked for just this."""
        kind = self.kind or (LayoutError if self.where.startswith("layout.") else SpecError)
        return kind(self.what, where=self.where, expected=self.expected, remedy=self.remedy)


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise the first of them, if there is one."""
    for refusal in refusals:
        raise refusal.error
