"""One bed for all tests of a process. A test that harms it heals it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.bed import Bed, Machine, probe

MACHINES = (
    Machine(name="alpha"),
    Machine(name="beta"),
    Machine(name="bare", sftp=False),
    Machine(name="few", options=("MaxStartups 2:100:2",)),
    Machine(name="strict", options=("MaxAuthTries 2",)),
    Machine(name="jump", networks=("outer", "inner")),
    Machine(name="gate", networks=("inner", "deep")),
    Machine(name="inside", networks=("inner",)),
    Machine(name="inside2", networks=("inner",)),
    Machine(name="far", networks=("deep",)),
    Machine(name="closed", options=("AllowTcpForwarding no",)),
)


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Machines that are reached as real ones are."""
    kind, reason = probe()
    if kind is None:
        pytest.skip(f"no sshd to log in to: {reason}")
    with Bed(tmp_path_factory.mktemp("bed"), MACHINES) as made:
        yield made


@pytest.fixture
def cables(bed: Bed) -> Bed:
    """The bed, where it has networks that can be cut."""
    if bed.kind != "namespaces":
        pytest.skip(f"no network namespaces here: {probe()[1]}")
    return bed
