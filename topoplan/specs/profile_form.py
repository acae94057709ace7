"""The schema of a calibration profile's file."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from topoplan.specs.constants import Constants
from topoplan.specs.forms import form_of
from topoplan.specs.kinds import GPU_NAME, Text
from topoplan.specs.profile import Calibrated


class ProfileForm(form_of(Constants)):  # type: ignore[misc]  # the base is generated from a declaration
    """Measured constants of a GPU. Those left out come from the catalog. Peak rates are always the vendor's."""

    list_of_keys: ClassVar[str] = "`topoplan show profile` lists the constants of a GPU"

    gpu: Annotated[str, GPU_NAME] = Field(
        description="The card or the architecture that the constants are of.", examples=["h100-sxm-80gb"]
    )
    source: Annotated[str | None, Text()] = Field(default=None, description="Where the constants come from.")
    calibrated: Calibrated | None = Field(
        default=None, description="What `topoplan calibrate` measured, and with which trainer."
    )
