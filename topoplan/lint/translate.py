"""From a configuration of a trainer to the job and the layout that it would really run on a cluster.

What each trainer makes of its keys is in `mca.py` and `swift.py`, with its place in the trainer's source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from topoplan.errors import SpecError, listed
from topoplan.layout.layout import Layout
from topoplan.reading.processes import Processes, launch_of, processes_for
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers import deepspeed_alone
from topoplan.trainers.data_parallel import USUAL_SEQ_LEN
from topoplan.trainers.llamafactory import mca_job as mca
from topoplan.trainers.llamafactory import plain_job as plain
from topoplan.trainers.models import model_of
from topoplan.trainers.sharding import sharding_of
from topoplan.trainers.swift import megatron_job as swift
from topoplan.trainers.swift import sft_job as swift_sft


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration in the terms of the planner."""

    configuration: Configuration
    spec: Spec
    """Cluster, model and job; what a search for a better layout has to keep is pinned."""
    layout: Layout
    """As the trainer would run it, legal or not."""
    processes: Processes | None
    """What its command starts; None where none was found."""
    assumptions: tuple[str, ...]
    """Sentences on what the files do not say."""


def translate(
    configuration: Configuration,
    setup: Setup,
    cluster: Cluster,
    *,
    model: str | None = None,
    profile: OwnProfile | None = None,
    seq_len: int = USUAL_SEQ_LEN,
) -> Translation:
    """The job and the layout of a configuration on a cluster.

    `model` takes the place of the one that the configuration names, `seq_len` that of a length that it does not say.
    Raises InputError where it cannot be predicted: the message says why.
    """
    if setup.path_of(configuration) == "bridge":
        what, where = "what LLaMA-Factory trains with Megatron Bridge is not predicted", configuration.part.place(None)
        raise NotPredictedError("use_megatron_bridge", what, where=where)
    translator = {
        "llamafactory": _mca if setup.uses_mca(configuration) else _plain,
        "swift-megatron": _swift_megatron,
        "swift": _swift,
        "deepspeed": _deepspeed,
    }.get(configuration.trainer)
    if translator is None:
        raise SpecError(f"{configuration.trainer} is not predicted", where=configuration.part.place(None))
    whole, overridden = _with_arguments(configuration, setup)
    found = translator(_Given(whole, setup, cluster, model, seq_len, processes_for(setup, configuration)))
    spec = Spec(
        cluster=found.part,
        model=found.model,
        job=found.job,
        profile=profile,
        path=configuration.part.place(None),
    )
    return Translation(
        configuration=configuration,
        spec=spec,
        layout=found.layout,
        processes=found.processes,
        assumptions=tuple(filter(None, (*found.assumptions, overridden))),
    )


def _with_arguments(configuration: Configuration, setup: Setup) -> tuple[Configuration, str]:
    """A file with what its command says behind it, which wins, and a sentence on that.

    LLaMA-Factory: `hparams/parser.py::read_args`; ms-swift: `cli/main.py::parse_yaml_args`.
    """
    launch = launch_of(setup, configuration)
    said = launch.configuration if launch is not None and launch.reads is configuration else None
    if said is None:
        return configuration, ""
    source, new = configuration.source, said.source.data
    lines = {path: line for path, line in source.lines.items() if path[0] not in new}
    words = frozenset(path for path in source.old_booleans if path[0] not in new)
    merged = replace(source, data={**source.data, **new}, lines=lines, old_booleans=words)
    return replace(configuration, source=merged), f"{listed(sorted(new))} as the command has it, behind the file"


@dataclass(frozen=True, slots=True)
class _Given:
    configuration: Configuration
    setup: Setup
    cluster: Cluster
    model: str | None
    seq_len: int
    processes: Processes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a trainer makes of its keys."""

    part: Cluster
    model: Model
    job: Job
    layout: Layout
    processes: Processes | None
    assumptions: list[str]


def _seq_len(keys: Keys, key: str) -> int:
    seq_len = keys.count(key)
    if seq_len is None:
        keys.fail(key, f"{key} is not given, and the model's own is no length of samples")
    return seq_len


def _of_samples(job: Job, key: str) -> str:
    return "" if job.packs else f"every sequence is taken to be {key} long, {job.seq_len:,} tokens"


def _mca(given: _Given) -> _Found:
    keys = Keys(given.configuration, mca.defaults())
    seq_len = _seq_len(keys, "cutoff_len")
    model, assumption = model_of(given.configuration, given.model, seq_len)
    processes = given.processes
    part, on_part = _part_of(given.cluster, processes)
    layout = mca.layout_of(keys, model, part.world_size)
    job = mca.job_of(keys, model, layout, seq_len)
    assumptions = [assumption, on_part, _of_samples(job, "cutoff_len")]
    if keys.value("finetuning_type") != "full":
        assumptions.append(f"finetuning_type {keys.value('finetuning_type')} trains all weights in this trainer")
    assumptions.append(_on_dispatcher(keys, layout))
    return _Found(part=part, model=model, job=job, layout=layout, processes=processes, assumptions=assumptions)


def _swift_megatron(given: _Given) -> _Found:
    keys = Keys(given.configuration, swift.DEFAULTS)
    seq_len = _seq_len(keys, "max_length")
    model, assumption = model_of(given.configuration, given.model, seq_len)
    processes = given.processes
    part, on_part = _part_of(given.cluster, processes)
    layout = swift.layout_of(keys, model, part.world_size)
    job = swift.job_of(keys, model, seq_len, processes)
    assumptions = [assumption, on_part, _of_samples(job, "max_length"), _on_dispatcher(keys, layout)]
    return _Found(part=part, model=model, job=job, layout=layout, processes=processes, assumptions=assumptions)


def _on_dispatcher(keys: Keys, layout: Layout) -> str:
    dispatcher = keys.value("moe_token_dispatcher_type")
    if layout.ep == 1 or dispatcher in ("alltoall", "flex"):
        return ""
    return f"the {dispatcher} dispatcher is predicted as alltoall, which sends less"


def _plain(given: _Given) -> _Found:
    keys = Keys(given.configuration, plain.defaults())
    seq_len = _seq_len(keys, "cutoff_len")
    model, assumption = model_of(given.configuration, given.model, seq_len)
    sharding = sharding_of(keys, given.setup)
    processes = given.processes
    part, on_part = _part_of(given.cluster, processes)
    launch = processes.launch if processes else None
    layout = plain.plain_layout(keys, model, sharding, part.world_size, launch)
    job = plain.plain_job(keys, model, layout, sharding, seq_len)
    assumptions = [assumption, on_part, sharding.assumption, _of_samples(job, "cutoff_len")]
    if launch is None:
        assumptions.append("started with `llamafactory-cli train`, as no command was given")
    return _Found(part=part, model=model, job=job, layout=layout, processes=processes, assumptions=assumptions)


def _swift(given: _Given) -> _Found:
    keys = Keys(given.configuration, swift_sft.DEFAULTS)
    seq_len = keys.count("max_length")
    model, assumption = model_of(given.configuration, given.model, seq_len or given.seq_len)
    sharding = sharding_of(keys, given.setup)
    processes = given.processes
    part, on_part = _part_of(given.cluster, processes)
    launch = processes.launch if processes else None
    layout = swift_sft.sft_layout(keys, model, sharding, part.world_size, launch)
    job = swift_sft.sft_job(keys, model, layout, seq_len or given.seq_len, launch)
    length = f"max_length is not given, which cuts no sample: taken are {job.seq_len:,} tokens (--seq-len)"
    assumptions = [assumption, on_part, sharding.assumption, _of_samples(job, "max_length") if seq_len else length]
    return _Found(part=part, model=model, job=job, layout=layout, processes=processes, assumptions=assumptions)


def _deepspeed(given: _Given) -> _Found:
    keys = Keys(given.configuration, {})
    reference = given.model or deepspeed_alone.model_in_text(given.configuration.part)
    if reference is None:
        raise SpecError(
            "a DeepSpeed configuration alone, and no model",
            where=given.configuration.part.place(None),
            remedy="name it with --model, or give the trainer's YAML or command too",
        )
    model, _ = model_of(given.configuration, reference, given.seq_len)
    gpus = deepspeed_alone.gpus_of(keys)
    part, on_part = part_with(given.cluster, *_machines(given.cluster, gpus))
    layout = deepspeed_alone.alone_layout(keys, part.world_size)
    job = deepspeed_alone.alone_job(keys, layout, given.seq_len)
    named = "" if given.model else f"the model is {model.name}, the only one that the text names"
    assumptions = [named, on_part, *deepspeed_alone.assumptions(job)]
    return _Found(part=part, model=model, job=job, layout=layout, processes=None, assumptions=assumptions)


def _machines(cluster: Cluster, gpus: int | None) -> tuple[int, int]:
    """Machines, and GPUs of each, that hold a number of GPUs."""
    if gpus is None or gpus > cluster.world_size:
        return cluster.nodes, cluster.gpus_per_node
    if gpus <= cluster.gpus_per_node:
        return 1, gpus
    nodes, rest = divmod(gpus, cluster.gpus_per_node)
    return (cluster.nodes if rest else nodes), cluster.gpus_per_node


def _part_of(cluster: Cluster, processes: Processes | None) -> tuple[Cluster, str]:
    """The machines and GPUs of a cluster that a command uses, and a sentence on them; all where it asks for more."""
    if processes is None:
        return cluster, ""
    return part_with(
        cluster,
        processes.nodes or cluster.nodes,
        processes.gpus_per_node or cluster.gpus_per_node,
        "that the command uses",
    )


def part_with(cluster: Cluster, nodes: int, gpus: int, why: str = "that it is for") -> tuple[Cluster, str]:
    """So many machines and GPUs of a cluster, and a sentence on them; all where it has fewer."""
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
