"""The NCCL communicators of a rank, and the device memory of each. Engines say which communicators there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from topoplan.network.nccl_buffers import Use, buffer_bytes
from topoplan.network.placement import Group, span
from topoplan.network.topology import local_ranks
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile


class UsedGroup(NamedTuple):
    """A group in which a rank communicates, and what is sent in it."""

    name: str
    group: Group
    uses: frozenset[Use]


class Communicator(NamedTuple):
    """A communicator of a rank with its memory."""

    name: str
    size: int
    """Number of ranks."""
    device_bytes: int
    """Bytes of buffers and tables, on the rank that needs the most."""


def communicators_of(groups: Iterable[UsedGroup], cluster: Cluster, profile: Profile) -> tuple[Communicator, ...]:
    """Return the communicators with their memory."""
    domain = local_ranks(cluster)
    return tuple(
        Communicator(
            one.name, one.group.size, buffer_bytes(one.group.size, span(one.group, domain), one.uses, cluster, profile)
        )
        for one in groups
    )
