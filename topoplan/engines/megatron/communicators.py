"""The NCCL communicators that a rank of Megatron actually uses.

PyTorch creates the communicator of a process group at the group's first operation, since Megatron and its adapter pass
no device_id to `init_process_group` (`ProcessGroupNCCL`). A single isend or irecv uses a communicator of just the two
ranks; those of a batch use the group's own. Gloo groups take no device memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from topoplan.layout.layout import Layout, Sharding, Step, Switches, stages_of
from topoplan.network.nccl_buffers import ALONE, Communicator, Use, UsedGroup, communicators_of
from topoplan.network.placement import Group, group
from topoplan.operators.dispatch import dispatcher_of
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import Profile


def communicators(case: Case, layout: Layout) -> tuple[Communicator, ...]:
    """Return the communicators of a rank: the world, and every group of more than one rank.

    Not included: groups used only for checkpoints, groups of one rank, and the buffers of the flex dispatcher, which
    DeepEP allocates outside NCCL.
    """
    cluster, profile = case.cluster, case.profile
    is_flex = layout.ep > 1 and dispatcher_of(case, layout) == "flex"
    loop = _Loop(is_adapter=case.traits.is_adapter, has_experts=facts_of(case.model).is_moe, is_flex=is_flex)
    return _communicators(_grid(layout), _shared_embedding(case, layout), cluster, profile, loop)


class _Loop(NamedTuple):
    """What else of a run decides which groups are used."""

    is_adapter: bool
    """Whether the training loop is mcore_adapter's."""
    has_experts: bool
    is_flex: bool


@lru_cache(maxsize=1 << 14)
def _communicators(
    grid: Layout, embedding: tuple[int, ...], cluster: Cluster, profile: Profile, loop: _Loop
) -> tuple[Communicator, ...]:
    return communicators_of(_used_groups(grid, embedding, loop), cluster, profile)


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


def _exchange(name: str, shape: Group, *uses: Use, is_batched: bool) -> list[UsedGroup]:
    """Return the send and receive with the previous and the next rank, and what else is sent in the group.

    Batched operations use the group's communicator, single ones a communicator of two ranks per neighbor.
    """
    if is_batched:
        return [UsedGroup(name, shape, frozenset({"neighbours", *uses}))]
    pair = Group(2, shape.stride)
    found = [UsedGroup(f"{name}, {end}", pair, frozenset({"neighbours"})) for end in ("rank before", "rank after")]
    return [UsedGroup(name, shape, frozenset(uses)), *found] if uses else found


def _used_groups(layout: Layout, embedding: tuple[int, ...], loop: _Loop) -> list[UsedGroup]:
    """Return the groups and what is sent in them.

    Groups: megatron-core 0.16 `core/parallel_state.py::initialize_model_parallel`. Operations: a barrier and scalars in
    the world (`training/initialize.py`); the gradient norm in a second group of all ranks
    (`core/optimizer/__init__.py`, intra_dist_opt_group); `core/tensor_parallel/mappings.py`; gradients and weights in
    `core/distributed/param_and_grad_buffer.py`, and the loss in the same group;
    `core/pipeline_parallel/p2p_communication.py`; `core/transformer/moe/token_dispatcher.py`
    (MoEAlltoAllTokenDispatcher); `core/distributed/finalize_model_grads.py` for the embedding, the norms (tp) and,
    along the pipeline, the number of tokens; Transformer Engine `context_parallel.py`. For what is logged:
    `training/training.py::train_step` and ms-swift `megatron/trainers/base.py` (over tp x pp, and over dp, which is
    another group than dp x cp), mcore_adapter `trainer/trainer.py` (dp and pp), and
    `core/transformer/moe/moe_utils.py::reduce_aux_losses_tracker_across_ranks` (tp x cp).
    """
    everyone = Group(layout.world_size, 1)
    sharded: Use = "gather" if layout.distributed_optimizer else "large all-reduce"
    groups = [UsedGroup("world", everyone, frozenset({"small all-reduce"}))]

    def add(name: str, shape: Group, *uses: Use, across: Group = ALONE) -> None:
        if shape.size * across.size > 1:
            groups.append(UsedGroup(name, shape, frozenset(uses), across))

    if layout.distributed_optimizer:
        add("gradient norm", everyone, "small all-reduce")
    # With sequence parallelism, a step all-reduces the gradients of all norms, which is too much for a small one.
    in_layers: tuple[Use, ...] = ("gather",) if layout.sequence_parallel else ()
    add("tp", group(layout, "tp"), *in_layers, "large all-reduce", "small all-reduce")
    if layout.cp_comm_type == "a2a":
        add("cp", group(layout, "cp"), "all-to-all")
    elif layout.cp > 1:
        groups += _exchange("cp", group(layout, "cp"), is_batched=layout.cp == 2)
    add("dp x cp", group(layout, "dp_cp"), sharded, "small all-reduce")
    add("dp", group(layout, "dp"), "small all-reduce")
    if layout.pp > 1:
        groups += _exchange("pp", group(layout, "pp"), "small all-reduce", is_batched=layout.vpp == 1)
    if not loop.is_adapter:
        add("tp x pp", group(layout, "tp"), "small all-reduce", across=group(layout, "pp"))
    if loop.has_experts:
        add("tp x cp", Group(layout.tp * layout.cp, 1), "small all-reduce")
    if layout.ep > 1 or layout.etp > 1:
        # The flex dispatcher's kernels do not use NCCL; its ranks gather addresses once.
        add("ep", group(layout, "ep"), "gather" if loop.is_flex else "all-to-all")
        add("etp", group(layout, "etp"), "gather")
        add("etp x ep", group(layout, "tp_ep"), "gather")
        add("expert dp", group(layout, "edp"), sharded)
    if embedding:
        stages = (embedding[-1] - embedding[0]) // (len(embedding) - 1)
        apart = Group(len(embedding), stages * group(layout, "pp").stride)
        add("embedding (first and last stage)", apart, "large all-reduce")
    return groups
