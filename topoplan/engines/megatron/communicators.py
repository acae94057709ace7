"""The NCCL communicators that a rank of Megatron actually uses.

PyTorch creates the communicator of a process group at the group's first operation, since Megatron and its adapter pass
no device_id to `init_process_group` (`ProcessGroupNCCL`). A single isend or irecv uses a communicator of just the two
ranks; those of a batch use the group's own. Gloo groups take no device memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from topoplan.layout.layout import Layout, Sharding, Step, Switches, stages_of
from topoplan.network.nccl_buffers import Communicator, Use, UsedGroup, communicators_of
from topoplan.network.placement import Group, group
from topoplan.operators.dispatch import dispatcher_of
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile


def communicators(case: Case, layout: Layout) -> tuple[Communicator, ...]:
    """Return the communicators of a rank: the world, and every group of more than one rank.

    Not included: groups used only for checkpoints or logging, groups that a trainer adds, and the buffers of the flex
    dispatcher, which DeepEP allocates outside NCCL.
    """
    cluster, profile = case.cluster, case.profile
    is_flex = layout.ep > 1 and dispatcher_of(case, layout) == "flex"
    return _communicators(_grid(layout), _shared_embedding(case, layout), cluster, profile, is_flex)


@lru_cache(maxsize=1 << 14)
def _communicators(
    grid: Layout, embedding: tuple[int, ...], cluster: Cluster, profile: Profile, is_flex: bool
) -> tuple[Communicator, ...]:
    return communicators_of(_used_groups(grid, embedding, is_flex=is_flex), cluster, profile)


def _grid(layout: Layout) -> Layout:
    """Return only what communicators depend on, as a cache key shared by layouts that differ in the rest."""
    return Layout(
        degrees=replace(layout.degrees, vpp=min(2, layout.vpp), pipeline_layout=None),
        step=Step(sequence_parallel=layout.sequence_parallel),
        states=Sharding(distributed_optimizer=layout.distributed_optimizer),
        switches=Switches(cp_comm_type=layout.cp_comm_type),
    )


def communicators_bytes(case: Case, layout: Layout) -> int:
    """Return the device memory of all communicators of a rank."""
    return sum([one.device_bytes for one in communicators(case, layout)])


def embedding_ranks(case: Case, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a copy of the word embedding.

    Source: Megatron-LM `pretrain_gpt.py::get_embedding_ranks`.
    """
    model, job = case.model, case.job
    ranks = {0, layout.pp - 1} if model.tie_word_embeddings else {0}
    for rank, chunks in enumerate(stages_of(model, job, layout) if job.mtp_num_layers else ()):
        if chunks[-1].mtp_layers:
            ranks.add(rank)
    return tuple(sorted(ranks))


def _shared_embedding(case: Case, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline ranks that sum the gradients of their embedding copies; empty if there is only one copy."""
    model, job = case.model, case.job
    ranks = embedding_ranks(case, layout) if model.tie_word_embeddings or job.mtp_num_layers else ()
    return ranks if len(ranks) > 1 else ()


def _exchange(name: str, shape: Group, *, is_batched: bool) -> list[UsedGroup]:
    """Return the send and receive with the previous and the next rank.

    Batched operations use the group's communicator, single ones a communicator of two ranks per neighbor.
    """
    if is_batched:
        return [UsedGroup(name, shape, frozenset({"neighbours"}))]
    pair = Group(2, shape.stride)
    return [UsedGroup(f"{name}, {end}", pair, frozenset({"neighbours"})) for end in ("rank before", "rank after")]


def _used_groups(layout: Layout, embedding: tuple[int, ...], *, is_flex: bool) -> list[UsedGroup]:
    """Return the groups and what is sent in them.

    Groups: megatron-core 0.16 `core/parallel_state.py::initialize_model_parallel`. Operations: a barrier and scalars in
    the world (`training/initialize.py`); the gradient norm in a second group of all ranks
    (`core/optimizer/__init__.py`, intra_dist_opt_group); `core/tensor_parallel/mappings.py`; gradients and weights in
    `core/distributed/param_and_grad_buffer.py`, and the loss in the same group;
    `core/pipeline_parallel/p2p_communication.py`; `core/transformer/moe/token_dispatcher.py`
    (MoEAlltoAllTokenDispatcher); `core/distributed/finalize_model_grads.py` for the embedding; Transformer Engine
    `context_parallel.py`.
    """
    everyone = Group(layout.world_size, 1)
    sharded: Use = "gather" if layout.distributed_optimizer else "large all-reduce"
    groups = [UsedGroup("world", everyone, frozenset({"small all-reduce"}))]

    def add(name: str, shape: Group, *uses: Use) -> None:
        if shape.size > 1:
            groups.append(UsedGroup(name, shape, frozenset(uses)))

    if layout.distributed_optimizer:
        add("gradient norm", everyone, "small all-reduce")
    add("tp", group(layout, "tp"), "gather" if layout.sequence_parallel else "large all-reduce", "small all-reduce")
    if layout.cp_comm_type == "a2a":
        add("cp", group(layout, "cp"), "all-to-all")
    elif layout.cp > 1:
        groups += _exchange("cp", group(layout, "cp"), is_batched=layout.cp == 2)
    add("dp x cp", group(layout, "dp_cp"), sharded, "small all-reduce")
    if layout.pp > 1:
        groups += _exchange("pp", group(layout, "pp"), is_batched=layout.vpp == 1)
    if layout.ep > 1 or layout.etp > 1:
        # The flex dispatcher's kernels do not use NCCL; its ranks gather addresses once.
        add("ep", group(layout, "ep"), "gather" if is_flex else "all-to-all")
        add("etp", group(layout, "etp"), "gather")
        add("etp x ep", group(layout, "tp_ep"), "gather")
        add("expert dp", group(layout, "edp"), sharded)
    if embedding:
        stages = (embedding[-1] - embedding[0]) // (len(embedding) - 1)
        apart = Group(len(embedding), stages * group(layout, "pp").stride)
        add("embedding (first and last stage)", apart, "large all-reduce")
    return groups
