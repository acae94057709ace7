"""The case of a spec under a backend."""

from __future__ import annotations

from topoplan.backends.megatron import traits_of
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec


def case_of(spec: Spec, backend: str) -> Case:
    """What is asked of a backend: the spec, the constants of its GPU, and how its trainer computes."""
    return Case(
        model=spec.model,
        cluster=spec.cluster,
        job=spec.job,
        profile=profile_of(spec.cluster.gpu, spec.profile),
        traits=traits_of(backend, spec.trainer),
        is_past=spec.path is None,
    )
