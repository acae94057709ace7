"""The memory and speed of exactly a configuration, and the best plan of its job on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from topoplan.backends.mca import check_job, check_layout, check_precision
from topoplan.check.job.keys_of_layout import trainer_keys
from topoplan.check.job.processes import Processes
from topoplan.check.job.translate import Translation, translate
from topoplan.check.read.setup import Configuration, Setup
from topoplan.check.rules.finding import Finding, Severity
from topoplan.check.rules.legality import broken_rules, legality_findings
from topoplan.check.zero_bound import Bound, bound_findings, bound_of
from topoplan.emit.trainer_keys import known_keys
from topoplan.emit.trainer_yaml import trainer_file
from topoplan.errors import InputError
from topoplan.layout.rules import facts_of
from topoplan.planner.explain import memory_rejection
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.what_if import Search
from topoplan.specs.cluster import Cluster
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec

MUCH_FASTER = 0.15
"""What the best plan gains over a configuration, as a share of its throughput, from which it is worth a warning."""
A_LITTLE_FASTER = 0.03
"""Below this nothing is said: the figures show it."""
_FOLLOWING = ("apply_rope_fusion", "moe_token_dispatcher_type")
"""Keys of the Megatron path that are right for one layout and wrong for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key that leads from a configuration to the best plan."""

    key: str
    now: Any
    """As the trainer has it; None where it is left out."""
    best: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of one configuration."""

    configuration: Configuration
    translation: Translation | None = None
    """None for a trainer that is not predicted, or a configuration that cannot be."""
    plan: Plan | None = None
    """None where the layout is illegal."""
    best: Plan | None = None
    """None where no layout fits."""
    bound: Bound | None = None
    """What other trainers need at the least."""
    reason: str = ""
    """Why there is no plan."""
    no_best: str = ""
    """Why there is no best plan."""

    @property
    def faster(self) -> float | None:
        """Throughput of the best plan over that of the configuration."""
        if self.plan is None or self.best is None:
            return None
        return self.best.tokens_per_s_per_gpu / self.plan.tokens_per_s_per_gpu

    @property
    def changes(self) -> tuple[Change, ...]:
        """The trainer's keys in which the best plan differs."""
        if self.translation is None or self.best is None:
            return ()
        spec, layout = self.translation.spec, self.translation.layout
        is_moe = facts_of(spec.model).is_moe
        now = trainer_keys(layout, is_moe=is_moe)
        best = trainer_keys(self.best.layout, is_moe=is_moe)
        if layout.backend == "mca":
            emitted = trainer_file(_any_samples(spec), self.best).values
            for key in _FOLLOWING:
                if emitted.get(key) not in (None, True):  # switching on what is off changes nothing that is predicted
                    now[key] = self.configuration.get(key, known_keys()[key].default)
                    best[key] = emitted[key]
        written = self.configuration.source.data
        return tuple(
            Change(key=key, now=now[key], best=best[key])
            for key in now
            if now[key] != best[key] and (best[key] is not None or key in written)
        )


def predicted(
    configuration: Configuration,
    setup: Setup,
    cluster: Cluster | None,
    *,
    search: Search,
    model: str | None = None,
    profile: OwnProfile | None = None,
) -> tuple[Prediction, tuple[Finding, ...]]:
    """The prediction of a whole configuration and what is to be said of it.

    `search` finds the best plan; `model` takes the place of the one that is named. Without a cluster only the lower
    bound of trainers that shard their states is worked out.
    """
    if not (setup.uses_mca(configuration) or configuration.trainer == "swift-megatron"):
        return _bounded(configuration, setup, cluster, model)
    if cluster is None:
        return Prediction(configuration=configuration), ()
    try:
        translation = translate(configuration, setup, cluster, model=model, profile=profile)
    except InputError as error:
        return Prediction(configuration=configuration, reason=str(error)), ()
    found = list(_process_findings(translation.processes, cluster))
    try:
        (check_job if translation.layout.backend == "mca" else check_precision)(translation.spec)
    except InputError as error:
        refused = Finding(
            rule="trainer-refuses",
            severity="error",
            part=configuration.part,
            what=error.what,
            why=error.expected,
            remedy=error.remedy,
        )
        return Prediction(configuration=configuration, translation=translation, reason=error.what), (*found, refused)
    prediction = _with_best(translation, search)
    return prediction, (*found, *_samples_finding(translation), *legality_findings(translation), *_verdict(prediction))


def _bounded(
    configuration: Configuration, setup: Setup, cluster: Cluster | None, model: str | None
) -> tuple[Prediction, tuple[Finding, ...]]:
    reason = "only the Megatron trainers are predicted so far"
    try:
        bound = bound_of(configuration, setup, cluster, model=model)
    except InputError as error:
        return Prediction(configuration=configuration, reason=f"{reason}; {error}"), ()
    found = () if bound is None else tuple(bound_findings(bound, configuration, cluster))
    return Prediction(configuration=configuration, bound=bound, reason=reason), found


def _with_best(translation: Translation, search: Search) -> Prediction:
    spec, plan, reason = translation.spec, None, ""
    if broken := broken_rules(spec, translation.layout):
        reason = f"the layout breaks rule {broken[0][0].name}: {broken[0][1]}"
    else:
        plan = predict(spec, translation.layout)
    best, no_best = None, ""
    try:
        plans = search(spec).plans
        # Predicted once more, since a search lists no more stages than it needs.
        best = predict(spec, plans[0].layout) if plans else None
        no_best = "" if best else "no layout of this job fits"
        if best is not None and best.layout.backend == "mca":
            check_layout(_any_samples(spec), best.layout)
    except InputError as error:
        best = None
        no_best = error.what
    return Prediction(
        configuration=translation.configuration,
        translation=translation,
        plan=plan,
        best=best,
        reason=reason,
        no_best=no_best,
    )


def _any_samples(spec: Spec) -> Spec:
    """The spec without the number of samples: too few for a step have a finding of their own, and bind no layout."""
    return replace(spec, job=replace(spec.job, samples=None))


# Findings ------------------------------------------------------------------------------------------------------------


def _process_findings(processes: Processes | None, cluster: Cluster) -> Iterator[Finding]:
    if processes is None:
        return
    nodes, gpus = processes.nodes or cluster.nodes, processes.gpus_per_node or cluster.gpus_per_node
    if (nodes, gpus) == (cluster.nodes, cluster.gpus_per_node):
        return
    too_many = nodes > cluster.nodes or gpus > cluster.gpus_per_node
    severity: Severity = "error" if too_many else "note"
    yield Finding(
        rule="launch-other-cluster",
        severity=severity,
        part=processes.launch.part,
        line=processes.line,
        what=f"the command starts {processes.words}, and {cluster.name} has {cluster.nodes} x {cluster.gpus_per_node}",
        why="a process without a GPU of its own ends the run" if too_many else "the others stay idle",
        remedy=f"start {cluster.nodes} nodes with {cluster.gpus_per_node} processes each, or give the cluster that is"
        " meant",
    )


def _samples_finding(translation: Translation) -> Iterator[Finding]:
    job = translation.spec.job
    micro_batches = translation.layout.micro_batch_size * translation.layout.dp
    if job.samples is None or not micro_batches <= job.samples < job.global_batch_size:
        return  # fewer still break the rule on the batch
    yield Finding(
        rule="samples-below-batch",
        severity="error",
        part=translation.configuration.part,
        line=translation.configuration.line("max_samples"),
        what=f"{job.samples:,} samples at most, and a step takes {job.global_batch_size:,}",
        why="the Megatron trainer divides by the number of whole steps in an epoch, which is then zero",
        remedy="raise max_samples, or lower gradient_accumulation_steps",
    )


def _verdict(prediction: Prediction) -> Iterator[Finding]:
    translation, plan, best = prediction.translation, prediction.plan, prediction.best
    if translation is None:
        return
    if prediction.no_best:
        yield Finding(
            rule="plan-nothing-fits",
            severity="note" if plan and plan.fits else "warning",
            part=translation.configuration.part,
            what=f"a search found no layout for this job on {translation.spec.cluster.name}",
            why=prediction.no_best,
            remedy="use more or larger GPUs, or a smaller global batch or length",
        )
    if plan is None:
        return
    spec, to_best = translation.spec, _towards_best(prediction)
    if not plan.fits:
        out, memory = memory_rejection(spec, plan.layout), plan.memory
        is_close = memory.device_bytes <= memory.capacity_bytes and memory.excess_bytes > 0.0
        lengths = "" if spec.job.packs else f", with sequences of {spec.job.seq_len:,} tokens: shorter ones take less"
        yield Finding(
            rule="plan-does-not-fit",
            severity="warning" if is_close else "error",
            part=translation.configuration.part,
            what=f"{'may not fit' if is_close else 'does not fit'}: {out.reason}",
            why=f"predicted for {plan.id} on {spec.cluster.world_size} GPUs of {spec.cluster.name}{lengths}",
            remedy="; ".join(filter(None, (out.fix, to_best))),
        )
        return
    faster = (prediction.faster or 1.0) - 1.0
    if best is not None and faster >= A_LITTLE_FASTER:
        yield Finding(
            rule="plan-slower",
            severity="warning" if faster >= MUCH_FASTER else "note",
            part=translation.configuration.part,
            what=f"the best plan for this job on these GPUs is {faster:.0%} faster",
            why=f"{best.id} instead of {plan.id}, with the same global batch of {spec.job.global_batch_size}",
            remedy=to_best,
        )


def _towards_best(prediction: Prediction) -> str:
    """The changes of keys as a sentence, for those who read the findings alone."""
    put = [f"{change.key}: {_yaml(change.best)}" for change in prediction.changes if change.best is not None]
    taken_out = [change.key for change in prediction.changes if change.best is None]
    halves = [f"{word} {', '.join(keys)}" for word, keys in (("set", put), ("remove", taken_out)) if keys]
    return " and ".join(halves)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
