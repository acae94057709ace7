"""Findings on a prediction: whether it fits, what would fit, and how much faster the best plan is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from shlex import join
from typing import Any

from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.lint.best import NOTHING_FITS, sentence
from topoplan.lint.offload import job_memory_findings, offload_findings
from topoplan.lint.prediction import RULES, Prediction
from topoplan.lint.translate import Translation
from topoplan.planner.explain import memory_rejection, speed_words
from topoplan.planner.plan import Memory, Plan
from topoplan.planner.predict import memory_of
from topoplan.planner.rank import tags_of
from topoplan.reading.finding import Finding
from topoplan.reading.processes import Processes
from topoplan.reading.values import Keys
from topoplan.specs.cluster import Cluster
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.deepspeed_alone import gpus_of
from topoplan.trainers.layout_keys import key_line
from topoplan.units import GIB

MUCH_FASTER = 0.15
"""Throughput gain of the best plan over the configuration, as a fraction, from which it is worth a warning."""
A_LITTLE_FASTER = 0.03
"""Gain below which nothing is reported; the predicted figures show it anyway."""


def unnamed(spec: Spec) -> Spec:
    """Return the spec without a path: one that was not read from a file need not state host_memory to be predicted."""
    return replace(spec, path=None)


def process_findings(processes: Processes | None, cluster: Cluster) -> Iterator[Finding]:
    """Report a command that starts a different number of processes than the cluster has GPUs."""
    if processes is None:
        return
    nodes, gpus = processes.nodes or cluster.nodes, processes.gpus_per_node or cluster.gpus_per_node
    if (nodes, gpus) == (cluster.nodes, cluster.gpus_per_node):
        return
    too_many = nodes > cluster.nodes or gpus > cluster.gpus_per_node
    alone = cluster.nodes == 1
    yield RULES["launch-other-cluster" if too_many else "launch-other-cluster.idle"].found(
        processes.launch.part,
        processes.line,
        words=processes.words,
        cluster=cluster.name,
        nodes=cluster.nodes,
        gpus=cluster.gpus_per_node,
        counted="1 node" if alone else f"{cluster.nodes} nodes",
        each="" if alone else " each",
    )


def batch_finding(translation: Translation) -> Iterator[Finding]:
    """Report a lone DeepSpeed file for another number of GPUs; with a command, `rules/deepspeed.py` reports it."""
    configuration, world = translation.configuration, translation.spec.cluster.world_size
    gpus = gpus_of(Keys(configuration, {})) if configuration.trainer == "deepspeed" else None
    if gpus is None or gpus == world:
        return
    batch, cluster = translation.spec.job.global_batch_size, translation.spec.cluster.name
    said: dict[str, Any] = {"gpus": gpus, "cluster": cluster, "world": world, "batch": batch}
    yield RULES["deepspeed-batch-of-gpus"].at(configuration, "train_batch_size", **said)


def samples_finding(translation: Translation) -> Iterator[Finding]:
    """Report that there are fewer samples than a step takes."""
    job = translation.spec.job
    micro_batches = translation.layout.micro_batch_size * translation.layout.dp
    if job.samples is None or not micro_batches <= job.samples < job.global_batch_size:
        return  # even fewer break the rule on the batch
    rule, batch = RULES["samples-below-batch"], job.global_batch_size
    yield rule.at(translation.configuration, "max_samples", samples=job.samples, batch=batch)


def prediction_findings(prediction: Prediction) -> Iterator[Finding]:
    """Report whether a configuration fits, and what the best plan gains."""
    translation, plan, best = prediction.translation, prediction.plan, prediction.best
    if translation is None:
        return
    is_over = plan is not None and plan.memory.excess_bytes > 0.0
    if prediction.no_best and not is_over:
        yield RULES["plan-nothing-fits"].at(
            translation.configuration,
            None,
            level="note" if plan and plan.fits else "warning",
            gpus=_gpus(translation.spec),
            why=prediction.no_best,
            remedy=sentence(prediction.fixes),
        )
    if plan is None:
        return
    spec = translation.spec
    yield from offload_findings(translation, plan)
    yield from job_memory_findings(translation, plan)
    if not plan.fits:
        yield from misfit(prediction)
        return
    faster = (prediction.speedup or 1.0) - 1.0
    if best is not None and faster >= A_LITTLE_FASTER:
        instead = "with other switches" if best.id == plan.id else f"instead of {plan.id}"
        yield RULES["plan-slower"].at(
            translation.configuration,
            None,
            level="warning" if faster >= MUCH_FASTER and translation.bundle is None else "note",
            what=f"the best plan for this job on these GPUs is {speed_words(1.0 / (1.0 + faster))}",
            why=f"{_named(best, plan.layout)} {instead}, with the same global batch of"
            f" {spec.job.global_batch_size}{_of_own_backend(prediction)}{_risks(prediction, best)}",
            remedy=towards_best(prediction),
        )


def _named(plan: Plan, layout: Layout) -> str:
    """Return a plan's id, with its backend if that differs from the layout's and ids of its engine do not name it."""
    backend = plan.layout.backend
    says_it = backend == layout.backend or engine_of(backend).ids_name_backend
    return plan.id if says_it else f"{plan.id} (backend {backend})"


def _of_own_backend(prediction: Prediction) -> str:
    """Return what the best plan of the configuration's backend gains, if the overall best plan uses another backend."""
    plan, own = prediction.plan, prediction.best_of_backend
    if plan is None or own is None or own == prediction.best:
        return ""
    gain = own.tokens_per_s_per_gpu / plan.tokens_per_s_per_gpu - 1.0
    if gain < A_LITTLE_FASTER:
        return f"; with {own.layout.backend} none is faster than this one"
    return f"; the best with {own.layout.backend} is {own.id}, {gain:.0%} faster"


def misfit(prediction: Prediction) -> Iterator[Finding]:
    """Report a plan that exceeds the card's memory: by how much, and what would fit."""
    translation, plan = prediction.translation, prediction.plan
    if translation is None or plan is None or plan.memory.excess_bytes <= 0.0:
        return  # host memory is the problem, which a separate finding reports
    spec, layout = translation.spec, plan.layout
    out = memory_rejection(unnamed(spec), layout)
    length = None if spec.job.packs or spec.job.lengths is not None else _longest_that_fits(spec, layout)
    least = plan.memory if length is None else _memory_at(spec, layout, _shortest(layout))
    is_close = least.band_bytes[0] <= least.capacity_bytes
    above = f" above {length:,} tokens per sample" if length else ""
    at_length = f"with {spec.job.seq_len:,} " if length else ""
    lengths = ", and nothing says how long the samples are" if length else ""
    target = prediction.best_of_backend or prediction.best
    if target is None:
        nothing = "nothing else fits" if prediction.no_best == NOTHING_FITS else prediction.no_best
        as_is = "" if spec.cluster.host_memory_bytes else ", whose spec states no host_memory to offload to"
        remedies = [f"{nothing} on these GPUs{as_is}", sentence(prediction.fixes)]
    else:
        way = f"{towards_best(prediction)}{_risks(prediction, target)}"
        remedies = [out.fix, f"{_named(target, layout)} fits on these GPUs: {way}"]
    yield RULES["plan-does-not-fit"].found(
        translation.configuration.part,
        key_line(translation.configuration, ("deepspeed", "fsdp")),
        level="warning" if is_close else "error",
        what=f"{'may not fit' if is_close else 'does not fit'}{above}: {at_length}{out.reason}",
        why=f"predicted for {plan.id} of {spec.model.name} on {_gpus(spec)}: {_parts(plan)}{lengths}",
        remedy="; ".join(filter(None, remedies)),
    )


def _shortest(layout: Layout) -> int:
    """Return the length in tokens of the shortest sample that the ranks can split."""
    return 2 * layout.cp * layout.tp * layout.ulysses


def _memory_at(spec: Spec, layout: Layout, seq_len: int) -> Memory:
    return memory_of(case_of(replace(spec, job=replace(spec.job, seq_len=seq_len)), layout.backend), layout)


def _longest_that_fits(spec: Spec, layout: Layout) -> int:
    """Return the longest sample length in tokens that fits, given that seq_len does not; 0 if none does."""
    unit = _shortest(layout)
    longer = range(1, spec.job.seq_len // unit + 1)
    return unit * bisect_left(longer, True, key=lambda units: _memory_at(spec, layout, units * unit).excess_bytes > 0.0)


def _gpus(spec: Spec) -> str:
    count, name = spec.cluster.world_size, spec.cluster.name
    return f"{count} GPU{'' if count == 1 else 's'} of {name}"


def _parts(plan: Plan) -> str:
    """Return `56.9 GiB weights, 11.4 GiB gradients, 68.2 GiB optimizer, 9.6 GiB activations, buffers and context`."""
    stage = max(plan.memory.by_stage, key=lambda one: one.allocated_bytes)
    states = {name: stage.parts_bytes.get(name, 0.0) for name in ("weights", "gradients", "optimizer")}
    rest = plan.memory.device_bytes - sum(states.values())
    rows = [f"{size / GIB:.1f} GiB {name}" for name, size in states.items() if size]
    return ", ".join([*rows, f"{rest / GIB:.1f} GiB activations, buffers and context"])


def _risks(prediction: Prediction, plan: Plan) -> str:
    """Return what may go wrong with a better plan, for readers who only see the findings: its tags and caveats."""
    tags = tags_of(plan)
    return "; ".join((f"; its risks: {', '.join(tags)}", *prediction.new_caveats(plan))) if tags else ""


def towards_best(prediction: Prediction) -> str:
    """Return how to come to the best plan: the changes of keys as a sentence or, for a bundle, whose files are all made
    for its plan, the commands that write them anew."""
    plan, own, best = prediction.plan, prediction.best_of_backend, prediction.best
    bundle = prediction.translation.bundle if prediction.translation else None
    if bundle is not None and best is not None:
        spec = join(["topoplan", "init", "--from", str(bundle), "-o", "spec.yaml"])
        files = join(["topoplan", "generate", "spec.yaml", "--backend", best.layout.backend, "--plan", best.id])
        return f"`{spec}`, then `{files}`"
    is_gain = own is not None and (
        plan is None or not plan.fits or own.tokens_per_s_per_gpu > plan.tokens_per_s_per_gpu * (1.0 + A_LITTLE_FASTER)
    )
    remedies = []
    if own is not None and (is_gain or own == best):
        put = [change for change in prediction.changes if change.best is not None]
        halves = (
            ("set", [f"{one.key}: {_yaml(one.best)}" for one in put if not one.key.isupper()]),
            ("export", [f"{one.key}={one.best}" for one in put if one.key.isupper()]),
            ("remove", [change.key for change in prediction.changes if change.best is None]),
        )
        remedies.append(" and ".join(f"{word} {', '.join(keys)}" for word, keys in halves if keys))
    if best is not None and own != best:
        words = f"`topoplan generate --pin backend={best.layout.backend}`, with a spec of this model and job,"
        remedies.append(f"{words} writes the files of {best.id}")
    return "; ".join(filter(None, remedies))


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
