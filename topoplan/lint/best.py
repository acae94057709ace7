"""The best plan for a configuration's job over all backends of its trainer, and changes that would make a job fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from topoplan.errors import InputError
from topoplan.layout.layout import keys_of
from topoplan.lint.translate import Translation
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.rank import TIE, ranked
from topoplan.planner.what_if import Search
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import USUAL_LORA_DROPOUT
from topoplan.specs.spec import Spec
from topoplan.trainers.recognizers import trainer_of
from topoplan.trainers.registry import stopped_by
from topoplan.units import GIB

NOTHING_FITS = "no layout of this job fits"
_MOST_HOST_BYTES = 64 * 2**40
"""Stands for an unlimited host memory."""
_MOST_NODES = 16
"""The largest number of machines tried when searching for enough GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Results of the searches for the best plan."""

    plan: Plan | None = None
    own: Plan | None = None
    """The best plan of the configuration's own backend."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def nearest(self) -> Plan | None:
        """The plan closest to the configuration: of its own backend if there is one."""
        return self.own or self.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """A change of the machine or the job that makes the job fit."""

    change: str
    plan: Plan


def backends_of(translation: Translation) -> tuple[str, ...]:
    """Return the configuration's own backend, then the others of its trainer."""
    own = translation.layout.backend
    return tuple(dict.fromkeys((own, *trainer_of(translation.configuration).backends)))


def best_of(
    translation: Translation, search: Search, spec: Spec | None = None, *, backends: Sequence[str] = ()
) -> Best:
    """Return the best plan of a translation's job or another `spec`, over the trainer's or the given backends."""
    spec = spec or translation.spec
    layout, cluster = translation.layout, spec.cluster
    offloads = layout.offload_optimizer or layout.offload or layout.optimizer_offload_fraction
    if cluster.host_memory_bytes is None and offloads:
        # Offload is searched only if host memory is stated; a configuration that offloads is compared with plans that
        # do too.
        cluster = replace(cluster, host_memory_bytes=_MOST_HOST_BYTES)
    found: dict[str, Plan] = {}
    reason = ""
    for backend, pinned in _pinned_specs(translation, spec, backends or backends_of(translation)):
        if backend in found:
            continue
        try:
            whose = _trainer(translation, backend)
            wide = replace(any_samples(pinned), cluster=cluster, trainer=whose)
            plans = search(wide).plans
            if plans and stopped_by(wide, plans[0].layout, plans[0].trainer):
                plans = search(replace(wide, avoids_faults=True)).plans
            if plans:
                # Predict again, because a search lists no more stages than it needs.
                found[backend] = predict(replace(pinned, path=None), plans[0].layout)
        except InputError as error:
            reason = reason or (error.what if backend == layout.backend else "")
    if not found:
        return Best(reason=reason or NOTHING_FITS)
    best, own = ranked(list(found.values()))[0], found.get(layout.backend)
    if own is not None and own.tokens_per_s_per_gpu >= best.tokens_per_s_per_gpu * (1.0 - TIE):
        best = own  # an equally fast plan of another backend is no reason to switch
    return Best(plan=best, own=own)


def _trainer(translation: Translation, backend: str) -> str | None:
    """Return the trainer that must run the plans of a backend; None for any, if the configuration's own cannot."""
    own = trainer_of(translation.configuration)
    return None if translation.spec.job.stage in own.unwritten or own.training_path_for(backend) is None else own.name


def any_samples(spec: Spec) -> Spec:
    """Return the spec without a number of samples: too few of them should not limit layouts, and are reported apart."""
    return replace(spec, job=replace(spec.job, samples=None))


def _pinned_specs(translation: Translation, spec: Spec, backends: Sequence[str]) -> Iterator[tuple[str, Spec]]:
    """Yield the spec for a search of each backend, then those for where this one has no plan.

    A backend may refuse `pure_bf16`: DeepSpeed's optimizer keeps fp32 weights whatever dtype was loaded. Liger's
    kernels are one key of the file, which often saves more memory than any other, but take a package that may be
    missing.
    """
    for backend in backends:
        pinned = _pinned(translation, spec, backend)
        yield backend, pinned
        if pinned.job.pure_bf16:
            yield backend, replace(pinned, job=replace(pinned.job, pure_bf16=False))
        if backend == translation.layout.backend and pinned.job.pin.get("fused_linear_cross_entropy") is False:
            pin = {**pinned.job.pin, "fused_linear_cross_entropy": True}
            yield backend, replace(pinned, job=replace(pinned.job, pin=pin))


def _pinned(translation: Translation, spec: Spec, backend: str) -> Spec:
    """Return the spec for a search of one backend, pinning what the file sets and its trainer cannot change."""
    job, own = spec.job, translation.layout
    if "fused_linear_cross_entropy" not in keys_of(backend):
        return replace(spec, job=replace(job, pin={**job.pin, "backend": backend}))
    pin = {
        "backend": backend,
        "sharding": "full",  # no trainer that is read here writes another value
        "fused_linear_cross_entropy": own.fused_linear_cross_entropy,
    }
    if _trainer(translation, backend) is None or all(row.part != "ulysses" for row in translation.codec.rows.values()):
        pin["ulysses"] = 1
    return replace(spec, job=replace(job, pin=pin))


# What would fit ------------------------------------------------------------------------------------------------------


def ways_to_fit(translation: Translation, cluster: Cluster, search: Search) -> Iterator[FittingChange]:
    """Search for changes that make a job fit: more host memory, adapters instead of full weights, more GPUs."""
    spec = translation.spec
    part, job = spec.cluster, spec.job
    with_host = replace(spec, cluster=replace(part, host_memory_bytes=_MOST_HOST_BYTES))
    if plan := best_of(translation, search, with_host).nearest:
        yield FittingChange(
            change=f"with {ceil(plan.memory.host_bytes / GIB):,} GiB of host memory per node", plan=plan
        )
    if job.finetuning in ("full", "freeze"):
        with_adapters = replace(
            spec, job=replace(job, finetuning="lora", lora_dropout=USUAL_LORA_DROPOUT, pure_bf16=False)
        )
        if plan := best_of(translation, search, with_adapters).nearest:
            yield FittingChange(change=f"with LoRA of rank {job.lora_rank or 8}", plan=plan)
    yield from _on_more_gpus(translation, cluster, search)


def _on_more_gpus(translation: Translation, cluster: Cluster, search: Search) -> Iterator[FittingChange]:
    """Yield the fewest GPUs on which a layout fits at the same batch per GPU, first of the configuration's backend."""
    spec = translation.spec
    each = spec.job.global_batch_size // max(1, translation.layout.dp)
    own, *others = backends_of(translation)
    for backends in ((own,), tuple(others)):
        for bigger in _larger(cluster, spec.cluster):
            dp = bigger.world_size * translation.layout.dp // spec.cluster.world_size
            job = replace(spec.job, global_batch_size=each * max(1, dp))
            found = best_of(translation, search, replace(spec, cluster=bigger, job=job), backends=backends).plan
            if found is not None:
                gpus = f"{bigger.world_size} of these GPUs ({bigger.nodes} x {bigger.gpus_per_node})"
                yield FittingChange(change=f"on {gpus}", plan=found)
                return


def _larger(cluster: Cluster, part: Cluster) -> Iterator[Cluster]:
    """Yield larger clusters: more GPUs per machine, then more machines of the cluster's kind."""
    whole = max(cluster.gpus_per_node, 8)
    if part.nodes == 1:
        for gpus in range(part.gpus_per_node + 1, whole + 1):
            domain = 1 if not part.nvlink_bytes_per_s else gpus
            yield replace(part, gpus_per_node=gpus, nvlink_domain_gpus=domain)
    for nodes in range(max(2, part.nodes + 1), _MOST_NODES + 1):
        domain = 1 if not part.nvlink_bytes_per_s else whole
        yield replace(part, nodes=nodes, gpus_per_node=whole, nvlink_domain_gpus=domain, hosts=())


def sentence(ways: Sequence[FittingChange]) -> str:
    """Return the ways to fit as a sentence."""
    words = []
    for way in ways:
        host = f" and {way.plan.memory.host_bytes / GIB:,.0f} GiB of host memory" if way.plan.memory.host_bytes else ""
        beside = "" if "host memory" in way.change else host
        words.append(
            f"{way.change}: {way.plan.id} ({way.plan.memory.device_bytes / GIB:.1f} GiB{beside},"
            f" {way.plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU)"
        )
    return "it would fit " + ", or ".join(words) if words else ""
