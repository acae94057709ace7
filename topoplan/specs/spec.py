"""What a search starts from."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A cluster, a model and a job."""

    cluster: Cluster
    model: Model
    job: Job
    profile: OwnProfile | None = None
    """Constants of the GPU that take the place of the catalog's."""
    backends: tuple[str, ...] = ()
    """What a search looks at; empty: what is usual for the job."""
    trainer: str | None = None
    """The trainer that has to be able to run what is found; None: any that files are written for."""
    data_note: str = ""
    """Why the lengths of the samples of the job's data sets were not read, where they should be here."""
    path: str | None = None
    """The spec file as it was named, for messages."""
