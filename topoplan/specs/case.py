"""What a prediction is about."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile, profile_of, slowest_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.specs.traits import Traits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A model that is trained on a cluster, with the constants of its GPU and the ways of a trainer.

    Compared and hashed by identity: a search makes one for each backend, and caches go by it.
    """

    model: Model
    cluster: Cluster
    job: Job
    profile: Profile
    traits: Traits
    is_past: bool = False
    """A run that happened is predicted: nobody has to say what its hosts have room for."""


def case_with(spec: Spec, traits: Traits) -> Case:
    """What is asked of a trainer with these ways: the spec, and the constants of the slowest of its GPUs."""
    return Case(
        model=spec.model,
        cluster=spec.cluster,
        job=spec.job,
        profile=slowest_of(profile_of(spec.cluster.gpu, spec.profile), spec.cluster.world_size),
        traits=traits,
        is_past=spec.path is None,
    )
