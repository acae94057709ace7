"""LoRA on Megatron-core, as mcore_bridge builds it: which adapters a rank holds.

Source: mcore_bridge 1.6.5 `tuners/lora.py` (LoraParallelLinear.update_layer). Of a layer that is split over its outputs
(column), A is whole on every rank and B is split as the layer is; of one that is split over its inputs (row), A is
split and B whole; of one that is whole on every rank, both are. Experts have one of each an expert, and none with
expert tensor parallel. PEFT makes them fp32, and `Float16Module` bf16 again (`core/transformer/module.py`; ms-swift
`swift/megatron/utils/megatron_lm_utils.py::wrap_model`), so that they are weights as any others: two bytes, with a
gradient and an optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.operators.eager_linears import LORA_RANK
from topoplan.operators.megatron_linears import megatron_linears, side_of, target_of
from topoplan.operators.params import RankParameters, Tensor, cut
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model

DROPOUT = 0.05
"""ms-swift `swift/megatron/arguments/megatron_args.py::MegatronTunerMixin`, lora_dropout."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA beside the linear layers of a model whose own weights are frozen."""

    rank: int
    targets: tuple[str, ...]
    """Names of the layers that have one; `all` for every one."""

    def on(self, name: str) -> bool:
        """Whether a linear layer has one."""
        return "all" in self.targets or target_of(name) in self.targets


def adapters_of(job: Job) -> Adapters | None:
    """The adapters of a job; None where it trains the weights themselves."""
    return Adapters(job.lora_rank or LORA_RANK, job.lora_target) if job.finetuning == "lora" else None


@lru_cache(maxsize=4096)
def adapter_tensors(model: Model, layer: Layer, adapters: Adapters) -> tuple[Tensor, ...]:
    """The adapters of one layer."""
    tensors = []
    for linear in megatron_linears(model, layer):
        if not adapters.on(linear.name):
            continue
        side, rank = side_of(linear.name), adapters.rank
        first, second = rank * linear.inputs, rank * linear.outputs
        a, b = f"{linear.name}.lora_A", f"{linear.name}.lora_B"
        if linear.experts:
            tensors += [Tensor(a, linear.experts * first, "expert"), Tensor(b, linear.experts * second, "expert")]
        else:
            tensors.append(Tensor(a, first, "tp" if side == "row" else "replicated"))
            tensors.append(Tensor(b, second, "tp" if side == "column" else "replicated"))
    return tuple(tensors)


@lru_cache(maxsize=1 << 14)
def adapter_parameters(model: Model, layer: Layer, adapters: Adapters, tp: int, ep: int, etp: int) -> RankParameters:
    """Elements of a layer's adapters on one rank."""
    dense = expert = 0
    for tensor in adapter_tensors(model, layer, adapters):
        elements = cut(tensor, tp, ep, etp)
        if tensor.split == "expert":
            expert += elements
        else:
            dense += elements
    return RankParameters(dense, expert)


def replicated_elements(model: Model, layer: Layer, adapters: Adapters) -> int:
    """Elements of a layer's adapters that are whole on every rank of a tensor-parallel group.

    With sequence parallel each rank has the gradient of its own tokens, and they are summed once a step
    (`core/distributed/finalize_model_grads.py::_allreduce_non_tensor_model_parallel_grads`).
    """
    return sum(t.elements for t in adapter_tensors(model, layer, adapters) if t.split == "replicated")
