"""From a configuration of a Megatron trainer to the job and the layout that it would really run on a cluster.

What each trainer makes of its keys is in `mca.py` and `swift.py`, with its place in the trainer's source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from topoplan.check.job import mca, swift
from topoplan.check.job.models import model_of
from topoplan.check.job.processes import Processes, processes_for
from topoplan.check.job.values import Keys
from topoplan.check.read.setup import Configuration, Setup
from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.cluster import Cluster
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec


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
) -> Translation:
    """The job and the layout of a configuration on a cluster.

    `model` takes the place of the one that the configuration names. Raises InputError where it cannot be predicted:
    the message says why.
    """
    is_mca = setup.uses_mca(configuration)
    if not is_mca and configuration.trainer != "swift-megatron":
        raise SpecError("only Megatron trainers are predicted so far", where=configuration.part.place(None))
    keys = Keys(configuration, mca.defaults() if is_mca else swift.DEFAULTS)
    length_key = "cutoff_len" if is_mca else "max_length"
    seq_len = keys.count(length_key)
    if seq_len is None:
        keys.fail(length_key, f"{length_key} is not given, and the model's own is no length of samples")
    built, assumption = model_of(configuration, model, seq_len)
    processes = processes_for(setup, configuration)
    part, on_part = _part_of(cluster, processes)
    layout = (mca if is_mca else swift).layout_of(keys, built, part.world_size)
    job = mca.job_of(keys, built, layout, seq_len) if is_mca else swift.job_of(keys, built, seq_len, processes)
    spec = Spec(cluster=part, model=built, job=job, profile=profile, path=configuration.part.place(None))
    assumptions = [assumption, on_part]
    if not job.packs:
        assumptions.append(f"every sequence is taken to be {length_key} long, {seq_len:,} tokens")
    if is_mca and keys.value("finetuning_type") != "full":
        assumptions.append(f"finetuning_type {keys.value('finetuning_type')} trains all weights in this trainer")
    if layout.ep > 1 and (dispatcher := keys.value("moe_token_dispatcher_type")) not in ("alltoall", "flex"):
        assumptions.append(f"the {dispatcher} dispatcher is predicted as alltoall, which sends less")
    return Translation(
        configuration=configuration,
        spec=spec,
        layout=layout,
        processes=processes,
        assumptions=tuple(filter(None, assumptions)),
    )


def _part_of(cluster: Cluster, processes: Processes | None) -> tuple[Cluster, str]:
    """The machines and GPUs of a cluster that a command uses, and a sentence on them; all where it asks for more."""
    if processes is None:
        return cluster, ""
    nodes, gpus = processes.nodes or cluster.nodes, processes.gpus_per_node or cluster.gpus_per_node
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
    return part, f"predicted on the {nodes} x {gpus} GPUs that the command uses"
