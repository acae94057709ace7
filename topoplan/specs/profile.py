"""A user's own calibration profile: constants of a GPU, measured where the run will be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.gpu import Gpu
from topoplan.specs.source import read_source, shown_path


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """One plan whose measurements a calibration is based on."""

    model: str
    plan: str
    """The plan's id."""
    steps: int = 0
    step_s: float | None = None
    """Mean step time in seconds; None if the run logged too few steps."""
    needs_at_least_gib: float | None = None
    """Lower bound on torch's memory, for a run that ended out of memory."""
    spread: float = 0.0
    """Standard deviation of the step times, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The origin and validity of constants that `topoplan calibrate` wrote."""

    date: str
    trainer: str = ""
    """The trainer that ran; empty if the logs are of a program that topoplan writes no files for."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, where known."""
    measured: tuple[MeasuredPlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnProfile:
    """The constants in a profile file. Compared and hashed by identity, because results are cached per object."""

    gpu: str
    """The card or the architecture that the constants belong to."""
    constants: Mapping[str, Any]
    """Name of a constant or band -> value, in base units; the rest come from the catalog."""
    source: str
    """The origin of the constants as stated in the file; may be empty."""
    path: str
    """The file, as it was named."""
    calibrated: Calibrated | None = None
    """None for constants written by hand."""

    def is_of(self, gpu: Gpu) -> bool:
        """Return whether the file names this card or its architecture."""
        return self.gpu in (gpu.name, gpu.architecture)

    def check_gpu(self, gpu: Gpu) -> None:
        """Raise SpecError if the cluster has other cards."""
        if not self.is_of(gpu):
            raise SpecError(
                f"the profile is of {self.gpu}, and the cluster has {gpu.name}",
                where=self.path,
                remedy=f"`topoplan show profile {gpu.name} -o FILE` writes a profile of that card to start from",
            )


def read_profile(path: str | Path) -> OwnProfile:
    """Read a profile from a YAML or JSON file. Raises SpecError or UnitError with file and line."""
    from topoplan.specs.mistakes import check_form
    from topoplan.specs.profile_form import ProfileForm

    path = Path(path)
    source = read_source(path)
    form = check_form(ProfileForm, {key: value for key, value in source.data.items() if key != "$schema"}, source.place)
    given = form.given()
    given.pop("calibrated", None)
    return OwnProfile(
        gpu=given.pop("gpu").lower(),
        source=given.pop("source", ""),
        constants=given,
        path=shown_path(path),
        calibrated=form.calibrated,
    )
