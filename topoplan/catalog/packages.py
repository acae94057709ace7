"""The Python packages of trainers: their names for pip and for `import`, how to install them, and the versions of
LLaMA-Factory covered by the key lists.

Names alone are misleading: the modules `swift`, `megatron` and `mcore_adapter` have unrelated namesakes on PyPI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from topoplan.catalog import key_list

PYTHON = "python"
"""Name under which the Python version is listed beside the package versions."""


PYTHONS = ">=3.9"
"""Python versions that any trainer supports (python_requires of transformers 4.55, the oldest version that one
accepts)."""


class Package(NamedTuple):
    """One package."""

    name: str
    """Name as pip lists it, with hyphens: `megatron-core`."""
    module: str
    """Module that programs import: `megatron.core`."""
    source: str = ""
    """What to pass to pip if the name alone installs something else or is not enough."""
    options: str = ""
    """Further options of `pip install`."""
    python: tuple[tuple[str, str], ...] = ()
    """(versions of the package, Requires-Python of these versions), both as pip writes them."""

    def pythons(self, version: str) -> list[str]:
        """Return the Python versions that a version of the package requires, as pip writes them; empty if unknown."""
        return [needed for versions, needed in self.python if is_version(version) and allows(versions, version)]


_PACKAGES = (
    Package(name="torch", module="torch"),
    Package(name="transformers", module="transformers", python=((">=5,<5.20", ">=3.10"), (">=5.20", ">=3.11"))),
    Package(name="accelerate", module="accelerate"),
    Package(name="peft", module="peft"),
    Package(name="llamafactory", module="llamafactory", python=((">=0.9.5", ">=3.11"),)),
    Package(name="megatron-core", module="megatron.core", python=((">=0.17", ">=3.12"),)),
    Package(
        name="transformer-engine",
        module="transformer_engine",
        source="transformer_engine[pytorch]",
        options="--no-build-isolation",
    ),
    Package(name="deepspeed", module="deepspeed"),
    Package(name="bitsandbytes", module="bitsandbytes"),
    Package(name="liger-kernel", module="liger_kernel"),
    Package(name="flash-attn", module="flash_attn", options="--no-build-isolation"),
    Package(name="ms-swift", module="swift", python=((">=3", ">=3.9"),)),
    Package(name="mcore-bridge", module="mcore_bridge"),
    Package(name="pyyaml", module="yaml"),
    Package(name="trinity-rft", module="trinity", python=((">=0.1", ">=3.10,<3.13"),)),
    Package(name="verl", module="verl"),
    Package(name="vllm", module="vllm"),
    Package(name="ray", module="ray"),
    Package(name="omegaconf", module="omegaconf"),
)


@cache
def packages() -> dict[str, Package]:
    """Return all packages by name."""
    commit = releases()[0].mcore_adapter_commit
    adapter = Package(
        name="mcore_adapter",  # pip lists it as its makers write it
        module="mcore_adapter",
        source=f"git+https://github.com/alibaba/ROLL.git@{commit}#subdirectory=mcore_adapter",
    )
    return {one.name: one for one in (*_PACKAGES, adapter)}


def release(version: str) -> Version:
    """Return the part of a version that counts in comparisons: `2.12.0a0+nv25` counts as the 2.12 it was built from.

    Raises packaging.version.InvalidVersion if `version` is not a version.
    """
    return Version(Version(version).base_version)


def is_version(text: object) -> bool:
    """Return whether a value is the text of a version."""
    try:
        return bool(release(text))  # type: ignore[arg-type]
    except (InvalidVersion, TypeError):
        return False


@cache
def allows(versions: str, version: str) -> bool:
    """Return whether a version satisfies `versions`, as pip writes them; text that is not a version does."""
    return not is_version(version) or SpecifierSet(versions).contains(release(version), prereleases=True)


def narrowed(bounds: Iterable[str]) -> str:
    """Return several bounds as one without redundant clauses: `>=0.15,<0.19` and `>=0.18` give `>=0.18,<0.19`."""
    clauses = {clause for bound in bounds for clause in bound.split(",") if clause}
    for operator, pick in ((">=", max), ("<", min)):
        same = [clause for clause in clauses if re.fullmatch(rf"{operator}[0-9].*", clause)]
        if same:
            keep = pick(same, key=lambda clause: Version(clause.lstrip("<>=")))
            clauses -= set(same) - {keep}
    order = {">=": 0, "==": 1, "<": 2, "<=": 3, "!=": 4}
    return ",".join(sorted(clauses, key=lambda clause: (order[re.match("[<>=!]+", clause)[0]], clause)))  # type: ignore[index]


def in_words(versions: str) -> str:
    """Return bounds in words: `below 0.18`, `from 0.15.3 to 0.16.1`."""
    words = {">=": "{} and newer", "<": "below {}", "==": "{}", "<=": "up to {}", "!=": "but not {}"}
    clauses = [re.fullmatch("([<>=!]+)(.*)", clause) for clause in versions.split(",")]
    pairs = [(match[1], match[2]) for match in clauses if match]
    if [operator for operator, _ in pairs] == [">=", "<="]:
        return f"from {pairs[0][1]} to {pairs[1][1]}"
    return ", ".join(words[operator].format(version) for operator, version in pairs)


def pip_words(package: Package, versions: str) -> str:
    """Return what to pass to `pip install` for a package, quoted for a shell: `'megatron-core>=0.18,<0.19'`."""
    if package.source.startswith("git+"):
        return f"'{package.source}'"
    text = f"{package.source or package.name}{versions}"
    return f"'{text}'" if re.search(r"[<>!\[]", text) else text


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
