"""The inputs of a prediction."""

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
    """A model trained on a cluster, with the constants of its GPU and the traits of a trainer.

    Compared and hashed by identity: a search creates one per backend, and caches are keyed by it.
    """

    model: Model
    cluster: Cluster
    job: Job
    profile: Profile
    traits: Traits
    is_past: bool = False
    """Whether a past run is being predicted, so that host memory need not be given."""


def case_with(spec: Spec, traits: Traits) -> Case:
    """Return the case of a spec and a trainer's traits, with the constants of the slowest of the cluster's GPUs."""
    return Case(
        model=spec.model,
        cluster=spec.cluster,
        job=spec.job,
        profile=slowest_of(profile_of(spec.cluster.gpu, spec.profile), spec.cluster.world_size),
        traits=traits,
        is_past=spec.path is None,
    )
