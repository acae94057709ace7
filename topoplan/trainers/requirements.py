"""What a run needs of the Python environment on its hosts: packages, their versions, and why.

A bundle's README, its node scripts, plan.json, preflight and the warnings of a plan all use this one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from topoplan.catalog.packages import PYTHON, Package, allows, in_words, narrowed, packages, pip_words
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import FAULTS, Fault


class Versions(NamedTuple):
    """The package versions that a trainer's files are written for."""

    title: str
    """The trainer's name as its makers spell it."""
    bounds: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Package -> versions in pip's syntax, and what is wrong with other versions."""
    tried: Callable[[], Mapping[str, tuple[str, ...]]] = dict
    """Package -> versions that the trainer supports, the default first; only packages with several are listed."""

    def bound(self, package: str) -> tuple[str, str]:
        """Return the entry of a package in `bounds`, empty strings if it has none."""
        return self.bounds.get(package, ("", ""))


class Requirement(NamedTuple):
    """One package that must be installed."""

    package: Package
    versions: str = ""
    """Versions, in pip's syntax, with which the run works as configured; empty if any version does."""
    why: str = ""
    """What happens with other versions."""
    installs: str = ""
    """Versions to pass to `pip install`, if narrower than `versions`."""
    avoids: tuple[str, ...] = ()
    """Names of the faults that narrowed the versions."""

    @property
    def pip_words(self) -> str:
        """The argument for `pip install`, quoted for a shell."""
        return pip_words(self.package, self.installs or self.versions)

    @property
    def remedy(self) -> str:
        """The command that installs the package, or the advice to use another Python."""
        if self.package.name == PYTHON:
            return f"make the environment with Python {in_words(self.versions)}"
        return " ".join(filter(None, ("pip install", self.package.options, self.pip_words)))


def requirements_of(
    spec: Spec, layout: Layout, trainer: Versions, wanted: Mapping[str, str]
) -> tuple[Requirement, ...]:
    """Return what a run of a layout needs: `wanted` (package -> versions to install), narrowed to avoid known faults.

    A fault that none of the trainer's supported versions is free of adds no requirement; `environment_warnings` reports
    it.
    """
    found, avoided = [], _avoided(spec, _met(spec, layout), trainer)
    for name, installs in wanted.items():
        faults = [fault for fault in avoided if fault.package == name]
        avoids = tuple(fault.name for fault in faults)
        bound, why = trainer.bound(name)
        versions = narrowed((bound, *(fault.cure for fault in faults)))
        found.append(
            Requirement(
                package=packages()[name],
                versions=versions,
                why=faults[0].text if faults else why,
                installs="" if faults else installs,
                avoids=avoids,
            )
        )
        for package_versions, python in packages()[name].python if faults else ():
            if allows(package_versions, _least(versions)):
                package = Package(name=PYTHON, module="")
                why = f"{name} {versions} needs it"
                found.insert(0, Requirement(package=package, versions=python, why=why, avoids=avoids))
    return tuple(found)


def install_commands(
    requirements: Iterable[Requirement], brought: Iterable[str] = (), also: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return commands that install the requirements in a working order, PyTorch first if its version matters.

    `brought` are packages that other requirements install as dependencies; `also` are optional packages with their
    versions. Packages that are built against PyTorch or come from a repository get a command of their own.
    """
    further = [
        Requirement(package=packages().get(name) or Package(name=name, module=""), installs=versions)
        for name, versions in also.items()
    ]
    first, together, alone = [], [], []
    for one in (*requirements, *further):
        if one.package.name == "torch":
            first += [one.remedy] if one.versions else []
        elif one.package.options or one.package.source.startswith("git+"):
            alone.append(one.remedy)
        elif one.package.name not in (PYTHON, *brought):
            together.append(one.pip_words)
    return (*first, f"pip install {' '.join(together)}", *alone)


def environment_warnings(spec: Spec, layout: Layout, trainer: Versions | None) -> Iterator[str]:
    """Yield what a layout needs of the environment beyond the usual, and the faults that no environment can avoid.

    Without a trainer that can run the layout, packages may have any version.
    """
    is_written, trainer = trainer is not None, trainer or Versions(title="")
    met = _met(spec, layout)
    avoided = _avoided(spec, met, trainer)
    for fault in met:
        told = f"{fault.text} ({fault.source})"
        if fault in avoided:
            stated = spec.cluster.software.get(fault.package)
            if stated is None and fault.package not in trainer.tried() and is_written:
                continue  # every bundle of this trainer requires it already
            if stated is None or not allows(fault.cure, stated):
                # By `software` of the spec or, in `check`, by a `pip install` or a lock file.
                have = f"; the hosts have {stated}" if stated else ""
                versions = narrowed((trainer.bound(fault.package)[0], fault.cure))
                python = f", on Python {needed}" if (needed := _python_needed(fault)) else ""
                yield f"{fault.when} needs {fault.package} {versions}{python}: {told}{have}"
        elif not _free(spec, fault, trainer, avoided):
            yield f"{fault.when}: {told}{_reason(spec, fault, trainer)}"


def stopping_faults(spec: Spec, layout: Layout, trainer: Versions | None) -> Iterator[Fault]:
    """Yield the faults that stop a layout in the environment of the hosts, as far as `software` of the spec states it.

    Without a trainer that can run the layout, packages may have any version.
    """
    trainer = trainer or Versions(title="")
    for fault in _met(spec, layout):
        if fault.level == "stops" and fault.cure:
            stated = spec.cluster.software.get(fault.package)
            if not (_curable(spec, fault, trainer) if stated is None else allows(fault.cure, stated)):
                yield fault


def _met(spec: Spec, layout: Layout) -> list[Fault]:
    """Return the faults that a layout triggers by itself, whatever else the environment holds."""
    return [fault for fault in FAULTS if fault.is_triggered(spec, layout, {})]


def _avoided(spec: Spec, met: Iterable[Fault], trainer: Versions) -> list[Fault]:
    """Return the faults that would stop a run and that a suitable environment avoids."""
    return [fault for fault in met if fault.level == "stops" and fault.cure and _curable(spec, fault, trainer)]


def _curable(spec: Spec, fault: Fault, trainer: Versions) -> bool:
    candidates, python = trainer.tried().get(fault.package), spec.cluster.software.get(PYTHON)
    of_pythons = packages()[fault.package].pythons
    return candidates is None or any(
        allows(fault.cure, version)
        and (python is None or all(allows(wanted, python) for wanted in of_pythons(version)))
        for version in candidates
    )


def _free(spec: Spec, fault: Fault, trainer: Versions, avoided: Iterable[Fault]) -> bool:
    if not fault.versions:
        return False
    if stated := spec.cluster.software.get(fault.package):
        return not allows(fault.versions, stated)
    cures = [other.cure for other in avoided if other.package == fault.package]
    candidates = [
        version for version in trainer.tried().get(fault.package, ()) if all(allows(cure, version) for cure in cures)
    ]
    return bool(candidates) and not allows(fault.versions, candidates[0])


def _reason(spec: Spec, fault: Fault, trainer: Versions) -> str:
    """Explain why a fault that other versions are free of cannot be avoided."""
    if fault.level != "stops":
        return ""
    tried = trainer.tried().get(fault.package, ())
    if any(allows(fault.cure, version) for version in tried):
        python = spec.cluster.software[PYTHON]
        needed = _python_needed(fault)
        return f"; {fault.package} {fault.cure} needs Python {needed}, and `software` of the spec has {python}"
    return f"; files for {trainer.title} are written for {fault.package} {tried[0]}" if tried else ""


def _python_needed(fault: Fault) -> str:
    """Return the Python version that a fault's cure needs, such as `3.12 or newer`; empty if any works."""
    needed = packages()[fault.package].pythons(_least(fault.cure))
    return in_words(needed[0]).replace(" and newer", " or newer") if needed else ""


def _least(versions: str) -> str:
    """Return the lowest version that bounds allow: 0.18 for `>=0.18,<0.19`; 0 if there is no lower bound."""
    return next((clause.lstrip(">=") for clause in versions.split(",") if clause.startswith(">=")), "0")
