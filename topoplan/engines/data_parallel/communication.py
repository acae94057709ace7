"""What the ranks of a layout that splits data only send each other in a step, and how long it takes without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from topoplan.engines.data_parallel.parameter_bytes import parameter_bytes, shards_of
from topoplan.engines.data_parallel.sharding import loops_experts, sharding_of
from topoplan.engines.data_parallel.states import BUCKET, reduced_bytes, wire_bytes
from topoplan.layout.layout import Layout
from topoplan.network.collectives import all_gather_s, all_reduce_s
from topoplan.network.placement import Group
from topoplan.operators.finetuning import Elements, layer_linears
from topoplan.operators.machine import elementwise_s
from topoplan.operators.op import BF16, Collective
from topoplan.specs.case import Case
from topoplan.specs.model import Model, Moe

GATHER_COPY_BYTES = 8
"""Bytes moved on the card per gathered parameter and micro-batch: copied out of the gathered buffer twice (PyTorch
`distributed/fsdp/_fully_shard/_fsdp_collectives.py`, foreach_all_gather_copy_out: 2 x 4 bytes)."""
REDUCE_COPY_BYTES = 12
"""Bytes moved on the card per gradient and micro-batch, into the buffer that is reduced in fp32 (foreach_reduce in
`_fsdp_collectives.py`)."""

JOINED_QKV = ("qwen", "gpt2")
"""Model types whose queries, keys and values come from one linear layer (`modeling_qwen.py`, c_attn)."""

When = Literal["forward", "backward", "last", "after"]
"""When ranks communicate: in every forward, in every backward, in the last backward of a step, or after all work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What one kind of group sends at one moment."""

    name: str
    when: When
    calls: int
    """Number of collectives into which all tensors of the moment are split."""
    call: Collective
    """One of the collectives: all-gather, reduce-scatter or all-reduce."""

    @property
    def seconds(self) -> float:
        """Seconds of all calls, with nothing overlapped."""
        return self.calls * self.call.call_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication among the ranks that share states."""

    sendings: tuple[Sending, ...] = ()
    first_share: float = 0.0
    """Fraction of a pass's communication that nothing hides: that of the first unit."""
    copies_s: float = 0.0
    """Seconds of copies on the card per micro-batch."""

    def seconds(self, when: When) -> float:
        """Return the seconds of everything that is sent at one moment."""
        return sum([one.seconds for one in self.sendings if one.when == when])


def _calls(case: Case, layout: Layout, elements: Elements) -> int:
    """Return the number of collectives into which the gathers, or the reductions, of one pass are split.

    FSDP2: one per layer. Stage 3: one per submodule, which for large models are linear layers
    (`partitioned_param_coordinator.py::fetch_sub_module`). Stages 1 and 2: one per bucket.
    """
    model, unit = case.model, sharding_of(layout).unit
    if unit == "block":
        return model.num_layers + 2
    if unit == "submodule":
        return sum(gathered_linears(case, layout)) + 2 * (model.num_layers + 1)
    return max(1, round(elements.trained / BUCKET))


def gathered_linears(case: Case, layout: Layout) -> tuple[int, int]:
    """Return the number of linear layers outside experts, and inside all experts if experts run one by one.

    A trainer can make stage 3 gather all experts of a layer at once (DeepSpeed `set_z3_leaf_modules`; LLaMA-Factory
    `model/model_utils/moe.py`, ms-swift since 3.9), which saves two thirds of the host's work and is not assumed here.
    """
    others, in_experts = _linears(case.model)
    return others, in_experts if loops_experts(case, layout) else 0


@lru_cache(maxsize=64)
def _linears(model: Model) -> tuple[int, int]:
    joined = 2 if model.model_type in JOINED_QKV else 0
    routed = (layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe))
    return (
        sum(len(layer_linears(model, layer)) - joined for layer in model.layers),
        sum(moe.experts * (3 if moe.gated else 2) for moe in routed),
    )


def communication_of(case: Case, layout: Layout, elements: Elements) -> Communication:
    """Return what the ranks send each other.

    ZeRO (arXiv 1910.02054, section 7): stages 1 and 2 send as much as plain data parallelism, stage 3 one and a half
    times as much. Stage 1 reduces gradients once per step, stage 2 and full sharding after every micro-batch.
    """
    model, cluster, job, profile = case.model, case.cluster, case.job, case.profile
    each, shares = parameter_bytes(job, layout), shards_of(layout, cluster.gpus_per_node)
    world = Group(layout.world_size, 1)
    if layout.world_size == 1:
        return Communication()

    calls = _calls(case, layout, elements)

    def sent(name: str, kind: str, when: When, size: float, ranks: Group = world) -> Sending:
        pieces, seconds = (1, all_reduce_s) if kind == "all-reduce" else (calls, all_gather_s)
        call = Collective(kind, ranks, size / pieces, seconds(ranks, size / pieces, cluster, profile))
        return Sending(name=name, when=when, calls=pieces, call=call)

    whole = wire_bytes(elements, each)
    gradients = BF16 * elements.trained
    reduced = reduced_bytes(job, layout) * elements.trained
    unit = 1.0 / (model.num_layers + 1)
    reduced_in: When
    how = sharding_of(layout)
    if not how.divides_optimizer:
        size = each.gradient * elements.trained
        return Communication(sendings=(sent("gradients", "all-reduce", "last", size),), first_share=unit)
    if not how.divides_weights:
        reduced_in = "backward" if how.divides_gradients else "last"
        return Communication(
            sendings=(
                sent("gradients to their shards", "reduce-scatter", reduced_in, gradients),
                sent("weights after the step", "all-gather", "after", gradients),
            ),
            first_share=unit,
        )
    copied = GATHER_COPY_BYTES * elements.total + REDUCE_COPY_BYTES * elements.trained
    copies = elementwise_s(copied, cluster.gpu, profile, kernels=0)
    node = Group(shares.weights, 1)
    reduced_in = "backward" if layout.sync_each_batch else "last"
    sendings = [
        sent("weights for forward", "all-gather", "forward", whole, node),
        sent("weights for backward", "all-gather", "backward", whole, node),
        sent("gradients to their shards", "reduce-scatter", reduced_in, reduced, node),
    ]
    if shares.weights < layout.world_size:
        across = Group(layout.world_size // shares.weights, shares.weights)
        part = reduced / shares.weights
        sendings.append(sent("shards of gradients across nodes", "all-reduce", reduced_in, part, across))
    return Communication(sendings=tuple(sendings), first_share=unit, copies_s=copies)
