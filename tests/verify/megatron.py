"""A spec and a layout in megatron-core's own terms. No processes are needed: a fake process group stands for all ranks.

Only imported by tests that have checked that megatron-core is installed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.model import Attention, LatentAttention, LinearAttention, Mlp, Model, Moe
from topoplan.specs.spec import Spec


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Act as rank 0 of a world of this size."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def initialize(layout: Layout, *, experts: bool) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if experts else None,
        create_gloo_process_groups=False,
    )


def config_of(model: Model, layout: Layout, mtp_layers: int = 0) -> Any:
    """Return megatron-core's configuration for the model and the layout."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dense = next((layer.ffn for layer in model.layers if isinstance(layer.ffn, Mlp)), None)
    moe = next((layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe)), None)
    latent = next((x.attention for x in model.layers if isinstance(x.attention, LatentAttention)), None)
    grouped = next((x.attention for x in model.layers if isinstance(x.attention, Attention)), None)
    linear = next((x.attention for x in model.layers if isinstance(x.attention, LinearAttention)), None)
    recompute = layout.recompute
    keys: dict[str, Any] = {
        "num_layers": model.num_layers,
        "mtp_num_layers": mtp_layers or None,
        "hidden_size": model.hidden_size,
        "num_attention_heads": (latent or grouped).heads,
        "ffn_hidden_size": dense.intermediate_size if dense else moe.intermediate_size,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "perform_initialization": False,
        "use_cpu_initialization": True,
        "init_model_with_meta_device": True,
    }
    if recompute.granularity != "none":
        keys |= {
            "recompute_granularity": recompute.granularity,
            "recompute_modules": list(recompute.modules) or None,
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers,
        }
    if moe:
        keys |= {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.experts_per_token,
            "moe_ffn_hidden_size": moe.intermediate_size,
            "moe_shared_expert_intermediate_size": moe.shared_intermediate_size or None,
            "moe_layer_freq": [int(isinstance(layer.ffn, Moe)) for layer in model.layers],
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": layout.etp,
        }
    if linear:
        keys |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "linear_conv_kernel_dim": linear.conv_kernel,
            "linear_key_head_dim": linear.key_head_dim,
            "linear_value_head_dim": linear.value_head_dim,
            "linear_num_key_heads": linear.key_heads,
            "linear_num_value_heads": linear.value_heads,
            "attention_output_gate": True,
        }
    if latent:
        return MLATransformerConfig(
            **keys,
            multi_latent_attention=True,
            q_lora_rank=latent.q_lora_rank or None,
            kv_lora_rank=latent.kv_lora_rank,
            qk_head_dim=latent.qk_nope_head_dim,
            qk_pos_emb_head_dim=latent.qk_rope_head_dim,
            v_head_dim=latent.v_head_dim,
            qk_layernorm=True,
        )
    return TransformerConfig(
        **keys,
        num_query_groups=grouped.kv_heads,
        kv_channels=grouped.head_dim,
        add_qkv_bias=grouped.qkv_bias,
        qk_layernorm=grouped.qk_norm,
    )


def refused_by_megatron(spec: Spec, layout: Layout) -> str | None:
    """Return the error of the process groups, the configuration or the pipeline split; None if there is none."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    experts = any(isinstance(layer.ffn, Moe) for layer in spec.model.layers)
    with fake_world(spec.cluster.world_size):
        try:
            initialize(layout, experts=experts)
            config = config_of(spec.model, layout, spec.job.mtp_num_layers)
            for rank in range(layout.pp):
                for virtual in range(layout.vpp):
                    get_num_layers_to_build(config, vp_stage=virtual if layout.vpp > 1 else None, pp_rank=rank)
        except (RuntimeError, ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def stages_by_megatron(
    megatron: Any, text: str, pp: int, layers: int, mtp_layers: int = 0
) -> list[list[list[int]]] | None:
    """Return the layer numbers by pipeline rank and virtual stage, or None if the string is refused."""
    try:
        layout = megatron(text, pp)
        layout.validate_layer_layout(num_layers=layers, mtp_num_layers=mtp_layers or None)
    except AssertionError:
        return None
    decoder = next(layer for stage in layout.layout for chunk in stage for layer in chunk if layer.name == "decoder")
    found: list[list[list[int]]] = []
    for rank in range(pp):
        found.append([])
        for virtual in range(layout.virtual_pipeline_model_parallel_size):
            offset = sum(
                layout.layout[r][v].count(decoder)
                for v in range(virtual + 1)
                for r in range(pp if v < virtual else rank)
            )
            found[-1].append(list(range(offset, offset + layout.layout[rank][virtual].count(decoder))))
    return found
