"""Parameters of every rank, compared with counts of real megatron-core models built without storage."""

from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, TIED, VISION, layout_of, spec_of
from topoplan import catalog
from topoplan.engines.megatron.states import stage_parameters
from topoplan.operators.layers import layer_tensors
from topoplan.operators.params import (
    RankParameters,
    embedding_tensors,
    layer_parameters,
    padded_vocab_size,
    parameter_count,
)
from topoplan.specs import known
from topoplan.specs.model import Model, Moe
from topoplan.trainers.case import case_of
from topoplan.trainers.traits import MCA, MEGATRON


def rank_parameters(
    model: str, *, world: int = 32, job: dict[str, Any] | None = None, **form: Any
) -> list[RankParameters]:
    spec = spec_of(model, nodes=max(1, world // 8), gpus_per_node=min(8, world), **(job or {}))
    layout = layout_of(spec, backend="mca", **form)
    case = case_of(spec, layout.backend)
    return [stage_parameters(case, layout, rank) for rank in range(layout.pp)]


# McaGPTModel of mcore_adapter (ROLL 8eb27cc) on megatron-core 0.16.1, on the meta device with a fake process group.
COUNTED = [
    (DENSE, {}, [8_190_735_360]),
    (DENSE, {"tp": 4, "pp": 2}, [1_023_955_456, 1_023_959_552]),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}, [589_768_960, 434_186_496, 434_186_496, 589_773_056]),
    (DENSE, {"tp": 16}, [512_209_920]),  # twice as many ranks as KV heads
    (MIXED, {}, [30_532_122_624]),
    (MIXED, {"tp": 2, "pp": 4, "ep": 4, "etp": 1}, [2_083_965_952, 1_928_383_488, 1_928_383_488, 2_083_968_000]),
]


@pytest.mark.parametrize(("model", "form", "counted"), COUNTED)
def test_a_rank_holds_as_many_parameters_as_the_model_itself(
    model: str, form: dict[str, Any], counted: list[int]
) -> None:
    assert [stage.total for stage in rank_parameters(model, **form)] == counted


# GPTModel of megatron-core 0.16.1, counted likewise (tests/verify/test_parameters_against_megatron.py has more counts).
def test_token_prediction_brings_a_layer_its_norms_its_projection_and_a_copy_of_the_embedding() -> None:
    spec = spec_of(LATENT)
    block = layer_parameters(spec.model, spec.model.layers[-1], 2, 8, 1).total
    hidden, table = 7168, 129_280 * 7168 // 2
    form = {"tp": 2, "pp": 4, "ep": 8, "etp": 1, "pipeline_layout": "Et*15|t*15|t*15|t*16"}
    without = rank_parameters(LATENT, **form | {"pipeline_layout": form["pipeline_layout"] + "L"})
    beside = rank_parameters(
        LATENT, job={"mtp_num_layers": 1}, **form | {"pipeline_layout": form["pipeline_layout"] + "mL"}
    )
    extra = [there.total - here.total for there, here in zip(beside, without, strict=True)]
    assert extra == [0, 0, 0, block + 3 * hidden + 2 * hidden * hidden // 2 + table]
    assert parameter_count(spec_of(LATENT, mtp_num_layers=1).model) == parameter_count(spec.model)


@pytest.mark.parametrize("name", [DENSE, MIXED, TIED, LATENT, "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b"])
def test_one_rank_without_any_split_holds_the_whole_model(name: str) -> None:
    model = known.model(name)
    total = sum(layer_parameters(model, layer, 1, 1, 1).total for layer in model.layers)
    ends = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2) + model.hidden_size
    assert total + ends == parameter_count(model) == catalog.model_parameters(name)


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_of_a_tensor_group_hold_each_split_tensor_once_and_replicas_each(name: str, tp: int) -> None:
    model = known.model(name)
    layer = model.layers[-1]
    tensors = layer_tensors(model, layer)
    replicated = sum(t.elements for t in tensors if t.split == "replicated")
    split = sum(t.elements for t in tensors if t.split == "tp")
    expert = sum(t.elements for t in tensors if t.split == "expert")
    rank = layer_parameters(model, layer, tp, 1, tp if expert else 1)
    assert rank.dense * tp == split + replicated * tp
    assert rank.expert * tp == expert


def test_tied_embeddings_are_held_once_on_one_stage_and_twice_on_two() -> None:
    model = known.model(TIED)
    table = model.vocab_size * model.hidden_size
    (alone,) = rank_parameters(TIED)
    first, last = rank_parameters(TIED, pp=2)
    assert alone.total == parameter_count(model)
    assert first.total + last.total == parameter_count(model) + table


def test_the_vision_tower_is_whole_on_every_rank_of_the_first_stage_alone() -> None:
    tower = known.model(VISION).vision
    language = known.model(DENSE)  # the language model of Qwen3-VL-8B
    first, last = rank_parameters(VISION, tp=4, pp=2)
    plain_first, plain_last = rank_parameters(DENSE, tp=4, pp=2)
    assert known.model(VISION).layers == language.layers
    assert first.total - plain_first.total == tower.parameters
    assert last.total == plain_last.total


def test_a_frozen_tower_has_trainable_deepstack_mergers_only() -> None:
    tower = known.model(VISION).vision
    frozen, _ = rank_parameters(VISION, pp=2)
    trained, _ = rank_parameters(
        VISION, pp=2, job={"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    )
    assert frozen.frozen == tower.encoder_parameters + tower.projector_parameters
    assert trained.frozen == 0
    assert trained.dense - frozen.dense == frozen.frozen
    assert frozen.total == trained.total


def test_a_frozen_language_model_leaves_the_tower() -> None:
    job = {"freeze_language_model": True, "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    first, last = rank_parameters(VISION, pp=2, job=job)
    tower = known.model(VISION).vision
    assert first.dense == tower.parameters
    assert last.dense == last.expert == 0
    assert last.frozen == last.total > 4e9


def test_megatron_pads_the_vocabulary_and_the_adapter_does_not() -> None:
    model = known.model("deepseek-ai/DeepSeek-V2")
    assert padded_vocab_size(model, 8, MCA.vocab_multiple) == model.vocab_size == 102400
    qwen = known.model(DENSE)
    assert padded_vocab_size(qwen, 8, MEGATRON.vocab_multiple) == 152_576
    assert padded_vocab_size(qwen, 1, MEGATRON.vocab_multiple) == qwen.vocab_size == 151_936


def active_parameter_count(model: Model) -> int:
    """Return the parameters that one token passes through: only the chosen experts, and no embedding."""
    inactive = sum(tensor.elements for tensor in embedding_tensors(model))
    for layer in model.layers:
        if isinstance(layer.ffn, Moe):
            routed = sum(t.elements for t in layer_tensors(model, layer) if t.split in ("expert", "expert_replicated"))
            inactive += routed * (layer.ffn.experts - layer.ffn.experts_per_token) // layer.ffn.experts
    vision = model.vision.parameters if model.vision else 0
    tied = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    return parameter_count(model) - inactive - vision + tied


@pytest.mark.parametrize(
    ("name", "published_billions"),
    # Model cards: Qwen3-30B-A3B activates 3.3B, Qwen3-235B-A22B 22B, DeepSeek-V3 37B with its embedding; Mixtral 12.9B.
    [(MIXED, 3.3), ("Qwen/Qwen3-235B-A22B", 22), (LATENT, 37), ("mistralai/Mixtral-8x7B-v0.1", 12.9)],
)
def test_active_parameters_are_about_those_of_the_model_card(name: str, published_billions: float) -> None:
    model = known.model(name)
    with_embedding = active_parameter_count(model) + model.vocab_size * model.hidden_size
    assert with_embedding / 1e9 == pytest.approx(published_billions, rel=0.03)


def test_active_parameters_of_a_dense_model_are_all_but_the_embedding() -> None:
    model = known.model(DENSE)
    assert active_parameter_count(model) == parameter_count(model) - model.vocab_size * model.hidden_size
