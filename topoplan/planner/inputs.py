"""A spec from its JSON form: the inverse of `topoplan.planner.view.spec_to_dict`.

Keys that spec files have too are read as in a spec file. Computed figures are read back as written, including whole
numbers for floats, so that they are written the same way again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from topoplan.errors import SpecError
from topoplan.planner.view import length_summary
from topoplan.specs.blocks import Block, as_base
from topoplan.specs.cluster import MOST_GPUS, Cluster
from topoplan.specs.forms import JobForm
from topoplan.specs.job import Job
from topoplan.specs.kinds import KEEP_INTEGERS, Checked, Count
from topoplan.specs.lengths import Lengths, histogram, histogram_of_line
from topoplan.specs.mistakes import check_form
from topoplan.specs.model import MOST_LAYERS, Layer, Model
from topoplan.specs.profile import OwnProfile
from topoplan.specs.profile_form import ProfileForm
from topoplan.specs.source import KeyPath, Source, dotted
from topoplan.specs.spec import Spec
from topoplan.units import shown


def _pairs(line: Any) -> list[tuple[int, int]]:
    if not isinstance(line, str):
        raise SpecError(f"{shown(line)} is not text", expected="expected tokens:count pairs, such as 512:1000")
    return list(histogram_of_line(line))


def _columns(block: Any) -> tuple[tuple[str, str], ...]:
    is_block = isinstance(block, Mapping) and all(isinstance(name, str) for name in block.values())
    if not is_block:
        raise SpecError(f"{shown(block)} is not a block of columns", expected="expected role: name")
    return tuple((str(role), name) for role, name in block.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers(Layer):
    """A run of equal layers."""

    count: Annotated[int, Count(1, MOST_LAYERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model(Block, Model):
    layers: tuple[_Layers, ...]
    num_layers: int | None = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths(Block, Lengths):
    counts: tuple[Annotated[list[tuple[int, int]], Checked(_pairs, {})], ...] = ()  # type: ignore[assignment]
    columns: Annotated[tuple[tuple[str, str], ...], Checked(_columns, {})] = ()
    mean: Any = None
    median: Any = None
    p99: Any = None
    longest: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(JobForm):
    lengths: _Lengths | None = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs(Block):
    """The structure that `spec_to_dict` writes."""

    cluster: Cluster
    model: _Model
    job: _Job
    profile: OwnProfile | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of the spec in a document."""

    source: Source
    path: KeyPath

    def line(self, path: KeyPath) -> str:
        """Return `file:line` of a value of the spec."""
        return self.source.place((*self.path, *path))

    def refuse(self, path: KeyPath, what: str, expected: str = "") -> SpecError:
        """Return the error for a value of the spec."""
        return SpecError(f"{dotted((*self.path, *path))}: {what}", where=self.line(path), expected=expected)

    def check_derived(self, path: KeyPath, said: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
        """Raise SpecError for a key that contradicts the value derived from its block; None counts as not stated."""
        for key, value in derived.items():
            if said[key] not in (None, value):
                what = f"{shown(said[key])} does not agree with its block"
                raise self.refuse((*path, key), what, f"expected {shown(value)}")


def spec_from_dict(source: Source, path: KeyPath) -> Spec:
    """Return the spec whose `spec_to_dict`, with `whole`, is at `path` in a document.

    Raises SpecError with line and key for a wrong type, a missing or unknown key, and a value out of range.
    """
    data: Any = source.data
    for depth, key in enumerate(path):
        if not isinstance(data, Mapping) or key not in data:
            raise SpecError(f"`{dotted(path[: depth + 1])}` is missing", where=source.place(path[:depth]))
        data = data[str(key)]
    place = _Place(source, path)
    inputs = check_form(_Inputs, data, place.line, within=path, context=KEEP_INTEGERS)
    cluster = inputs.cluster
    if cluster.world_size > MOST_GPUS:
        raise place.refuse(("cluster", "nodes"), f"{cluster.world_size} GPUs", f"expected at most {MOST_GPUS}")
    return Spec(
        cluster=cluster, model=_model(inputs.model, place), job=_job(inputs.job, place), profile=_profile(inputs, place)
    )


def _model(form: _Model, place: _Place) -> Model:
    known: dict[Layer, Layer] = {}  # equal layers are one shared object
    layers: list[Layer] = []
    for run in form.layers:
        layer = as_base(Layer, run)
        layers += [known.setdefault(layer, layer)] * run.count
    if not 1 <= len(layers) <= MOST_LAYERS:
        raise place.refuse(("model", "layers"), f"{len(layers)} layers", f"expected 1 to {MOST_LAYERS}")
    place.check_derived(("model",), {"num_layers": form.num_layers}, {"num_layers": len(layers)})
    return as_base(Model, form, layers=tuple(layers))


def _job(form: _Job, place: _Place) -> Job:
    lengths = None if form.lengths is None else _lengths(form.lengths, place)
    return as_base(Job, form, lengths=lengths, pin=form.pin.given() if form.pin else {})


def _lengths(form: _Lengths, place: _Place) -> Lengths:
    pairs = [pair for line in form.counts for pair in line]
    if not pairs:
        expected = "expected tokens:count pairs, which earlier versions left out: write the bundle again from its spec"
        raise place.refuse(("job", "lengths", "counts"), "is missing, or is an empty length histogram", expected)
    lengths = as_base(Lengths, form, counts=histogram(pairs))
    summary = length_summary(lengths)
    place.check_derived(("job", "lengths"), {key: getattr(form, key) for key in summary}, summary)
    return lengths


def _profile(inputs: _Inputs, place: _Place) -> OwnProfile | None:
    profile, gpu, at = inputs.profile, inputs.cluster.gpu, ("profile", "constants")
    if profile is None:
        return None
    if not profile.is_of(gpu):
        raise place.refuse(("profile", "gpu"), f"{profile.gpu}, and the cluster has {gpu.name}")
    constants = {"gpu": profile.gpu, **profile.constants}
    form = check_form(ProfileForm, constants, lambda inside: place.line((*at, *inside)), within=(*place.path, *at))
    return replace(profile, constants={key: value for key, value in form.given().items() if key != "gpu"})
