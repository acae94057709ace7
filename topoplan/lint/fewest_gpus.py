"""The layout that a configuration of the Megatron path asks for, where no cluster is known.

The number of GPUs is taken to be the smallest that the degrees allow, all in one fast domain: rules about the cluster
cannot fail then, and those about the model, the job and the layout are the ones of `topoplan.engines.megatron.rules`.
"""

from __future__ import annotations

import math

from topoplan.layout.layout import Layout, Recompute
from topoplan.reading.setup import Configuration
from topoplan.reading.values import as_number, flag, value_of, whole, words
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.mca_job import expert_tensor, packs, sequence_parallel

_MOST = 65536
"""No degree or count above it is looked at."""
_ASSUMED_GPU = "h100-sxm-80gb"

UNKNOWN_MODEL = Model(name="", model_type="", hidden_size=0, vocab_size=0, layers=(), tie_word_embeddings=False)
"""Stands where no model is known; only rules that look at none may be asked then."""


def degree(configuration: Configuration, name: str) -> int | None:
    """`tensor`, `pipeline` and so on: the parallel size, 1 where it is not set, None where it is no size."""
    value = whole(configuration, f"{name}_size", 1)
    return value if value is not None and 1 <= value <= _MOST else None


def spec_and_layout(configuration: Configuration, model: Model) -> tuple[Spec, Layout] | None:
    """What the layout rules look at; None where a degree or a count is none."""
    sizes = [
        degree(configuration, name)
        for name in (
            "tensor_model_parallel",
            "pipeline_model_parallel",
            "virtual_pipeline_model_parallel",
            "context_parallel",
            "expert_model_parallel",
            "per_device_train_batch",
        )
    ]
    steps, length = whole(configuration, "gradient_accumulation_steps", 1), whole(configuration, "cutoff_len", 2048)
    etp = whole(configuration, "expert_tensor_parallel_size")
    if None in sizes or not steps or not length or not 0 < steps <= _MOST or not 0 < length <= 2**30:
        return None
    tp, pp, vpp, cp, ep, micro_batch = (size or 1 for size in sizes)
    if etp is None and value_of(configuration, "expert_tensor_parallel_size") is None:
        etp = expert_tensor(None, tp) if facts_of(model).is_moe else 1
    if etp is None or not 1 <= etp <= _MOST or not configuration.source.data.keys() & _LAYOUT_KEYS:
        return None
    world = math.lcm(tp * pp * cp, etp * ep * pp)
    dp = world // (tp * pp * cp)
    layout = Layout.of(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=steps,
        sequence_parallel=sequence_parallel(flag(configuration, "sequence_parallel"), tp, ep),
        recompute=_recompute(configuration),
        distributed_optimizer=flag(configuration, "use_distributed_optimizer"),
        pipeline_layout=words(configuration, "pipeline_model_parallel_layout"),
        optimizer_offload_fraction=_offload(configuration),
        overlap_grad_reduce=flag(configuration, "overlap_grad_reduce"),
        overlap_param_gather=flag(configuration, "overlap_param_gather"),
    )
    stage = configuration.get("stage", "sft")
    apart = any(flag(configuration, key) for key in ("neat_packing", "sequence_packing"))
    job = Job(
        seq_len=length,
        global_batch_size=micro_batch * steps * dp,
        stage=stage if isinstance(stage, str) else "sft",
        packing=apart or packs(stage, value_of(configuration, "packing")),
        precision="bf16",
        mtp_num_layers=max(0, whole(configuration, "mtp_num_layers", 0) or 0),
    )
    return Spec(cluster=_cluster(world), model=model, job=job), layout


_LAYOUT_KEYS = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "overlap_param_gather",
    "optimizer_offload_fraction",
    "recompute_granularity",
    "mtp_num_layers",
}


def _recompute(configuration: Configuration) -> Recompute:
    granularity = configuration.get("recompute_granularity")
    if granularity == "full":
        method, number = configuration.get("recompute_method"), whole(configuration, "recompute_num_layers")
        return Recompute(
            granularity="full",
            method=method if method in ("uniform", "block") else "uniform",
            num_layers=number if number is not None and 0 < number <= _MOST else 1,
        )
    if granularity == "selective":
        text = words(configuration, "recompute_modules") or "core_attn"
        return Recompute(granularity="selective", modules=tuple(text.split(",")))
    return Recompute()


def _offload(configuration: Configuration) -> float:
    fraction = as_number(configuration.get("optimizer_offload_fraction")) or 0.0
    return fraction if flag(configuration, "optimizer_cpu_offload") and 0 < fraction <= 1 else 0.0


def _cluster(world_size: int) -> Cluster:
    gpu = known.gpu(_ASSUMED_GPU)
    return Cluster(
        name="",
        nodes=1,
        gpus_per_node=world_size,
        gpu=gpu,
        nvlink_bytes_per_s=gpu.nvlink_bytes_per_s,
        nvlink_domain_gpus=world_size,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s,
        nics_per_node=gpu.nics_per_node,
        nic_bytes_per_s=gpu.nic_bytes_per_s,
    )
