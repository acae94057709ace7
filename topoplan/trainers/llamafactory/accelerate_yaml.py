"""accelerate.yaml: FSDP2, in the form that `accelerate launch --config_file` reads.

Which node it is and where the first one is are options in the node scripts: the file is the same on every node.
Sources: accelerate commands/config/config_args.py (ClusterConfig), utils/launch.py, utils/fsdp_utils.py.
"""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.yaml_text import Entry, Section, mapping_text

FILE = "accelerate.yaml"


def accelerate_text(spec: Spec, plan: Plan) -> str:
    """The file."""
    head = (f"{spec.model.name} on {spec.cluster.name}: plan {plan.id}", "For `accelerate launch --config_file`.")
    return mapping_text(head, (_processes(spec), _sharding(plan.layout)))


def _processes(spec: Spec) -> Section:
    job, cluster = spec.job, spec.cluster
    precision = Entry(key="mixed_precision", value=job.precision, comment="gathered weights; the shards stay in fp32")
    if job.pure_bf16:
        comment = "pure_bf16: any other value casts the shards to fp32"
        precision = Entry(key="mixed_precision", value="no", comment=comment)
    return Section(
        title="Processes",
        entries=(
            Entry(key="compute_environment", value="LOCAL_MACHINE"),
            Entry(key="distributed_type", value="FSDP"),
            Entry(key="num_machines", value=cluster.nodes),
            Entry(key="num_processes", value=cluster.world_size, comment="on all nodes together"),
            Entry(key="rdzv_backend", value="static", comment="node ranks as planned"),
            Entry(key="main_training_function", value="main"),
            precision,
            Entry(key="use_cpu", value=False),
        ),
    )


def _sharding(layout: Layout) -> Section:
    entries = (
        Entry(key="fsdp_version", value=2),
        Entry(key="fsdp_reshard_after_forward", value=True, comment="a layer's weights are gathered again in backward"),
        Entry(
            key="fsdp_auto_wrap_policy",
            value="TRANSFORMER_BASED_WRAP",
            comment="layers, as the model itself names them",
        ),
        Entry(
            key="fsdp_offload_params", value=layout.offload, comment="weights, gradients and optimizer in host memory"
        ),
        Entry(
            key="fsdp_state_dict_type", value="FULL_STATE_DICT", comment="checkpoints are whole, for any number of GPUs"
        ),
        Entry(key="fsdp_cpu_ram_efficient_loading", value=True, comment="rank 0 alone reads the weights"),
        Entry(
            key="fsdp_activation_checkpointing", value=False, comment="gradient checkpointing is LLaMA-Factory's own"
        ),
    )
    title = f"Shards over all {layout.world_size} GPUs"
    return Section(title=title, entries=(Entry(key="fsdp_config", entries=entries),))
