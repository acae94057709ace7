"""A calibration profile of a user's own: some constants of a GPU, measured where the run will be."""

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
    """One plan that a calibration rests on."""

    model: str
    plan: str
    """Its id."""
    steps: int = 0
    step_s: float | None = None
    """Mean seconds of a step; None for one that told of too few."""
    needs_at_least_gib: float | None = None
    """Of torch's memory, for one that ended out of memory."""
    spread: float = 0.0
    """Standard deviation of the steps, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Where the constants of a file come from that `topoplan calibrate` wrote, and what they hold for."""

    date: str
    trainer: str = ""
    """The one that ran; empty where the logs are of a program that no files are written for."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, as far as they are known."""
    measured: tuple[MeasuredPlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnProfile:
    """The constants in a profile file. Compared and hashed by identity: what is worked out for one is kept."""

    gpu: str
    """The card or the architecture that they are of."""
    constants: Mapping[str, Any]
    """Constant or band -> value, in base units; what is left out is the GPU's own."""
    source: str
    """Where they come from, in the file's words; may be empty."""
    path: str
    """The file as it was named."""
    calibrated: Calibrated | None = None
    """None for constants that a person wrote."""

    def is_of(self, gpu: Gpu) -> bool:
        """Whether the file names this card or its architecture."""
        return self.gpu in (gpu.name, gpu.architecture)

    def check_gpu(self, gpu: Gpu) -> None:
        """Raise SpecError for a cluster of other cards."""
        if not self.is_of(gpu):
            raise SpecError(
                f"the profile is of {self.gpu}, and the cluster has {gpu.name}",
                where=self.path,
                remedy=f"`topoplan show profile {gpu.name} -o FILE` writes a profile of that card to start from",
            )


def read_profile(path: str | Path) -> OwnProfile:
    """The profile in a YAML or JSON file. Raises SpecError or UnitError with file and line."""
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
