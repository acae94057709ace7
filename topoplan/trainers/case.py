"""The case of a spec under a backend."""

from __future__ import annotations

from topoplan.specs.case import Case, case_with
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import traits_of


def case_of(spec: Spec, backend: str) -> Case:
    """What is asked of a backend: the spec, the constants of its GPU, and how the backend's trainer computes."""
    return case_with(spec, traits_of(backend, spec.trainer))
