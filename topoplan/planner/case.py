"""The case of a spec under a backend."""

from __future__ import annotations

from topoplan.backends.megatron import TRAITS
from topoplan.backends.trinity_traits import TRINITY
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec

_OWN_WAYS = {("trinity", "fsdp2"): TRINITY}
"""(Trainer, backend) -> traits, of trainers that do otherwise than is usual behind the backend."""


def case_of(spec: Spec, backend: str) -> Case:
    """What is asked of a backend: the spec, the constants of its GPU, and how its trainer computes."""
    return Case(
        model=spec.model,
        cluster=spec.cluster,
        job=spec.job,
        profile=profile_of(spec.cluster.gpu, spec.profile),
        traits=_OWN_WAYS.get((spec.trainer or "", backend), TRAITS[backend]),
        is_past=spec.path is None,
    )
