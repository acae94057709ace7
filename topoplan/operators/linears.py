"""The linear layers of a model, by the names that adapters are requested by.

`all-linear` of `megatron sft` means every `TELinear`, `TELayerNormColumnParallelLinear` and `TEGroupedLinear` except
the output layer (ms-swift 4.6.0 `swift/megatron/utils/utils.py::find_all_linears`): attention, MLPs, shared and routed
experts and a multi-token-prediction layer's eh_proj. The router and a shared expert's gate are of none of these
classes.
"""

from __future__ import annotations

from functools import lru_cache

from topoplan.operators.adapters import target_of
from topoplan.operators.layers import USE, WHOLE, eager_ops, layer_tensors
from topoplan.operators.op import Linear
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model


@lru_cache(maxsize=4096)
def layer_linears(model: Model, layer: Layer) -> tuple[Linear, ...]:
    """Return the linear layers of one layer as Hugging Face builds it.

    In a mixture of experts they are those of attention and of the shared expert.
    """
    ops = eager_ops(model, layer, USE, WHOLE)
    return tuple(weight for op in ops for weight in op.weights if isinstance(weight, Linear))


@lru_cache(maxsize=4096)
def megatron_linears(model: Model, layer: Layer) -> tuple[Linear, ...]:
    """Return the linear layers of one layer as megatron-core builds it."""
    return tuple(weight for weight in layer_tensors(model, layer) if isinstance(weight, Linear))


@lru_cache(maxsize=64)
def linear_names(model: Model) -> tuple[str, ...]:
    """Return the names of all `layer_linears` of a model."""
    return tuple(dict.fromkeys(linear.name for layer in model.layers for linear in layer_linears(model, layer)))


def adapted(job: Job, linear: Linear) -> bool:
    """Return whether the job puts an adapter on a linear layer."""
    if job.finetuning not in ("lora", "qlora"):
        return False
    return "all" in job.lora_target or linear.name in job.lora_target


@lru_cache(maxsize=64)
def target_names(model: Model) -> tuple[str, ...]:
    """Return all names by which adapters of the decoder may be requested."""
    linears = (linear for layer in model.layers for linear in megatron_linears(model, layer))
    return tuple(dict.fromkeys(target_of(linear.name) for linear in linears))
