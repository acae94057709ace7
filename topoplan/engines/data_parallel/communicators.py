"""The NCCL communicators of a rank whose trainer splits data only.

PyTorch creates the communicator of a process group at the group's first operation, since these trainers pass no
device_id to `init_process_group` (accelerate `state.py`, PartialState; DeepSpeed `comm/torch.py`; verl
`workers/fsdp_workers.py`). The default group has all ranks: barriers, and the loss that is gathered for the log
(transformers `trainer.py::_nested_gather`). A one-dimensional device mesh over all ranks is the default group itself
(PyTorch `distributed/device_mesh.py::_init_process_groups`), so DDP and full sharding have no other group.
"""

from __future__ import annotations

from topoplan.engines.data_parallel.parameter_bytes import shards_of
from topoplan.engines.data_parallel.sharding import sharding_of
from topoplan.layout.layout import Layout
from topoplan.network.nccl_buffers import Communicator, Use, UsedGroup, communicators_of
from topoplan.network.placement import Group
from topoplan.specs.case import Case

LOGGED: tuple[Use, ...] = ("gather", "small all-reduce")
"""What the default group is used for, whatever is sharded."""


def used_groups(case: Case, layout: Layout) -> list[UsedGroup]:
    """Return the groups of more than one rank, and what is sent in them; a group of one if the trainer creates it.

    DDP all-reduces gradients in the default group. ZeRO clones the default group; in the clone, stages 1 and 2
    all-reduce each bucket, whatever reduce_scatter says (DeepSpeed
    `runtime/zero/stage_1_and_2.py::allreduce_and_scatter`), and gather weights. FSDP2 gathers weights and
    reduce-scatters gradients; hybrid sharding does so inside a node, on a two-dimensional mesh, and all-reduces the
    shards between nodes (PyTorch `_fully_shard/_fsdp_collectives.py::foreach_reduce`). The gradient norm is a scalar in
    the group that shards the weights. Ranks of one sequence are neighbours: Ulysses exchanges heads for tokens and
    gathers results (verl `utils/ulysses.py`, DeepSpeed `sequence/layer.py`, ms-swift `trainers/sequence_parallel`);
    context parallelism gathers keys and values (PyTorch `distributed/tensor/experimental/_attention.py`, whose
    rotate_method defaults to an all-gather).
    """
    how, world = sharding_of(layout), layout.world_size
    ranks = shards_of(layout, case.cluster.gpus_per_node).weights
    everyone = Group(world, 1)
    found: list[UsedGroup] = []

    def add(name: str, group: Group, *uses: Use) -> None:
        if group.size > 1 or (not found and case.traits.distributes_one_gpu):
            found.append(UsedGroup(name, group, frozenset(uses)))

    if how.own_group:
        add("all ranks", everyone, *LOGGED)
        reduced: tuple[Use, ...] = () if how.divides_weights else ("large all-reduce",)
        add("weights and gradients", everyone, "gather", "small all-reduce", *reduced)
    elif not how.divides_weights:
        add("all ranks, gradients", everyone, *LOGGED, "large all-reduce")
    elif ranks == world:
        add("all ranks, weights and gradients", everyone, *LOGGED)
    else:
        add("all ranks", everyone, *LOGGED)
        add("weights and gradients", Group(ranks, 1), "gather", "small all-reduce")
        add("replicas in other nodes", Group(world // ranks, ranks), "large all-reduce")
    add("ulysses", Group(layout.ulysses, 1), "gather", "all-to-all")
    add("cp", Group(layout.cp, layout.ulysses), "gather")
    if case.traits.sends_weights:
        add("weights to the explorer", Group(2, 1), "gather")
    return found


def communicators(case: Case, layout: Layout) -> tuple[Communicator, ...]:
    """Return the communicators of a rank with their memory."""
    return communicators_of(used_groups(case, layout), case.cluster, case.profile)


def communicators_bytes(case: Case, layout: Layout) -> int:
    """Return the device memory of all communicators of a rank."""
    return sum(one.device_bytes for one in communicators(case, layout))
