"""Specs and layouts of the layout tests: catalog models on machines of any size."""

from dataclasses import replace
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec

DENSE = "Qwen/Qwen3-8B"  # 36 layers, 32 heads, 8 KV heads
MOE = "Qwen/Qwen3-30B-A3B"  # 48 layers, 32 heads, 4 KV heads, 128 experts
MLA = "deepseek-ai/DeepSeek-V3"  # 61 layers, 128 heads, 256 experts
VISION = "Qwen/Qwen3-VL-8B-Instruct"  # 36 layers, 3 deepstack inputs
LINEAR = "Qwen/Qwen3-Next-80B-A3B-Instruct"  # 48 layers, 16 key heads, 2 KV heads with an output gate


def make_spec(
    model: str | Model = DENSE,
    *,
    nodes: int = 4,
    gpus_per_node: int = 8,
    gpu: str = "h100-sxm-80gb",
    nvlink: bool = True,
    domain: int | None = None,
    **job: Any,
) -> Spec:
    card = known.gpu(gpu)
    return Spec(
        cluster=Cluster(
            name=f"{gpu}-{nodes}x{gpus_per_node}",
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            gpu=card,
            nvlink_bytes_per_s=450e9 if nvlink else 0.0,
            nvlink_domain_gpus=(domain or gpus_per_node) if nvlink else 1,
            pcie_bytes_per_s=card.pcie_bytes_per_s,
            nics_per_node=gpus_per_node,
            nic_bytes_per_s=50e9,
        ),
        model=known.model(model) if isinstance(model, str) else model,
        job=Job(**{"seq_len": 4096, "global_batch_size": 64} | job),
    )


def make_layout(spec: Spec, **keys: Any) -> Layout:
    """Return a layout with dp and gradient accumulation derived, even if it breaks rules."""
    tp, pp, cp = (keys.get(key, 1) for key in ("tp", "pp", "cp"))
    dp = keys.setdefault("dp", max(1, spec.cluster.world_size // (tp * pp * cp)))
    per_step = keys.get("micro_batch_size", 1) * dp
    keys.setdefault("gradient_accumulation_steps", max(1, spec.job.global_batch_size // per_step))
    keys.setdefault("sequence_parallel", tp > 1)
    return Layout.of(**keys)


def with_attention(model: str, **changes: Any) -> Model:
    """Return the model with another kind of attention in every layer."""
    whole = known.model(model)
    layer = replace(whole.layers[0], attention=replace(whole.layers[0].attention, **changes))
    return replace(whole, layers=(layer,) * whole.num_layers)
