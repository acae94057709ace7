"""The versions of LLaMA-Factory covered by the key lists, and the versions of other packages that each accepts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from topoplan.catalog import key_list


class Release(NamedTuple):
    """A version of LLaMA-Factory whose keys are known."""

    version: str
    """Version as the package reports it; for the state of a branch it is not a release's version: 0.9.6.dev0."""
    name: str
    """Display name: 0.9.5, main of August 2026."""
    transformers: str
    """Versions of transformers that it accepts, as pip writes them; it aborts with others (`extras/misc.py`,
    check_dependencies)."""
    megatron_core: str
    """Version of megatron-core that its Megatron path was tested with; empty if only its keys are known."""
    mcore_adapter_commit: str
    """Commit of mcore_adapter, in alibaba/ROLL, that its Megatron path was tested with; empty if only its keys are
    known."""


@cache
def releases() -> tuple[Release, ...]:
    """Return all releases, oldest first; bundles are written for the first one."""
    document = key_list("llamafactory")
    return tuple(_release(block) for block in (document["versions"], *document["newer"]))


def _release(block: Mapping[str, Any]) -> Release:
    oldest, newest = block["transformers"]
    clauses = (f">={oldest}", f"<={newest}", *(f"!={version}" for version in block.get("transformers_except", ())))
    version = block["llamafactory"]
    return Release(
        version=version,
        name=block.get("name", version),
        transformers=",".join(clauses),
        megatron_core=block.get("megatron_core", ""),
        mcore_adapter_commit=block.get("mcore_adapter_commit", ""),
    )
