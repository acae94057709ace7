"""How a job's fine-tuning method treats a model's parameters: trained, frozen, packed, adapted.

`all-linear` of `megatron sft` means every `TELinear`, `TELayerNormColumnParallelLinear` and `TEGroupedLinear` except
the output layer (ms-swift 4.6.0 `swift/megatron/utils/utils.py::find_all_linears`): attention, MLPs, shared and routed
experts and a multi-token-prediction layer's eh_proj, but not the router or a shared expert's gate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from topoplan.errors import SpecError, nearest
from topoplan.operators.adapters import LORA_RANK, target_of
from topoplan.operators.layers import USE, WHOLE, eager_ops, layer_tensors
from topoplan.operators.op import Linear
from topoplan.operators.params import layer_parameters, parameter_count
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.model import Layer, Model, Moe


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
    if job.finetuning not in ADAPTERS:
        return False
    return "all" in job.lora_target or linear.name in job.lora_target


@lru_cache(maxsize=64)
def target_names(model: Model) -> tuple[str, ...]:
    """Return all names by which adapters of the decoder may be requested."""
    linears = (linear for layer in model.layers for linear in megatron_linears(model, layer))
    return tuple(dict.fromkeys(target_of(linear.name) for linear in linears))


class Elements(NamedTuple):
    """Parameters of a model by treatment."""

    trained: int
    """With gradients and optimizer states, including adapters."""
    frozen: int
    """Without gradients and optimizer states, and not packed."""
    quantised: int = 0
    """Frozen and packed in 4 or 8 bits."""
    adapters: int = 0
    """Adapter weights: those of `trained` that are not in the base checkpoint."""

    @property
    def total(self) -> int:
        """All elements on a GPU that holds the whole model."""
        return self.trained + self.frozen + self.quantised


def _packed_elements(model: Model) -> int:
    """Return the weights that bitsandbytes packs: linear layers and experts, not embeddings, norms and output layer.

    transformers `quantizers/quantizer_bnb_4bit.py` and `integrations/bitsandbytes.py` (modules_to_not_convert has the
    output layer); LLaMA-Factory leaves the vision tower unpacked (`model/model_utils/quantization.py`).
    """
    total = 0
    for layer in model.layers:
        total += sum(linear.elements for linear in layer_linears(model, layer))
        if isinstance(layer.ffn, Moe):
            total += layer_parameters(model, layer, 1, 1, 1).expert
    return total


@lru_cache(maxsize=64)
def elements_of(model: Model, job: Job) -> Elements:
    """Return the elements of a model under a job's fine-tuning method, on one GPU that holds all of them.

    Raises SpecError if the model has none of the layers that adapters are requested for.
    """
    everything = parameter_count(model)
    tower = model.vision
    frozen_tower = 0
    if tower is not None:
        if job.freeze_vision_tower:
            frozen_tower += tower.encoder_parameters + tower.deepstack_parameters
        if job.freeze_multi_modal_projector:
            frozen_tower += tower.projector_parameters
    language = everything - (tower.parameters if tower else 0)
    if job.finetuning == "full":
        frozen = frozen_tower + (language if job.freeze_language_model else 0)
        return Elements(trained=everything - frozen, frozen=frozen)
    if job.finetuning == "freeze":
        chosen = trained_layers(model, job)
        trained = sum(layer_parameters(model, model.layers[place], 1, 1, 1).total for place in chosen)
        return Elements(trained=trained, frozen=everything - trained)
    rank = job.lora_rank or LORA_RANK
    adapters = sum(
        rank * (linear.inputs + linear.outputs)
        for layer in model.layers
        for linear in layer_linears(model, layer)
        if adapted(job, linear)
    )
    if not adapters:
        known = linear_names(model)
        raise SpecError(
            f"{model.name} has no linear layer called {' or '.join(job.lora_target)}",
            where="job.lora_target",
            expected=f"expected all, or some of {', '.join(known)}",
            remedy=nearest(job.lora_target[0], known) if job.lora_target else "",
        )
    packed = _packed_elements(model) if job.finetuning == "qlora" else 0
    return Elements(trained=adapters, frozen=everything - packed, quantised=packed, adapters=adapters)


def trained_layers(model: Model, job: Job) -> frozenset[int]:
    """Return the indexes of the layers whose own weights are trained."""
    if job.finetuning == "full":
        return frozenset() if job.freeze_language_model else frozenset(range(model.num_layers))
    if job.finetuning == "freeze":
        count = job.freeze_trainable_layers
        places = range(model.num_layers)
        return frozenset(places[-count:] if count > 0 else places[:-count])
    return frozenset()
