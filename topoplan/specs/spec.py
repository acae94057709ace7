"""The input of a search."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A cluster, a model and a job, with the options of a search."""

    cluster: Cluster
    model: Model
    job: Job
    profile: OwnProfile | None = None
    """GPU constants that replace the catalog's."""
    backends: tuple[str, ...] = ()
    """Backends to search; empty means the usual ones for the job."""
    trainer: str | None = None
    """The trainer that must support the plans; None means any that topoplan writes files for."""
    avoids_faults: bool = False
    """Whether layouts that a known fault of a package stops, in the versions that `software` of the cluster states, are
    refused; otherwise they have a caveat."""
    data_note: str = ""
    """Why the sample lengths of local data sets could not be read."""
    path: str | None = None
    """The spec file as it was named, for messages."""
