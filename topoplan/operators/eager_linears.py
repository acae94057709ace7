"""The linear layers of a model as Hugging Face builds them: what adapters are put on and what quantisation packs.

Names and shapes: transformers 5.6 `models/*/modeling_*.py` (`q_proj`, `gate_proj`, ...; DeepSeek's `q_a_proj` and
`kv_a_proj_with_mqa`; Qwen3-Next's `in_proj_qkvz`). Experts are no `nn.Linear` there but one parameter of three
dimensions each (`Qwen3MoeExperts`), so that no adapter finds them, and so is the router but in DeepSeek-V2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from topoplan.errors import SpecError, nearest
from topoplan.operators.params import layer_parameters, parameter_count
from topoplan.specs.job import Job
from topoplan.specs.model import AnyAttention, Attention, LatentAttention, Layer, Mlp, Model, Moe

LORA_RANK = 8
"""Rank where the job does not say: LLaMA-Factory `hparams/finetuning_args.py`, ms-swift `arguments/tuner_args.py` and
peft `tuners/lora/config.py` all have 8."""


LINEAR_ROUTERS = ("deepseek_v2",)
"""Model types whose router is an `nn.Linear` (`models/deepseek_v2/modeling_deepseek_v2.py`, DeepseekV2Moe.gate)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer: `outputs` x `inputs` weights."""

    name: str
    inputs: int
    outputs: int

    @property
    def elements(self) -> int:
        """Of its weight matrix."""
        return self.inputs * self.outputs


def _attention_linears(hidden: int, attention: AnyAttention) -> Iterator[Linear]:
    if isinstance(attention, Attention):
        query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        yield Linear("q_proj", hidden, query * (2 if attention.output_gate else 1))
        yield Linear("k_proj", hidden, key)
        yield Linear("v_proj", hidden, key)
        yield Linear("o_proj", query, hidden)
    elif isinstance(attention, LatentAttention):
        query = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        if attention.q_lora_rank:
            yield Linear("q_a_proj", hidden, attention.q_lora_rank)
            yield Linear("q_b_proj", attention.q_lora_rank, query)
        else:
            yield Linear("q_proj", hidden, query)
        yield Linear("kv_a_proj_with_mqa", hidden, attention.kv_lora_rank + attention.qk_rope_head_dim)
        key_value = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        yield Linear("kv_b_proj", attention.kv_lora_rank, key_value)
        yield Linear("o_proj", attention.heads * attention.v_head_dim, hidden)
    else:
        key = attention.key_heads * attention.key_head_dim
        value = attention.value_heads * attention.value_head_dim
        yield Linear("in_proj_qkvz", hidden, 2 * key + 2 * value)
        yield Linear("in_proj_ba", hidden, 2 * attention.value_heads)
        yield Linear("out_proj", value, hidden)


def _mlp_linears(hidden: int, width: int, *, gated: bool) -> Iterator[Linear]:
    if gated:
        yield Linear("gate_proj", hidden, width)
    yield Linear("up_proj", hidden, width)
    yield Linear("down_proj", width, hidden)


@lru_cache(maxsize=4096)
def layer_linears(model: Model, layer: Layer) -> tuple[Linear, ...]:
    """The linear layers of one block; of a mixture of experts only the shared one's."""
    linears = [*_attention_linears(model.hidden_size, layer.attention)]
    if isinstance(layer.ffn, Mlp):
        linears += _mlp_linears(model.hidden_size, layer.ffn.intermediate_size, gated=layer.ffn.gated)
        return tuple(linears)
    if model.model_type in LINEAR_ROUTERS:
        linears.append(Linear("gate", model.hidden_size, layer.ffn.experts))
    if layer.ffn.shared_intermediate_size:
        linears += _mlp_linears(model.hidden_size, layer.ffn.shared_intermediate_size, gated=layer.ffn.gated)
        if layer.ffn.shared_gate:
            linears.append(Linear("shared_expert_gate", model.hidden_size, 1))
    return tuple(linears)


def linear_names(model: Model) -> tuple[str, ...]:
    """All names that `layer_linears` has for a model."""
    return tuple(dict.fromkeys(linear.name for layer in model.layers for linear in layer_linears(model, layer)))


def adapted(job: Job, linear: Linear) -> bool:
    """Whether the job puts an adapter on a linear layer."""
    if job.finetuning not in ("lora", "qlora"):
        return False
    return "all" in job.lora_target or linear.name in job.lora_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Parameters of a model by what becomes of them."""

    trained: int
    """With gradient and optimizer state; adapters are among them."""
    frozen: int
    """Neither, and not packed."""
    quantised: int = 0
    """Frozen, in 4 or 8 bits."""
    adapters: int = 0
    """Of the trained ones, those that are not in the checkpoint."""

    @property
    def total(self) -> int:
        """All on a GPU that holds everything."""
        return self.trained + self.frozen + self.quantised


def _packed_elements(model: Model) -> int:
    """Weights that bitsandbytes packs: the linear layers and the experts, not embeddings, norms and output layer.

    transformers `quantizers/quantizer_bnb_4bit.py` and `integrations/bitsandbytes.py` (modules_to_not_convert has the
    output layer); the vision tower stays as it is under LLaMA-Factory (`model/model_utils/quantization.py`).
    """
    total = 0
    for layer in model.layers:
        total += sum(linear.elements for linear in layer_linears(model, layer))
        if isinstance(layer.ffn, Moe):
            total += layer_parameters(model, layer, 1, 1, 1).expert
    return total


def elements_of(model: Model, job: Job) -> Elements:
    """Elements of a model under a job's way of fine-tuning, on one GPU that holds all of them.

    Raises SpecError for adapters on layers none of which the model has.
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
        count = job.freeze_trainable_layers
        chosen = model.layers[-count:] if count > 0 else model.layers[:-count]
        trained = sum(layer_parameters(model, layer, 1, 1, 1).total for layer in chosen)
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
    """Places of the layers whose own weights are trained."""
    if job.finetuning == "full":
        return frozenset() if job.freeze_language_model else frozenset(range(model.num_layers))
    if job.finetuning == "freeze":
        count = job.freeze_trainable_layers
        places = range(model.num_layers)
        return frozenset(places[-count:] if count > 0 else places[:-count])
    return frozenset()
