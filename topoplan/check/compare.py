"""The memory and speed of exactly a configuration, and the best plan of its job on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from topoplan import catalog
from topoplan.backends.mca import check_job, check_precision
from topoplan.check.best import NOTHING_FITS, Way, any_samples, best_of, sentence, ways_to_fit
from topoplan.check.job.data_parallel import USUAL_SEQ_LEN
from topoplan.check.job.deepspeed_alone import gpus_of
from topoplan.check.job.keys_of_layout import trainer_keys
from topoplan.check.job.processes import Processes, processes_for
from topoplan.check.job.translate import Translation, translate
from topoplan.check.job.values import Keys, NotPredictedError
from topoplan.check.offload import offload_findings
from topoplan.check.read.setup import Configuration, Setup
from topoplan.check.rules.finding import Finding, Severity
from topoplan.check.rules.layout_keys import key_line
from topoplan.check.rules.legality import broken_rules, legality_findings
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
from topoplan.units import GIB

MUCH_FASTER = 0.15
"""What the best plan gains over a configuration, as a share of its throughput, from which it is worth a warning."""
A_LITTLE_FASTER = 0.03
"""Below this nothing is said: the figures show it."""
_USUAL_CARD = "a100-sxm-80gb"
"""What is meant where no cluster is given: the largest card that most people have."""
_USUAL_GPUS = 8
"""Of a machine, where no command says how many."""
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
    own: Plan | None = None
    """The best one of the configuration's own backend."""
    ways: tuple[Way, ...] = ()
    """Where nothing fits: with what it would."""
    told: bool = False
    """A finding says why there is no plan."""
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
        """The trainer's keys in which the best plan of the same backend differs."""
        target = self.own
        if self.translation is None or target is None:
            return ()
        spec, layout = self.translation.spec, self.translation.layout
        is_moe, trainer = facts_of(spec.model).is_moe, self.configuration.trainer
        now = trainer_keys(layout, is_moe=is_moe, trainer=trainer)
        best = trainer_keys(target.layout, is_moe=is_moe, trainer=trainer)
        written = self.configuration.source.data
        if layout.backend == "mca":
            emitted = trainer_file(any_samples(spec), target).values
            for key in _FOLLOWING:
                if emitted.get(key) not in (None, True):  # switching on what is off changes nothing that is predicted
                    now[key] = self.configuration.get(key, known_keys()[key].default)
                    best[key] = emitted[key]
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
    seq_len: int = USUAL_SEQ_LEN,
) -> tuple[Prediction, tuple[Finding, ...]]:
    """The prediction of a whole configuration and what is to be said of it.

    `search` finds the best plan; `model` takes the place of the one that is named, `seq_len` of a length that is not
    given. Without a cluster it is held against large cards, where the command says how many.
    """
    if cluster is None:
        return _on_usual_cards(configuration, setup, search=search, model=model, seq_len=seq_len)
    try:
        translation = translate(configuration, setup, cluster, model=model, profile=profile, seq_len=seq_len)
    except NotPredictedError as error:
        return _not_predicted(configuration, error)
    except InputError as error:
        return Prediction(configuration=configuration, reason=str(error)), ()
    found = [*_process_findings(translation.processes, cluster), *_batch_finding(translation)]
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
    prediction = _with_best(translation, cluster, search)
    told = (*found, *_samples_finding(translation), *legality_findings(translation), *_verdict(prediction))
    return prediction, told


def _not_predicted(configuration: Configuration, error: NotPredictedError) -> tuple[Prediction, tuple[Finding, ...]]:
    finding = Finding(
        rule="not-predicted",
        severity="note",
        part=configuration.part,
        line=configuration.line(error.key),
        what=error.what,
        why="no formula here covers its memory and speed, so that no number is given",
    )
    return Prediction(configuration=configuration, reason=error.what, told=True), (finding,)


def _on_usual_cards(
    configuration: Configuration, setup: Setup, *, search: Search, model: str | None, seq_len: int
) -> tuple[Prediction, tuple[Finding, ...]]:
    """Without a cluster: a warning where the GPUs of the command cannot hold it even if they are large ones."""
    processes = processes_for(setup, configuration)
    nothing = Prediction(configuration=configuration), ()
    nodes, gpus = (processes.nodes, processes.gpus_per_node) if processes else (None, None)
    cluster = _usual_machines(nodes or 1, gpus or _USUAL_GPUS)
    try:
        translation = translate(configuration, setup, cluster, model=model, seq_len=seq_len)
        if broken_rules(_without_path(translation.spec), translation.layout):
            return nothing
        plan = predict(_without_path(translation.spec), translation.layout)
    except InputError:
        return nothing
    found = [replace(one, severity="note") for one in offload_findings(translation, plan)]
    if nodes and gpus and plan.memory.device_bytes > plan.memory.capacity_bytes:
        prediction = Prediction(configuration=configuration, translation=translation, plan=plan)
        prediction = _with_ways(_compared(prediction, search), cluster, search)
        found += [replace(one, severity="warning") for one in _misfit(prediction)]
    return nothing[0], tuple(found)


def _usual_machines(nodes: int, gpus_per_node: int) -> Cluster:
    gpu = catalog.gpu(_USUAL_CARD)
    return Cluster(
        name=f"{nodes} x {gpus_per_node} {gpu.name}",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        nvlink_bytes_per_s=gpu.nvlink_bytes_per_s,
        nvlink_domain_gpus=gpus_per_node,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s,
        nics_per_node=gpu.nics_per_node,
        nic_bytes_per_s=gpu.nic_bytes_per_s,
    )


def _without_path(spec: Spec) -> Spec:
    """A spec that was not read from a file need not say host_memory: it is told what is needed."""
    return replace(spec, path=None)


def _with_best(translation: Translation, cluster: Cluster, search: Search) -> Prediction:
    spec, plan, reason = _without_path(translation.spec), None, ""
    if broken := broken_rules(spec, translation.layout):
        reason = f"the layout breaks rule {broken[0][0].name}: {broken[0][1]}"
    else:
        try:
            plan = predict(spec, translation.layout)
        except InputError as error:
            reason = error.what
    prediction = Prediction(configuration=translation.configuration, translation=translation, plan=plan, reason=reason)
    return _with_ways(_compared(prediction, search), cluster, search)


def _compared(prediction: Prediction, search: Search) -> Prediction:
    if prediction.translation is None:
        return prediction
    best = best_of(prediction.translation, search)
    return replace(prediction, best=best.plan, own=best.own, no_best=best.reason)


def _with_ways(prediction: Prediction, cluster: Cluster, search: Search) -> Prediction:
    """What would fit, where nothing does on these machines."""
    translation, plan = prediction.translation, prediction.plan
    if translation is None or prediction.best is not None or (plan is not None and plan.fits):
        return prediction
    return replace(prediction, ways=tuple(ways_to_fit(translation, cluster, search)))


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
        remedy=f"start {cluster.nodes} node{'' if cluster.nodes == 1 else 's'} with {cluster.gpus_per_node} processes"
        f"{'' if cluster.nodes == 1 else ' each'}, or give the cluster that is meant",
    )


def _batch_finding(translation: Translation) -> Iterator[Finding]:
    """Of a DeepSpeed file alone; where a command starts it, `rules/deepspeed.py` tells."""
    configuration, world = translation.configuration, translation.spec.cluster.world_size
    gpus = gpus_of(Keys(configuration, {})) if configuration.trainer == "deepspeed" else None
    if gpus is None or gpus == world:
        return
    yield Finding(
        rule="deepspeed-batch-of-gpus",
        severity="error",
        part=configuration.part,
        line=configuration.line("train_batch_size"),
        what=f"the three batch sizes hold for {gpus} GPUs, and {translation.spec.cluster.name} has {world}",
        why="DeepSpeed asserts the equation; predicted is the batch that one GPU and the accumulation make",
        remedy=f"write train_batch_size {translation.spec.job.global_batch_size}",
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
    is_over = plan is not None and plan.memory.excess_bytes > 0.0
    if prediction.no_best and not is_over:
        yield Finding(
            rule="plan-nothing-fits",
            severity="note" if plan and plan.fits else "warning",
            part=translation.configuration.part,
            what=f"a search found no layout for this job on {_gpus(translation.spec)}",
            why=prediction.no_best,
            remedy=sentence(prediction.ways) or "use more or larger GPUs, or a smaller global batch or length",
        )
    if plan is None:
        return
    spec = translation.spec
    yield from offload_findings(translation, plan)
    if not plan.fits:
        yield from _misfit(prediction)
        return
    faster = (prediction.faster or 1.0) - 1.0
    if best is not None and faster >= A_LITTLE_FASTER:
        yield Finding(
            rule="plan-slower",
            severity="warning" if faster >= MUCH_FASTER else "note",
            part=translation.configuration.part,
            what=f"the best plan for this job on these GPUs is {faster:.0%} faster",
            why=f"{_named(best)} instead of {plan.id}, with the same global batch of {spec.job.global_batch_size}"
            + _of_own_backend(prediction),
            remedy=_towards_best(prediction),
        )


def _named(plan: Plan) -> str:
    """The id, with what trains it where that does not show."""
    return f"{plan.id} (Megatron)" if plan.layout.is_megatron else plan.id


def _of_own_backend(prediction: Prediction) -> str:
    """What the best plan of the same backend gains, where another backend has the best of all."""
    plan, own = prediction.plan, prediction.own
    if plan is None or own is None or own == prediction.best:
        return ""
    gain = own.tokens_per_s_per_gpu / plan.tokens_per_s_per_gpu - 1.0
    if gain < A_LITTLE_FASTER:
        return f"; with {own.layout.backend} none is faster than this one"
    return f"; the best with {own.layout.backend} is {own.id}, {gain:.0%} faster"


def _misfit(prediction: Prediction) -> Iterator[Finding]:
    """That a plan is over the card, by how much, and what would fit."""
    translation, plan = prediction.translation, prediction.plan
    if translation is None or plan is None or plan.memory.excess_bytes <= 0.0:
        return  # the host memory is too small, which has a finding of its own
    spec, memory, layout = translation.spec, plan.memory, plan.layout
    out = memory_rejection(_without_path(spec), layout)
    is_close = memory.device_bytes <= memory.capacity_bytes
    lengths = "" if spec.job.packs else f", with sequences of {spec.job.seq_len:,} tokens: shorter ones take less"
    parts = "" if layout.is_megatron else f": {_parts(plan)}"
    target = prediction.own or prediction.best
    if target is None:
        nothing = "nothing else fits" if prediction.no_best == NOTHING_FITS else prediction.no_best
        as_is = "" if spec.cluster.host_memory_bytes else ", whose spec states no host_memory to offload to"
        remedies = [f"{nothing} on these GPUs{as_is}", sentence(prediction.ways)]
    elif layout.is_megatron:
        remedies = [out.fix, _towards_best(prediction)]
    else:
        remedies = [f"on these GPUs fits {_named(target)}: {_towards_best(prediction)}"]
    yield Finding(
        rule="plan-does-not-fit",
        severity="warning" if is_close else "error",
        part=translation.configuration.part,
        line=key_line(translation.configuration, ("deepspeed", "fsdp")) if not layout.is_megatron else None,
        what=f"{'may not fit' if is_close else 'does not fit'}: {out.reason}",
        why=f"predicted for {plan.id} of {spec.model.name} on {_gpus(spec)}{parts}{lengths}",
        remedy="; ".join(filter(None, remedies)),
    )


def _gpus(spec: Spec) -> str:
    count, name = spec.cluster.world_size, spec.cluster.name
    return f"{count} GPU{'' if count == 1 else 's'} of {name}"


def _parts(plan: Plan) -> str:
    """`56.9 GiB weights, 11.4 GiB gradients, 68.2 GiB optimizer, 9.6 GiB activations and buffers`."""
    stage = max(plan.memory.by_stage, key=lambda one: one.allocated_bytes)
    states = {name: stage.parts_bytes.get(name, 0.0) for name in ("weights", "gradients", "optimizer")}
    rest = plan.memory.device_bytes - sum(states.values())
    rows = [f"{size / GIB:.1f} GiB {name}" for name, size in states.items() if size]
    return ", ".join([*rows, f"{rest / GIB:.1f} GiB activations, buffers and context"])


def _towards_best(prediction: Prediction) -> str:
    """The changes of keys as a sentence, for those who read the findings alone."""
    plan, own, best = prediction.plan, prediction.own, prediction.best
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
