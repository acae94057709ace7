"""Predict exactly what a configuration runs, and compare it with the best plan of its job on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.utils import canonicalize_name

from topoplan.bundle.plan_file import read_plan_file
from topoplan.errors import InputError, listed
from topoplan.lint.best import best_of, ways_to_fit
from topoplan.lint.offload import job_memory_findings, offload_findings
from topoplan.lint.prediction import RULES, Prediction
from topoplan.lint.prediction_findings import (
    batch_finding,
    misfit,
    prediction_findings,
    process_findings,
    samples_finding,
    unnamed,
)
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules.legality import SLOW_RULES, broken_rules, legality_findings
from topoplan.lint.translate import Translation, translate, with_lengths, with_words_on_lengths
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.reading.finding import Finding
from topoplan.reading.processes import processes_for
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import NotPredictedError
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.trainers.fault_rules import fault_findings
from topoplan.trainers.known_faults import FAULTS
from topoplan.trainers.layout_keys import key_line
from topoplan.trainers.recognizers import codec_of

_USUAL_CARD = "a100-sxm-80gb"
"""The card assumed if no cluster is given: the largest that most people have."""
_USUAL_GPUS = 8
"""GPUs per machine, if no command says how many."""
_MANY_NODES = 1024
"""Machines assumed for a file that states its own number of GPUs; it uses as many of them as it needs."""
_NVLINK_ENDS = "no cluster was given: these are machines whose NVLink ends at the node"
_FP8 = ("fp8_format", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_param")
_PRECISION = (*_FP8, "bf16", "torch_dtype")


def predict_configuration(
    configuration: Configuration, setup: Setup, against: PredictionTarget
) -> tuple[Prediction, tuple[Finding, ...]]:
    """Return the prediction for a whole configuration, and the findings about it."""
    cluster = against.cluster
    if cluster is None:
        return Prediction(configuration=configuration), tuple(_on_usual_cards(configuration, setup, against))
    whole, versions = cluster, setup.versions
    # The same object for all configurations: clusters compare by identity, and searches are kept by their specs.
    cluster = against.once(("versions", versions), lambda: _with_versions(whole, versions))
    try:
        translation = _of_bundle(_translated(configuration, setup, cluster, against), setup)
        if translation.spec.job.lengths is None:
            translation = with_lengths(translation)
    except NotPredictedError as error:
        return _not_predicted(configuration, error)
    except InputError as error:
        return Prediction(configuration=configuration, reason=str(error)), ()
    found = [*process_findings(translation.processes, cluster), *batch_finding(translation)]
    for refusal in translation.codec.refusals(translation.spec):
        refused = RULES["trainer-refuses"].found(
            configuration.part,
            key_line(configuration, _PRECISION) if "precision" in refusal.remedy else None,
            what=refusal.what,
            why=refusal.expected,
            remedy=_in_keys(refusal.remedy, configuration),
        )
        return Prediction(configuration=configuration, translation=translation, reason=refusal.what), (*found, refused)
    prediction = against.once(translation, lambda: _with_best(translation, cluster, against))
    return prediction, (
        *found,
        *samples_finding(translation),
        *legality_findings(translation),
        *prediction_findings(prediction),
        *_faults(setup, configuration, translation),
    )


def _with_versions(cluster: Cluster, versions: Mapping[str, str]) -> Cluster:
    """Return a cluster whose software has the versions that the files state of packages whose faults stop a run, beside
    those that it states itself; package names in `versions` are normalized as in PEP 503."""
    packages = (fault.package for fault in FAULTS if fault.cure and fault.level == "stops")
    stated = {name: versions[key] for name in packages if (key := canonicalize_name(name)) in versions}
    return replace(cluster, software={**stated, **cluster.software})


def _faults(setup: Setup, configuration: Configuration, translation: Translation) -> Iterator[Finding]:
    """Report known faults of packages that the layout triggers, if the codec reports faults."""
    if translation.codec.tells_faults:
        yield from fault_findings(setup, configuration, translation.spec, translation.layout)


def _faults_of_bundle(configuration: Configuration, setup: Setup, against: PredictionTarget) -> Iterator[Finding]:
    """Report known faults that a bundle's layout, which may have been edited, triggers on its own cluster."""
    directory = setup.bundle_of(configuration)
    if directory is None:
        return
    try:
        translation = _translated(configuration, setup, read_plan_file(directory).spec.cluster, against)
    except InputError:
        return  # a rule on bundles reports this
    yield from _faults(setup, configuration, translation)


def _of_bundle(translation: Translation, setup: Setup) -> Translation:
    """Return a bundle's translation with what only its plan file holds, such as the lengths of samples."""
    directory, job = setup.bundle_of(translation.configuration), translation.spec.job
    if directory is None:
        return translation
    translation = replace(translation, bundle=directory)
    try:
        planned = read_plan_file(directory).spec.job
    except InputError:
        return translation  # a rule on bundles reports this
    job = replace(job, images_per_sequence=planned.images_per_sequence, token_imbalance=planned.token_imbalance)
    if planned.lengths is not None and (planned.seq_len, planned.packs) == (job.seq_len, job.packs):
        job = replace(job, lengths=planned.lengths)
        translation = with_words_on_lengths(translation, "samples are as long as those that the bundle was planned for")
    return replace(translation, spec=replace(translation.spec, job=job))


def _in_keys(remedy: str, configuration: Configuration) -> str:
    """Rephrase a remedy for a spec's `precision` in the trainer's own keys."""
    if "precision" not in remedy:
        return remedy
    if "fp16" in remedy:
        return "set fp16: true in place of bf16"
    return f"remove {listed([key for key in _FP8 if configuration.get(key) is not None], 'and')}"


def _not_predicted(configuration: Configuration, error: NotPredictedError) -> tuple[Prediction, tuple[Finding, ...]]:
    finding = RULES["not-predicted"].at(
        configuration, error.key, what=error.what, remedy=error.remedy or error.expected
    )
    return Prediction(configuration=configuration, reason=error.what, is_reported=True), (finding,)


def unpredicted_findings(setup: Setup) -> Iterator[Finding]:
    """Report configurations that no prediction supports, if predictions were asked for."""
    for configuration in setup.configurations:
        recognizer = setup.recognizer(configuration.trainer)
        if recognizer and recognizer.unpredicted and codec_of(configuration, setup) is None:
            what, why, remedy = recognizer.unpredicted
            yield RULES["not-predicted"].at(configuration, None, what=what, why=why, remedy=remedy)


def _on_usual_cards(configuration: Configuration, setup: Setup, against: PredictionTarget) -> Iterator[Finding]:
    """Without a cluster, warn if model states alone exceed large cards, as many as the command uses."""
    processes = processes_for(setup, configuration)
    if setup.bundles:
        yield from _faults_of_bundle(configuration, setup, against)  # which was planned for its own cards
        return
    nodes, gpus = (processes.nodes, processes.gpus_per_node) if processes else (None, None)
    codec = codec_of(configuration, setup)
    names_gpus = codec is not None and codec.gpus is not None
    size = (_MANY_NODES, _USUAL_GPUS) if names_gpus else (nodes or 1, gpus or _USUAL_GPUS)
    cluster = _usual_machines(*size)
    try:
        translation = _translated(configuration, setup, cluster, against)
        spec = unnamed(translation.spec)
        broken = bool(broken_rules(spec, translation.layout))
        plan = None if broken else predict(spec, translation.layout, is_of_file=True)
    except InputError:
        return
    if plan is None:
        yield from _illegal(translation)
        return
    yield from _faults(setup, configuration, translation)
    yield from (replace(one, severity="note") for one in offload_findings(translation, plan))
    yield from job_memory_findings(translation, plan)
    # A larger card may still hold a configuration whose activations are what makes it too large.
    if translation.codec.shards and nodes and gpus and _states_bytes(plan) > plan.memory.capacity_bytes:
        for one in misfit(against.once(translation, lambda: _compared(translation, cluster, against, plan))):
            yield replace(one, severity="warning", why=f"{one.why}; no cluster was given: these are cards of 80 GB")


def _translated(configuration: Configuration, setup: Setup, cluster: Cluster, against: PredictionTarget) -> Translation:
    model, profile = against.model, against.profile
    return translate(configuration, setup, cluster, model=model, profile=profile, seq_len=against.seq_len)


def _illegal(translation: Translation) -> Iterator[Finding]:
    """Yield the layout rules broken by a command's own number of GPUs, whatever the cards are."""
    processes, configuration = translation.processes, translation.configuration
    says_itself = translation.codec.gpus is not None
    started = processes is not None and bool(processes.nodes and processes.gpus_per_node)
    if says_itself or (
        started and processes and configuration in (processes.launch.configuration, processes.launch.file_configuration)
    ):
        for one in legality_findings(translation):
            yield one if one.severity == "error" else replace(one, why=f"{one.why}; {_NVLINK_ENDS}")


def _states_bytes(plan: Plan) -> float:
    """Return the bytes of weights, gradients and optimizer states on a GPU of the first stage."""
    return sum(plan.memory.by_stage[0].parts_bytes[part] for part in ("weights", "gradients", "optimizer"))


def _usual_machines(nodes: int, gpus_per_node: int) -> Cluster:
    name = f"{nodes} x {gpus_per_node} {_USUAL_CARD}"
    return known.machines(known.gpu(_USUAL_CARD), nodes, gpus_per_node, name)


def _with_best(translation: Translation, cluster: Cluster, against: PredictionTarget) -> Prediction:
    spec, plan, reason = unnamed(translation.spec), None, ""
    if broken := broken_rules(spec, translation.layout):
        rule, equation = broken[0]
        what = "layouts outside {} run, but are not predicted" if rule.name in SLOW_RULES else "the layout breaks {}"
        reason = f"{what.format(f'rule {rule.name}')}: {equation}"
    else:
        try:
            plan = predict(spec, translation.layout, is_of_file=True)
        except InputError as error:
            reason = error.what
    if not translation.has_batch:
        return Prediction(configuration=translation.configuration, reason=reason)
    return _compared(translation, cluster, against, plan, reason)


def _compared(
    translation: Translation, cluster: Cluster, against: PredictionTarget, plan: Plan | None, reason: str = ""
) -> Prediction:
    """Return the prediction of a plan beside the best plan of its job and, if nothing fits, what would."""
    best = best_of(translation, against.ranking)
    is_lost = best.plan is None and not (plan is not None and plan.fits)
    return Prediction(
        configuration=translation.configuration,
        translation=translation,
        plan=plan,
        reason=reason,
        best=best.plan,
        best_of_backend=best.own,
        no_best=best.reason,
        fixes=tuple(ways_to_fit(translation, cluster, against.ranking)) if is_lost else (),
    )
