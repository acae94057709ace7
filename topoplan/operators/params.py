"""Parameters: how many a model has, how many a rank holds, and how many adapters add.

The counts are exact, for a whole model and for each of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from topoplan.operators.adapters import Adapters
from topoplan.operators.layers import WHOLE, layer_tensors, te_ops
from topoplan.operators.op import Linear, Weight
from topoplan.specs.model import Layer, Model


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements that one rank holds, by the grid of ranks that shards their optimizer states."""

    dense: int = 0
    """Elements of the dense grid: optimizer states are sharded over dp * cp."""
    expert: int = 0
    """Elements of the expert grid: optimizer states are sharded over world / (etp * ep * pp)."""
    frozen: int = 0
    """Elements without gradients and optimizer states."""

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.expert + other.expert, self.frozen + other.frozen)

    def __mul__(self, times: int) -> RankParameters:
        return RankParameters(self.dense * times, self.expert * times, self.frozen * times)

    @property
    def total(self) -> int:
        """All elements on the rank."""
        return self.dense + self.expert + self.frozen


def embedding_tensors(model: Model) -> tuple[Weight, ...]:
    """Return the word embedding and, if the model learns positions (GPT-2), the position table."""
    tensors = [Weight("word_embeddings", model.vocab_size * model.hidden_size, "tp")]
    if model.learned_positions:
        tensors.append(Weight("position_embeddings", model.learned_positions * model.hidden_size, "replicated"))
    return tuple(tensors)


def head_tensors(model: Model) -> tuple[Weight, ...]:
    """Return the final norm and the output layer, which is absent if it is tied to the embedding."""
    norm = (Weight("final_layernorm", model.hidden_size * (2 if model.norm_bias else 1)),)
    if model.num_labels:
        return (*norm, Weight("score", model.num_labels * model.hidden_size, "replicated"))
    if model.tie_word_embeddings:
        return norm
    return (*norm, Weight("output_layer", model.vocab_size * model.hidden_size, "tp"))


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Return the exact number of parameters as Hugging Face counts them.

    Tied weights count once, multi-token-prediction layers do not count.
    """
    total = sum(tensor.elements for tensor in (*embedding_tensors(model), *head_tensors(model)))
    for layer in model.layers:
        total += sum(tensor.elements for tensor in layer_tensors(model, layer))
    if model.vision:
        total += model.vision.parameters
    return total


def cut(weight: Weight, tp: int, ep: int, etp: int) -> int:
    """Return the elements of a weight that one rank holds."""
    ranks = {"tp": tp, "expert": ep * etp, "expert_replicated": ep, "replicated": 1}
    return weight.elements // ranks[weight.split]


def _on_rank(weights: Iterable[Weight], tp: int, ep: int, etp: int) -> RankParameters:
    dense = expert = 0
    for weight in weights:
        elements = cut(weight, tp, ep, etp)
        if weight.split.startswith("expert"):
            expert += elements
        else:
            dense += elements
    return RankParameters(dense, expert)


@lru_cache(maxsize=65536)
def layer_parameters(model: Model, layer: Layer, tp: int, ep: int, etp: int) -> RankParameters:
    """Return the elements of one layer on one rank."""
    return _on_rank(layer_tensors(model, layer), tp, ep, etp)


@lru_cache(maxsize=4096)
def adapter_tensors(model: Model, layer: Layer, adapters: Adapters) -> tuple[Linear, ...]:
    """Return the adapter weights of one layer."""
    weights = (weight for op in te_ops(model, layer, WHOLE._replace(adapters=adapters)) for weight in op.weights)
    return tuple(weight for weight in weights if isinstance(weight, Linear) and weight.is_adapter)


@lru_cache(maxsize=1 << 14)
def adapter_parameters(model: Model, layer: Layer, adapters: Adapters, tp: int, ep: int, etp: int) -> RankParameters:
    """Return the elements of a layer's adapters on one rank."""
    return _on_rank(adapter_tensors(model, layer, adapters), tp, ep, etp)


def replicated_elements(model: Model, layer: Layer, adapters: Adapters) -> int:
    """Return the elements of a layer's adapters that every rank of a tensor-parallel group holds in full.

    With sequence parallelism each rank has the gradient for its own tokens only; the gradients are summed once per step
    (`core/distributed/finalize_model_grads.py::_allreduce_non_tensor_model_parallel_grads`).
    """
    return sum(t.elements for t in adapter_tensors(model, layer, adapters) if t.split == "replicated")


def padded_vocab_size(model: Model, tp: int, multiple: int) -> int:
    """Return the rows of the embedding, padded to a multiple of `multiple` * tp (make_vocab_size_divisible_by)."""
    unit = multiple * tp
    return -(-model.vocab_size // unit) * unit
