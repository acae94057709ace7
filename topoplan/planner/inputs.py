"""A spec from its JSON form: the inverse of `topoplan.planner.view.spec_to_dict`.

Everything comes back exactly as it was, whole numbers in the place of floats too, so that it is written alike again.
What a person may have changed is held to the same limits as a spec file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.errors import SpecError
from topoplan.planner.view import SUMMARY, length_summary
from topoplan.specs.cluster import MOST_GPUS, Cluster, Fabric, Host
from topoplan.specs.forms import Form, JobForm, SpecForm
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job
from topoplan.specs.layer_kinds import LAYER_KINDS
from topoplan.specs.lengths import Lengths, histogram, histogram_of_line
from topoplan.specs.model import LatentAttention, Layer, Model, VisionTower
from topoplan.specs.profile import OwnProfile
from topoplan.specs.profile_form import ProfileForm
from topoplan.specs.source import KeyPath, Source
from topoplan.specs.spec import Spec
from topoplan.specs.typed import Reader
from topoplan.units import shown

_MOST_LAYERS = 4096
_GPUS_OF_A_NODE = 144
_RATE = (0, 1e18)
_RANGES: Mapping[tuple[type, str], tuple[float, float]] = {
    (Host, "port"): (1, 65535),
    (Cluster, "nodes"): (1, MOST_GPUS),
    (Cluster, "gpus_per_node"): (1, _GPUS_OF_A_NODE),
    (Cluster, "nvlink_domain_gpus"): (1, MOST_GPUS),
    (Cluster, "nvlink_bytes_per_s"): _RATE,
    (Cluster, "margin"): (0, 0.5),
    (Gpu, "nvlink_bytes_per_s"): _RATE,
    (Fabric, "oversubscription"): (1, 1e6),
    (Fabric, "traffic_class"): (0, 255),
    (Fabric, "service_level"): (0, 15),
    (Job, "freeze_trainable_layers"): (-1000, 1000),
    (LatentAttention, "q_lora_rank"): (0, 2**31),
    (Model, "hidden_dropout"): (0, 1),
    (VisionTower, "layers"): (1, _MOST_LAYERS),
    (Job, "images_per_sequence"): (0, 10_000),
}
"""Where it is not above zero, or from zero where that is the default; without a most, some loops would not end."""
_CLUSTER_KEYS = (
    *("nodes", "gpus_per_node", "nics_per_node", "sockets", "cpu_cores", "env", "secrets", "software", "slurm"),
    "margin",
)
_FABRIC_KEYS = ("kind", "rails", "nodes_per_leaf", "traffic_class", "service_level", "topology_file")
"""Those that a spec file has too, in the same words and units."""


def spec_from_dict(source: Source, path: KeyPath) -> Spec:
    """The spec whose `spec_to_dict`, with `whole`, stands at `path` in a document.

    Raises SpecError with the line and the key for a wrong type, a missing or unknown key and a value out of its range.
    """
    reader = Reader(
        source,
        special={Spec: _spec, Model: _model, Job: _job, Cluster: _cluster, Lengths: _lengths, OwnProfile: _profile},
        ranges=_RANGES,
        kinds=LAYER_KINDS,
    )
    value: Any = source.data
    for depth, key in enumerate(path):
        block = reader.mapping(value, path[:depth])
        if key not in block:
            reader.missing(path[:depth], str(key))
        value = block[str(key)]
    return reader.read(Spec, value, path)


def _spec(reader: Reader, value: Any, path: KeyPath) -> Spec:
    data = reader.mapping(value, path)
    if "path" in data:  # the one field that is never written
        reader.unknown(path, "path", {})
    spec = reader.block(Spec, data, path)
    if spec.profile is not None and not spec.profile.is_of(spec.cluster.gpu):
        reader.fail((*path, "profile", "gpu"), f"{spec.profile.gpu}, and the cluster has {spec.cluster.gpu.name}")
    return spec


def _cluster(reader: Reader, value: Any, path: KeyPath) -> Cluster:
    cluster = reader.block(Cluster, value, path)
    gpu, fabric = cluster.gpu, cluster.fabric
    reader.check_form(
        SpecForm,
        {
            "gpu": {"name": gpu.name, "architecture": gpu.architecture, "sm_count": gpu.sm_count},
            "fabric": {key: getattr(fabric, key) for key in _FABRIC_KEYS},
            # An empty list is nothing given.
            "hosts": [{key: item for key, item in host.items() if item != []} for host in value.get("hosts", ())],
            **{key: value[key] for key in _CLUSTER_KEYS if key in value},
        },
        path,
    )
    return cluster


def _model(reader: Reader, value: Any, path: KeyPath) -> Model:
    data = dict(reader.mapping(value, path))
    known: dict[Layer, Layer] = {}  # equal layers are one shared object
    layers: list[Layer] = []
    if "layers" not in data:
        reader.missing(path, "layers")
    runs = reader.items(data["layers"], (*path, "layers"))
    for index, run in enumerate(runs):
        at = (*path, "layers", index)
        block = dict(reader.mapping(run, at))
        count = reader.whole(block.pop("count", None), (*at, "count"), _MOST_LAYERS)
        layer = reader.read(Layer, block, at)
        layers += [known.setdefault(layer, layer)] * count
    if not 1 <= len(layers) <= _MOST_LAYERS:
        reader.fail((*path, "layers"), f"{len(layers)} layers", expected=f"expected 1 to {_MOST_LAYERS}")
    reader.derived(data, path, {"num_layers": len(layers)})
    data.pop("num_layers", None)
    return reader.block(Model, data, path, read={"layers": tuple(layers)})


def _job(reader: Reader, value: Any, path: KeyPath) -> Job:
    job = reader.block(Job, value, path)
    form = reader.check_form(JobForm, {key: item for key, item in value.items() if key != "lengths"}, path)
    return replace(job, pin=_as_in_form(job.pin, form.pin))


def _lengths(reader: Reader, value: Any, path: KeyPath) -> Lengths:
    data = dict(reader.mapping(value, path))
    if "counts" not in data:
        remedy = "earlier versions kept a summary alone: write the bundle again from its spec"
        reader.missing(path, "counts", remedy=remedy)
    pairs: list[tuple[int, int]] = []
    for index, line in enumerate(reader.items(data["counts"], (*path, "counts"))):
        at = (*path, "counts", index)
        if not isinstance(line, str):
            reader.fail(at, f"{shown(line)} is not text", expected="expected tokens:count pairs, such as 512:1000")
        try:
            pairs += histogram_of_line(line)
        except SpecError as error:
            reader.fail(at, error.what, expected=error.expected)
    if not pairs:
        reader.fail((*path, "counts"), "is an empty length histogram")
    summary = {key: data.pop(key) for key in SUMMARY if key in data}
    lengths = reader.block(Lengths, data, path, read={"counts": histogram(pairs)})
    reader.derived(summary, path, length_summary(lengths))
    return lengths


def _profile(reader: Reader, value: Any, path: KeyPath) -> OwnProfile:
    profile = reader.block(OwnProfile, value, path)
    form = reader.check_form(ProfileForm, {"gpu": profile.gpu, **profile.constants}, path)
    return replace(profile, constants=_as_in_form(profile.constants, form))


def _as_in_form(given: Mapping[str, Any], form: Form | None) -> dict[str, Any]:
    """Values without a declared type, as a form has them: `70%` is a number, null is left out. Equal ones stay."""
    read = {} if form is None else form.given()
    return {key: value if value == read[key] else read[key] for key, value in given.items() if key in read}
