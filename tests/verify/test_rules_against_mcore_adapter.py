"""Compare rules with what LLaMA-Factory's adapter refuses, if mcore_adapter is installed (it is not on PyPI)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.layout.specs import DENSE, VISION, make_layout, make_spec
from tests.verify.llamafactory import NOT_BUILT_BY_THE_ADAPTER
from topoplan import catalog
from topoplan.engines.megatron.rules import RULES
from topoplan.layout.layout import Recompute
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.specs import known
from topoplan.trainers.case import case_of
from topoplan.trainers.llamafactory.key_list import templates

SUPPORTED_MODEL_TYPES = frozenset(templates().supported_model_types)

REASON = "mcore_adapter is not installed (https://github.com/alibaba/ROLL, mcore_adapter/)"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("mcore_adapter", reason=REASON)

pytestmark = [pytest.mark.verify, pytest.mark.filterwarnings("ignore")]

RULE = {rule.name: rule for rule in RULES}


@pytest.fixture
def batch_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context-parallel rank's part of a batch, from the adapter's own function."""
    from mcore_adapter.models import model_factory

    monkeypatch.setattr(model_factory.mpu, "get_context_parallel_rank", lambda: 0)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, pin_memory=False, **keys: tensor(*values, **keys))
    model = SimpleNamespace(config=SimpleNamespace(context_parallel_size=2))
    return lambda **batch: model_factory.PretrainedModel.get_batch_on_this_cp_rank(model, batch)


def test_a_batch_with_images_cannot_be_split_for_context_parallelism(batch_of_a_rank: Any) -> None:
    assert batch_of_a_rank(labels=torch.zeros(1, 64))["labels"].shape == (1, 32)
    with pytest.raises(RuntimeError, match="is invalid for input of size 3"):
        batch_of_a_rank(image_grid_thw=torch.ones(1, 3, dtype=torch.long))
    assert batch_of_a_rank(pixel_values=torch.zeros(16, 1176))["pixel_values"].shape == (16, 588)  # half of each patch
    spec = make_spec(VISION)
    assert RULE["context-parallel"].failed(case_of(spec, "mca"), make_layout(spec, cp=2)) is not None


@pytest.mark.parametrize(("layers", "accepted"), [(3, False), (4, True)])
def test_the_first_stage_has_more_layers_than_deepstack_inputs(layers: int, accepted: bool) -> None:
    from mcore_adapter.models.qwen3_vl.transformer_block import Qwen3VLTransformerBlock

    block = SimpleNamespace(pre_process=True, layers=[None] * layers)
    # After the assertion, it accesses attributes that this block does not have.
    refused, said = (AttributeError, "") if accepted else (AssertionError, "should be on the first pp-stage")
    with pytest.raises(refused, match=said):
        Qwen3VLTransformerBlock.forward(block, torch.zeros(1), None, deepstack_visual_embeds=[torch.zeros(1)] * 3)
    spec = make_spec(VISION)
    text = f"Et*{layers}|t*{36 - layers}L"
    layout = make_layout(spec, pp=2, pipeline_layout=text)
    assert (RULE["vision-first-stage"].failed(case_of(spec, layout.backend), layout) is None) == accepted


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_pipeline_split_is_that_of_the_adapter(pp: int, vpp: int, balanced: bool) -> None:
    from mcore_adapter.models.model_config import McaModelConfig

    if pp == 1 < vpp:
        pytest.skip("the process groups refuse it")
    text = balanced_pipeline_layout(36, pp, vpp) if balanced else None
    spec = make_spec(DENSE, nodes=pp)
    layout = make_layout(spec, pp=pp, vpp=vpp, pipeline_layout=text)
    try:
        McaModelConfig(
            num_layers=36,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            hidden_dropout=0.0,
            bf16=True,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_model_parallel_layout=text,
        )
    except (ValueError, AssertionError) as error:
        refused: str | None = str(error)
    else:
        refused = None
    assert (RULE["pipeline-split"].failed(case_of(spec, layout.backend), layout) is None) == (refused is None), refused


@pytest.mark.parametrize("off", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_gathering_parameters_is_overlapped_only_with_what_it_needs(off: str) -> None:
    from mcore_adapter.training_args import MegatronArguments

    switches = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    MegatronArguments(**switches)
    with pytest.raises(AssertionError):
        MegatronArguments(**switches | {off: False})
    spec = make_spec()
    ours = {"use_distributed_optimizer": "distributed_optimizer"}.get(off, off)
    assert RULE["overlap"].failed(case_of(spec, "mca"), make_layout(spec, **{ours: False})) is not None


def test_uniform_recomputation_of_deepstack_models_is_one_layer_at_a_time() -> None:
    from mcore_adapter.models.qwen3_vl.transformer_block import Qwen3VLTransformerBlock

    spec = make_spec(VISION)
    for layers in (1, 2):
        config = SimpleNamespace(recompute_method="uniform", recompute_num_layers=layers)
        block = SimpleNamespace(config=config, num_layers_per_pipeline_rank=0)
        arguments = [torch.zeros(1), *[None] * 6, False]
        if layers == 1:
            Qwen3VLTransformerBlock._checkpointed_forward(block, *arguments)
        else:
            with pytest.raises(AssertionError):
                Qwen3VLTransformerBlock._checkpointed_forward(block, *arguments)
        layout = make_layout(spec, recompute=Recompute(granularity="full", method="uniform", num_layers=layers))
        assert (RULE["recompute"].failed(case_of(spec, layout.backend), layout) is None) == (layers == 1)


def test_the_vocabulary_of_every_supported_model_is_the_checkpoints() -> None:
    from mcore_adapter.models.converter.template import get_template

    supported = {known.model(name).model_type for name in catalog.model_names()} & SUPPORTED_MODEL_TYPES
    assert len(supported) > 8
    for model_type in supported:
        mapping = get_template(model_type).config_hf_to_mca
        assert {key.rpartition(".")[2] for key, mca in mapping.items() if mca == "padded_vocab_size"} == {"vocab_size"}


def test_the_adapter_sets_what_megatron_knows_for_every_model_type_but_one() -> None:
    """qwen3_next: linear_attention_type is experimental_attention_variant in 0.16, and 0.15 has no linear attention."""
    from mcore_adapter.models.auto.config_auto import get_config_cls
    from mcore_adapter.models.converter.template import get_template

    unknown = {}
    for model_type in sorted(SUPPORTED_MODEL_TYPES):
        known = {field.name for field in dataclasses.fields(get_config_cls(model_type))}
        if not_known := get_template(model_type).constant_mca_config.keys() - known:
            unknown[model_type] = not_known
    assert unknown == {model_type: {"linear_attention_type"} for model_type in NOT_BUILT_BY_THE_ADAPTER}


def test_the_supported_model_types_are_those_of_llamafactory() -> None:
    constants = pytest.importorskip("llamafactory.extras.constants", reason="llamafactory is not installed")
    assert SUPPORTED_MODEL_TYPES == constants.MCA_SUPPORTED_MODELS
