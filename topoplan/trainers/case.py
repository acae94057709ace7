"""The case of a spec under a backend."""

from __future__ import annotations

from topoplan.specs.case import Case, case_with
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import traits_of


def case_of(spec: Spec, backend: str) -> Case:
    """Return the case of a spec under a backend: the spec with the traits of the backend's trainer."""
    return case_with(spec, traits_of(spec, backend))
