"""The versions of LLaMA-Factory that the key lists know, and what each takes of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from topoplan.catalog import key_list


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version of LLaMA-Factory whose keys are known."""

    version: str
    """As the package gives it, which is no release's where the state of a branch is meant: 0.9.6.dev0."""
    name: str
    """For people: 0.9.5, main of August 2026."""
    transformers: str
    """The versions of transformers that it takes, as pip writes them; it stops at others (`extras/misc.py`,
    check_dependencies)."""
    megatron_core: str
    """The version that its Megatron path was tried with; empty where only its keys are known."""
    mcore_adapter_commit: str
    """The same of mcore_adapter, in alibaba/ROLL."""


@cache
def releases() -> tuple[Release, ...]:
    """All of them, oldest first; the first is what bundles are written for."""
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
