"""Compare the parameters per rank and stage with megatron-core's own GPTModel, built on the meta device."""

import os
from dataclasses import replace

import pytest

from tests.engines.samples import spec_of
from tests.verify.megatron import config_of
from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout, changed
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.specs import known
from topoplan.specs.model import Attention, Model, Moe
from topoplan.trainers.case import case_of

pytestmark = pytest.mark.verify
pytest.importorskip("megatron.core", reason="needs megatron-core (make verify)")
torch = pytest.importorskip("torch")

DENSE = [
    # tp, pp, vpp, cp, dp
    (1, 1, 1, 1, 1),
    (2, 1, 1, 1, 2),
    (4, 2, 1, 1, 1),
    (8, 1, 1, 1, 2),
    (2, 4, 1, 1, 2),
    (4, 4, 3, 1, 1),
    (1, 2, 2, 1, 4),
    (16, 1, 1, 1, 1),
]
MOE = [
    # tp, pp, ep, etp, dp
    (1, 1, 1, 1, 1),
    (1, 1, 8, 1, 8),
    (2, 4, 4, 1, 4),
    (2, 2, 2, 2, 4),
    (4, 1, 8, 1, 4),
    (4, 2, 2, 4, 2),
    (1, 2, 16, 1, 16),
]
CASES = (
    [
        (name, (tp, pp, vpp, cp, 1, 1, dp))
        for name in ("Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B")
        for tp, pp, vpp, cp, dp in DENSE
    ]
    + [("Qwen/Qwen3-30B-A3B", (tp, pp, 1, 1, ep, etp, dp)) for tp, pp, ep, etp, dp in MOE]
    + [("mistralai/Mixtral-8x7B-v0.1", (tp, pp, 1, 1, ep, etp, dp)) for tp, pp, ep, etp, dp in MOE if ep <= 8]
    + [("moonshotai/Moonlight-16B-A3B", (tp, pp, 1, 1, ep, etp, dp)) for tp, pp, ep, etp, dp in MOE]
    + [("deepseek-ai/DeepSeek-V3", (tp, pp, 1, 1, ep, etp, dp)) for tp, pp, ep, etp, dp in MOE[1:4]]
)


def layout_of(model: Model, degrees: tuple[int, ...]) -> Layout | None:
    """Return the layout, or None if the model does not allow the degrees (KV heads, widths)."""
    tp, pp, vpp, cp, ep, etp, dp = degrees
    attention = model.layers[0].attention
    if attention.heads % tp or (
        isinstance(attention, Attention) and attention.kv_heads % tp and tp % attention.kv_heads
    ):
        return None
    uneven = balanced_pipeline_layout(model.num_layers, pp, vpp) if model.num_layers % (pp * vpp) else None
    return Layout.of(
        tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=dp, gradient_accumulation_steps=1, pipeline_layout=uneven
    )


class DuplicatedLinear(torch.nn.Module):
    """A down projection of MLA as with Transformer Engine: a whole copy on every tensor-parallel rank."""

    def __init__(self, inputs, outputs, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))


def with_duplicated_down_projections(layers):
    """Return local layer specifications with the down projections of those for Transformer Engine."""
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if getattr(attention, name, None) is not None:
                setattr(attention, name, DuplicatedLinear)


def mtp_block_spec(config, vp_stage):
    """Return the block as Megatron-LM's `gpt_builders.py` requests it: after the last layer of the whole decoder."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec

    if config.mtp_num_layers is None:
        return None
    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")
    with_duplicated_down_projections(layers)
    return get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage)


def built_parameters(model: Model, layout: Layout, mtp_layers: int = 0) -> list[int]:
    """Return the parameters of megatron-core's model on the first rank of every pipeline stage."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts = []
    for stage in range(layout.pp):
        rank = stage * layout.tp * layout.cp * layout.dp
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            config = config_of(model, layout, mtp_layers)
            config.moe_grouped_gemm = False  # the local layers do not have it
            total = 0
            for virtual in range(layout.vpp):
                vp_stage = virtual if layout.vpp > 1 else None
                spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
                with_duplicated_down_projections(spec.layer_specs)
                with torch.device("meta"):
                    chunk = GPTModel(
                        config,
                        spec,
                        vocab_size=model.vocab_size,
                        max_sequence_length=4096,
                        pre_process=stage == 0 and virtual == 0,
                        post_process=stage == layout.pp - 1 and virtual == layout.vpp - 1,
                        share_embeddings_and_output_weights=model.tie_word_embeddings,
                        position_embedding_type="rope",
                        mtp_block_spec=mtp_block_spec(config, vp_stage),
                        vp_stage=vp_stage,
                    )
                total += sum(parameter.numel() for parameter in chunk.parameters())
            counts.append(total)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return counts


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """Patch the CUDA device, streams and Transformer Engine's classes, which megatron-core accesses even if unused."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    # Copies the tied embedding's values to the last stage; it adds or removes no parameter.
    monkeypatch.setattr(LanguageModule, "setup_embeddings_and_output_layer", lambda self: None)
    monkeypatch.setattr(multi_latent_attention, "TELinear", DuplicatedLinear)
    build = DotProductAttention.__init__

    def without_mla_widths(self, *args, k_channels=None, v_channels=None, **kwargs):
        # Only Transformer Engine's attention accepts MLA's widths; neither class has parameters.
        build(self, *args, **kwargs)

    monkeypatch.setattr(DotProductAttention, "__init__", without_mla_widths)


@pytest.mark.parametrize(
    ("name", "degrees"), CASES, ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value
)
def test_every_stage_holds_what_megatron_builds(name, degrees):
    model = known.model(name)
    layout = layout_of(model, degrees)
    if layout is None:
        pytest.skip("the model's heads do not allow these degrees")
    if any(isinstance(layer.ffn, Moe) for layer in model.layers):
        layout = changed(layout, sequence_parallel=layout.tp > 1)
    case = case_of(spec_of(name), "mca")
    ours = [stage_parameters(case, layout, rank).total for rank in range(layout.pp)]
    assert ours == built_parameters(model, changed(layout, sequence_parallel=False))


MTP = [
    # model, multi-token-prediction layers, (tp, pp, vpp, cp, ep, etp, dp), pipeline layout
    ("Qwen/Qwen3-8B", 1, (1, 1, 1, 1, 1, 1, 1), None),
    ("Qwen/Qwen3-8B", 2, (4, 1, 1, 1, 1, 1, 2), None),
    ("Qwen/Qwen3-8B", 1, (2, 4, 3, 1, 1, 1, 2), None),
    ("Qwen/Qwen3-8B", 2, (2, 2, 2, 1, 1, 1, 1), "Et*9|t*9|t*9|t*9mmL"),
    ("Qwen/Qwen3-8B", 1, (2, 4, 1, 1, 1, 1, 1), "Et*12|t*12|t*12m|L"),
    ("Qwen/Qwen3-8B", 1, (2, 4, 1, 1, 1, 1, 1), "Et*12|t*12|t*12|mL"),
    ("Qwen/Qwen3-8B", 1, (1, 2, 2, 1, 1, 1, 1), "Et*12|t*12|t*12m|L"),
    ("Qwen/Qwen3-8B", 1, (1, 4, 1, 1, 1, 1, 1), "Et*12|t*12|t*12|mL"),
    ("Qwen/Qwen3-0.6B", 1, (2, 1, 1, 1, 1, 1, 1), None),
    ("Qwen/Qwen3-0.6B", 1, (2, 2, 1, 1, 1, 1, 1), None),
    ("Qwen/Qwen3-0.6B", 2, (1, 2, 2, 1, 1, 1, 1), "Et*7|t*7|t*7|t*7mmL"),
    ("Qwen/Qwen3-0.6B", 1, (1, 4, 1, 1, 1, 1, 1), "Et*14|t*7|t*7m|L"),
    ("Qwen/Qwen3-30B-A3B", 1, (1, 1, 1, 1, 8, 1, 8), None),
    ("Qwen/Qwen3-30B-A3B", 1, (2, 4, 1, 1, 4, 1, 4), None),
    ("Qwen/Qwen3-30B-A3B", 1, (2, 2, 2, 1, 2, 2, 4), None),
    ("deepseek-ai/DeepSeek-V3", 1, (1, 1, 1, 1, 8, 1, 8), None),
    ("deepseek-ai/DeepSeek-V3", 1, (2, 16, 1, 1, 4, 1, 4), "Et*3|(t*4|)*14ttmL"),
    ("deepseek-ai/DeepSeek-V3", 1, (2, 2, 2, 1, 2, 2, 4), "Et*15|t*15|t*15|t*16mL"),
    ("deepseek-ai/DeepSeek-V3", 2, (4, 4, 1, 1, 4, 1, 4), "Et*20|t*21|t*20|mmL"),
]


@pytest.mark.parametrize(("name", "mtp_layers", "degrees", "pipeline_layout"), MTP, ids=str)
def test_every_stage_holds_the_token_prediction_that_megatron_builds(name, mtp_layers, degrees, pipeline_layout):
    model = known.model(name)
    tp, pp, vpp, cp, ep, etp, dp = degrees
    layout = Layout.of(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        gradient_accumulation_steps=1,
        pipeline_layout=pipeline_layout,
    )
    case = case_of(spec_of(name), "mca")
    case = replace(case, job=replace(case.job, mtp_num_layers=mtp_layers))  # more than the model has, too
    ours = [stage_parameters(case, layout, rank).total for rank in range(pp)]
    assert ours == built_parameters(model, layout, mtp_layers)
