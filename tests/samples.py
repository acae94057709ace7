"""Handmade specs, plans and rankings, for tests of the rooms above the planner."""

from typing import Any

from topoplan.errors import SpecError
from topoplan.layout.layout import Layout, Recompute
from topoplan.planner.plan import Counts, Memory, Plan, Plans, Ranking, Rejection, StageMemory, Time
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job
from topoplan.specs.model import Attention, Layer, Mlp, Model
from topoplan.specs.spec import Spec

GIB = 2**30
NO_RECOMPUTE = Recompute()
SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)

H100 = Gpu(
    name="h100-sxm-80gb",
    architecture="hopper",
    memory_bytes=81559 * 2**20,
    memory_bytes_per_s=3.35e12,
    bf16_flops=989.4e12,
    fp16_flops=989.4e12,
    fp8_flops=1978.9e12,
    sm_count=132,
    nvlink_bytes_per_s=450e9,
    nvlink_domain_gpus=8,
    pcie_bytes_per_s=64e9,
    gpus_per_node=8,
    nics_per_node=8,
    nic_bytes_per_s=50e9,
)


def make_spec(*, name: str = "h100-4x8", nodes: int = 4, model_name: str = "Qwen/Qwen3-8B", **job: Any) -> Spec:
    """Return a spec of four HGX boxes and a dense 8B model."""
    layer = Layer(
        attention=Attention(heads=32, kv_heads=8, head_dim=128, qk_norm=True), ffn=Mlp(intermediate_size=12288)
    )
    return Spec(
        cluster=Cluster(
            name=name,
            nodes=nodes,
            gpus_per_node=8,
            gpu=H100,
            nvlink_bytes_per_s=450e9,
            nvlink_domain_gpus=8,
            pcie_bytes_per_s=64e9,
            nics_per_node=8,
            nic_bytes_per_s=50e9,
        ),
        model=Model(
            name=model_name,
            model_type="qwen3",
            hidden_size=4096,
            vocab_size=151936,
            layers=(layer,) * 36,
            tie_word_embeddings=False,
        ),
        job=Job(**{"seq_len": 4096, "global_batch_size": 64} | job),
        path="cluster_specs/h100-4x8.yaml",
    )


def make_plan(
    *,
    step_s: float = 3.21,
    device_gib: float = 58.3,
    parts_s: dict[str, float] | None = None,
    band: tuple[float, float] = (0.88, 1.12),
    warnings: tuple[str, ...] = (),
    caveats: tuple[str, ...] = (),
    recompute: Recompute = NO_RECOMPUTE,
    **degrees: Any,
) -> Plan:
    """Return a plan on 32 GPUs with a batch of 64, whose figures are not predictions."""
    split = {"tp": 1, "pp": 1, "cp": 1, "micro_batch_size": 1} | degrees
    dp = 32 // (split["tp"] * split["pp"] * split["cp"])
    layout = Layout.of(
        **split,
        dp=dp,
        gradient_accumulation_steps=max(1, 64 // (dp * split["micro_batch_size"])),
        sequence_parallel=split["tp"] > 1,
        recompute=recompute,
    )
    shares = parts_s or {"compute": 0.71, "pp_bubble": 0.12, "tp_comm": 0.09, "dp_comm": 0.05, "optimizer": 0.03}
    total = sum(shares.values())
    tokens_per_s_per_gpu = 64 * 4096 / step_s / 32
    return Plan(
        layout=layout,
        trainer="llamafactory",
        memory=Memory(
            allocated_bytes=(device_gib - 4) * GIB,
            reserved_bytes=(device_gib - 2) * GIB,
            device_bytes=device_gib * GIB,
            capacity_bytes=H100.memory_bytes,
            band=0.05,
            margin_bytes=1.5 * GIB,
            host_bytes=0.0,
            by_stage=(
                StageMemory(
                    stage=0,
                    allocated_bytes=(device_gib - 4) * GIB,
                    parts_bytes={"weights": 10.0 * GIB, "activations": (device_gib - 14) * GIB},
                ),
            ),
        ),
        time=Time(
            step_s=step_s,
            band_s=(step_s * band[0], step_s * band[1]),
            parts_s={name: step_s * part / total for name, part in shares.items()},
        ),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        model_flops_per_s_per_gpu=tokens_per_s_per_gpu * 6 * 8.19e9,
        mfu=tokens_per_s_per_gpu * 6 * 8.19e9 / H100.bf16_flops,
        warnings=warnings,
        caveats=caveats,
    )


def make_rejection(
    *, rule: str = "memory", reason: str = "stage 0 needs 92.3 GiB of 79.6", fix: str = "", **degrees: Any
) -> Rejection:
    """Return a rejected layout."""
    return Rejection(layout=make_plan(**degrees).layout, rule=rule, reason=reason, fix=fix)


def make_ranking(*plans: Plan, spec: Spec | None = None, **fields: Any) -> Ranking:
    """Return a ranking of these plans, in this order."""
    counts = Counts(candidates=1234, illegal=600, out_of_memory=634 - len(plans), ranked=len(plans))
    in_order = Plans([plan.layout for plan in plans], plans.__getitem__)
    values: dict[str, Any] = {"spec": spec or make_spec(), "plans": in_order, "counts": counts, "elapsed_s": 0.25}
    return Ranking(**values | fields)


def usual_ranking(**job: Any) -> Ranking:
    """Return a ranking with plans, notes and rejections, as a search would."""
    return make_ranking(
        make_plan(tp=2, step_s=3.21, device_gib=61.2),
        make_plan(tp=4, step_s=3.35, device_gib=44.0, band=(0.9, 1.2)),
        make_plan(tp=2, pp=2, vpp=3, step_s=3.41, device_gib=52.3, recompute=SELECTIVE),
        make_plan(tp=1, step_s=4.56, device_gib=78.2, recompute=FULL, warnings=("the first step compiles kernels",)),
        make_plan(tp=8, pp=4, vpp=3, micro_batch_size=8, step_s=12.3, device_gib=31.0),
        spec=make_spec(**job),
        notes=(
            "tp4 in place of tp2: 4% slower, 17.2 GiB more headroom",
            "pipeline parallel (tp2 pp2): 6% slower, because stage 1 waits for stage 0 for 12% of the step and each of"
            " its micro batches crosses the network once",
        ),
        rejected=(
            make_rejection(tp=1, reason="stage 0 needs 92.3 GiB of 79.6", fix="recompute full makes it fit"),
            make_rejection(pp=8, rule="layers", reason="36 layers % (pp 8 * vpp 1) = 4", fix="pp 4 divides them"),
        ),
    )


def no_search(spec: Spec) -> Ranking:
    """Replace the search, for tests that do not need the best plan of a job."""
    raise SpecError("no search")
