"""Handmade specs and plans, so that what is written does not depend on a search."""

from dataclasses import replace
from typing import Any

from tests.samples import GIB, H100, make_spec
from topoplan.layout.layout import SHARDED_BACKENDS, Layout
from topoplan.planner.plan import Memory, Plan, StageMemory, Time
from topoplan.specs.cluster import Cluster, Host
from topoplan.specs.job import Job
from topoplan.specs.model import Attention, LatentAttention, Layer, Model, Moe, VisionTower
from topoplan.specs.spec import Spec

SPEC = make_spec()
B200 = replace(H100, name="b200-sxm-180gb", architecture="blackwell", memory_bytes=183359 * 2**20)
V100 = replace(H100, name="v100-sxm-32gb", architecture="volta", fp8_flops=None)

CLUSTER = SPEC.cluster
ONE_NODE = replace(CLUSTER, name="h100-1x8", nodes=1)
HOSTS = tuple(
    Host(
        address=f"10.0.0.{node + 1}",
        user="ada",
        workdir="/data/run",
        venv="/opt/trainer",
        socket_interface="eth0",
        hcas=("mlx5_0:1", "mlx5_1:1"),
    )
    for node in range(4)
)

QWEN3_8B = SPEC.model
QWEN3_VL_8B = replace(
    QWEN3_8B,
    name="Qwen/Qwen3-VL-8B-Instruct",
    model_type="qwen3_vl",
    vision=VisionTower(
        layers=27,
        hidden_size=1152,
        heads=16,
        intermediate_size=4304,
        gated=False,
        out_hidden_size=4096,
        patch_size=16,
        spatial_merge_size=2,
        encoder_parameters=400_000_000,
        projector_parameters=40_000_000,
        min_first_stage_layers=3,
    ),
)
QWEN3_30B = Model(
    name="Qwen/Qwen3-30B-A3B",
    model_type="qwen3_moe",
    hidden_size=2048,
    vocab_size=151936,
    layers=(
        Layer(
            attention=Attention(heads=32, kv_heads=4, head_dim=128, qk_norm=True),
            ffn=Moe(experts=128, experts_per_token=8, intermediate_size=768),
        ),
    )
    * 48,
    tie_word_embeddings=False,
)
DEEPSEEK = Model(
    name="deepseek-ai/DeepSeek-V3",
    model_type="deepseek_v3",
    hidden_size=7168,
    vocab_size=129280,
    layers=(
        Layer(
            attention=LatentAttention(
                heads=128,
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            ),
            ffn=Moe(experts=256, experts_per_token=8, intermediate_size=2048, shared_intermediate_size=2048),
        ),
    )
    * 61,
    tie_word_embeddings=False,
)

JOB = Job(seq_len=4096, global_batch_size=64, dataset="identity", packing=True, samples=100_000)


def make_layout(cluster: Cluster = CLUSTER, **changes: Any) -> Layout:
    """Return a layout over the whole cluster, by default with a global batch of 64."""
    if changes.get("backend") in SHARDED_BACKENDS:
        return _sharded_layout(cluster, changes)
    splits = {"tp": 4, "pp": 1, "cp": 1} | {key: changes[key] for key in ("tp", "pp", "cp") if key in changes}
    dp = cluster.world_size // (splits["tp"] * splits["pp"] * splits["cp"])
    micro_batch = changes.get("micro_batch_size", 1)
    fields = {
        "dp": dp,
        "gradient_accumulation_steps": max(1, 64 // (dp * micro_batch)),
        "sequence_parallel": splits["tp"] > 1,
        **splits,
        **changes,
    }
    return Layout.of(**fields)


def _sharded_layout(cluster: Cluster, changes: dict[str, Any]) -> Layout:
    dp = cluster.world_size // (changes.get("cp", 1) * changes.get("ulysses", 1))
    steps = max(1, 64 // (dp * changes.get("micro_batch_size", 1)))
    usual = {"zero_stage": 3} if changes["backend"] == "deepspeed" else {}
    fields = {"dp": dp, "gradient_accumulation_steps": steps, "distributed_optimizer": False, **usual, **changes}
    return Layout.of(**fields)


def make_plan(layout: Layout, **changes: Any) -> Plan:
    """Return a plan with round numbers."""
    memory = Memory(
        allocated_bytes=50.25 * GIB,
        reserved_bytes=55.5 * GIB,
        device_bytes=60.125 * GIB,
        capacity_bytes=79.65 * GIB,
        band=0.05,
        margin_bytes=4 * GIB,
        host_bytes=0.0,
        by_stage=(
            StageMemory(
                stage=0, allocated_bytes=50.25 * GIB, parts_bytes={"weights": 20 * GIB, "activations": 30.25 * GIB}
            ),
        ),
    )
    time = Time(step_s=2.0, band_s=(1.8, 2.3), parts_s={"compute": 1.5, "tp": 0.5})
    fields = {
        "layout": layout,
        "memory": memory,
        "time": time,
        "tokens_per_s_per_gpu": 4096.0,
        "model_flops_per_s_per_gpu": 2.1e14,
        "mfu": 0.2123456789,
        **changes,
    }
    return Plan(**fields)


def make_spec_and_plan(
    *, cluster: Cluster = CLUSTER, model: Model = QWEN3_VL_8B, job: dict[str, Any] | None = None, **layout: Any
) -> tuple[Spec, Plan]:
    """Return the spec and plan of `make(cluster=..., model=..., job={...}, tp=2, pp=2)`."""
    spec = Spec(cluster=cluster, model=model, job=replace(JOB, **(job or {})))
    return spec, make_plan(make_layout(cluster, **layout))


def make_spec_and_layout(**what: Any) -> tuple[Spec, Layout]:
    """Return the spec and layout of `make`, without a prediction."""
    spec, plan = make_spec_and_plan(**what)
    return spec, plan.layout
