"""From a trainer's configuration to the job and the layout that it would really run on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from topoplan.errors import InputError, listed
from topoplan.layout.layout import Layout
from topoplan.planner.lengths import known_lengths
from topoplan.planner.oddities import without_effect
from topoplan.reading.processes import Processes, launch_of, processes_for
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.load import data_note, lengths_of_dataset
from topoplan.specs.model import Model, with_labels
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, StatedSharding
from topoplan.trainers.data_parallel import USUAL_SEQ_LEN
from topoplan.trainers.recognizers import codec_of, trainer_of
from topoplan.trainers.registry import has_backend
from topoplan.trainers.sharding import sharding_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration in the terms of the planner."""

    configuration: Configuration
    codec: Codec
    spec: Spec
    """Cluster, model and job; whatever a search for a better layout must keep is pinned."""
    layout: Layout
    """The layout as the trainer would run it, legal or not."""
    processes: Processes | None
    """The processes that the configuration's command starts; None if no command was found."""
    assumptions: tuple[str, ...]
    """Sentences on what the files leave open."""
    on_part: str = ""
    """The one of them that says which of the cluster's GPUs the prediction is for."""
    on_lengths: str = ""
    """The one of them that says how long samples are, if nothing that was read tells."""
    bundle: Path | None = None
    """The directory of the bundle that the configuration belongs to, whose plan records what was requested and chosen;
    None if it belongs to none."""
    keys: Keys = field(compare=False, repr=False)
    """The configuration's keys, overridden by the arguments of its command."""

    @property
    def has_batch(self) -> bool:
        """Whether the job's batch is known: degrees that do not divide the GPUs leave no number of replicas, and a
        batch only if it is given as a whole."""
        stated = self.keys.configuration.get("global_batch_size")
        return stated is not None or self.layout.world_size == self.spec.cluster.world_size


def translate(
    configuration: Configuration,
    setup: Setup,
    cluster: Cluster,
    *,
    model: str | None = None,
    profile: OwnProfile | None = None,
    seq_len: int = USUAL_SEQ_LEN,
    length: int | None = None,
) -> Translation:
    """Return the job and the layout of a configuration on a cluster.

    `model` replaces the model that the configuration names, `seq_len` a missing sequence length, `length` any sequence
    length. Raises InputError, with the reason, if the configuration cannot be predicted.
    """
    codec = codec_of(configuration, setup)
    if codec is None:
        recognizer = setup.recognizer(configuration.trainer)
        unpredicted = recognizer.unpredicted if recognizer else None
        what, _, remedy = unpredicted or (configuration.trainer, "", "")
        raise NotPredictedError("", what, where=configuration.part.place(None), remedy=remedy)
    whole, overridden = _with_arguments(configuration, setup)
    reference = model or setup.named_model(whole) or ""
    whole = codec.view(whole, setup)
    keys = Keys(whole, codec.defaults())
    written = keys.count(codec.length) if codec.length else None
    tokens = length or written or seq_len
    if written is None and length is None and codec.needs_length:
        keys.fail(codec.length, f"{codec.length} is not given, and the model's own is not a length of samples")
    known, named = codec.model(whole, reference, tokens)
    sharding = sharding_of(keys, setup) if codec.shards else StatedSharding()
    processes = processes_for(setup, configuration) if codec.gpus is None else None
    part, on_part = _part_of(cluster, processes)
    if codec.gpus is not None:
        part, on_part = _part_of_file(cluster, codec.gpus(keys))
    launch = processes.launch if processes else launch_of(setup, configuration)
    reading = Reading(keys=keys, model=known, world=part.world_size, launch=launch, sharding=sharding)
    layout = codec.layout(reading)
    job = _meant(codec.job(reading, layout, tokens), known)
    further = codec.assumptions(reading, layout, job)
    on_length, on_lengths = _on_length(codec, written, tokens, length), ""
    if codec.length and not on_length and not job.packs:
        on_lengths = f"every sequence is assumed to be {codec.length} long, {tokens:,} tokens"
    assumptions = (named, on_part, sharding.assumption, on_length, on_lengths, *further, overridden)
    place, trainer = configuration.part.place(None), trainer_of(configuration).name
    spec = Spec(cluster=part, model=with_labels(known, job.num_labels), job=job, profile=profile, path=place)
    return Translation(
        configuration=configuration,
        codec=codec,
        spec=replace(spec, trainer=trainer if has_backend(layout.backend, trainer) else None),
        layout=layout,
        processes=processes,
        assumptions=tuple(filter(None, assumptions)),
        on_part=on_part,
        on_lengths=on_lengths,
        keys=keys,
    )


def _meant(job: Job, model: Model) -> Job:
    """Return the job with defaults for the keys that have no effect for its model and kind of fine-tuning."""
    usual: dict[str, Any] = {key: Job.__dataclass_fields__[key].default for key, _ in without_effect(job, model)}
    return replace(job, **usual)


def _on_length(codec: Codec, written: int | None, tokens: int, length: int | None) -> str:
    if length is not None and written not in (None, length):
        return f"{codec.length} is assumed to be {length:,} (--seq-len), not the file's {written:,}"
    if codec.length and written is None:
        return f"{codec.length} is not given, which cuts no sample: taken are {tokens:,} tokens (--seq-len)"
    return ""


def with_lengths(translation: Translation) -> Translation:
    """Return a translation with the lengths of the samples of its data sets, if they are on this machine, as the spec
    that is made of the file (`job_file.py`) has them: with the file's further keys, relative to the working directory.
    """
    spec, codec, here = translation.spec, translation.codec, Path()
    further = codec.carries(translation.keys, spec.job, None)
    named = {key: further[key] for key in ("dataset", "dataset_dir", "trainer") if key in further}
    job, lengths = replace(spec.job, **named), None
    try:
        lengths = lengths_of_dataset(job, spec.model, base=here, directory_base=here)
        why = "" if lengths else data_note(job, base=here, directory_base=here)
    except InputError as error:
        why = str(error)
    if lengths is not None:
        measured = replace(translation, spec=replace(spec, job=replace(job, lengths=lengths)))
        return with_words_on_lengths(measured, f"lengths: {known_lengths(lengths)}")
    told = translation.on_lengths
    return with_words_on_lengths(translation, f"{told}: {why}") if told and why else translation


def with_words_on_lengths(translation: Translation, words: str) -> Translation:
    """Return a translation whose assumptions say this, and nothing else, on the lengths of the samples."""
    before = translation.assumptions
    at = before.index(translation.on_lengths) if translation.on_lengths else len(before)
    return replace(translation, assumptions=(*before[:at], words, *before[at + 1 :]), on_lengths=words)


def _with_arguments(configuration: Configuration, setup: Setup) -> tuple[Configuration, str]:
    """Return a file's configuration overridden by the arguments after the file in its command, and a sentence on that.

    LLaMA-Factory: `hparams/parser.py::read_args`; ms-swift: `cli/main.py::parse_yaml_args`.
    """
    launch = launch_of(setup, configuration)
    said = launch.configuration if launch is not None and launch.file_configuration is configuration else None
    if said is None:
        return configuration, ""
    source, new = configuration.source, said.source.data
    lines = {path: line for path, line in source.lines.items() if path[0] not in new}
    words = frozenset(path for path in source.old_booleans if path[0] not in new)
    merged = replace(source, data={**source.data, **new}, lines=lines, old_booleans=words)
    return replace(configuration, source=merged), f"{listed(sorted(new))} as the command has it, behind the file"


def _part_of_file(cluster: Cluster, gpus: int | None) -> tuple[Cluster, str]:
    """Return the part of a cluster that a file's GPU count takes, with a sentence; all of it if it asks for more."""
    if gpus is None:
        return cluster, ""
    if gpus > cluster.world_size:
        whole = f"the cluster's {cluster.nodes} x {cluster.gpus_per_node} GPUs"
        return cluster, f"predicted on {whole}, and the file is for {gpus}"
    if gpus <= cluster.gpus_per_node:
        return part_with(cluster, 1, gpus)
    nodes, rest = divmod(gpus, cluster.gpus_per_node)
    return part_with(cluster, cluster.nodes if rest else nodes, cluster.gpus_per_node)


def _part_of(cluster: Cluster, processes: Processes | None) -> tuple[Cluster, str]:
    """Return the part of a cluster that a command uses, with a sentence; all of it if the command asks for more."""
    if processes is None:
        return cluster, ""
    return part_with(
        cluster,
        processes.nodes or cluster.nodes,
        processes.gpus_per_node or cluster.gpus_per_node,
        "that the command uses",
    )


def part_with(cluster: Cluster, nodes: int, gpus: int, why: str = "that it is for") -> tuple[Cluster, str]:
    """Return a cluster reduced to some machines and GPUs, with a sentence; all of it if it has fewer."""
    if (nodes, gpus) == (cluster.nodes, cluster.gpus_per_node):
        return cluster, ""
    if nodes > cluster.nodes or gpus > cluster.gpus_per_node:
        return cluster, f"predicted on the cluster's {cluster.nodes} x {cluster.gpus_per_node} GPUs"
    part = replace(
        cluster,
        nodes=nodes,
        gpus_per_node=gpus,
        nvlink_domain_gpus=min(cluster.nvlink_domain_gpus, nodes * gpus),
        hosts=cluster.hosts[:nodes],
    )
    return part, f"predicted on the {nodes} x {gpus} GPUs {why}"
