"""One layout in, one plan out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.backends.mca import SUPPORTED_MODEL_TYPES, check_optimizer, check_precision, check_token_prediction
from topoplan.backends.requirements import environment_warnings
from topoplan.backends.swift import check_finetuning
from topoplan.backends.trainers import trainer_of
from topoplan.engines.data_parallel.memory import sharded_memory
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.data_parallel.step import sharded_time
from topoplan.engines.megatron.memory import Memory, ShapeStates, predict_memory
from topoplan.engines.megatron.rules import MODE_RULES, SHAPE_RULES, STEP_RULES, tensor_parallel_domain
from topoplan.engines.megatron.step import StepTerms, predict_time
from topoplan.engines.rule import broken_rule
from topoplan.errors import LayoutError
from topoplan.layout.forms import layout_from_dict, layout_to_dict
from topoplan.layout.layout import MEGATRON_BACKENDS, Layout
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.operators.adapters import adapters_of
from topoplan.operators.dispatch import dispatcher_of
from topoplan.operators.flops import model_flops_per_step
from topoplan.operators.padding import padding_share, tokens_per_step
from topoplan.operators.shard import shard_of
from topoplan.operators.te_compute import peak_flops
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.case import Case
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import profile_notes, profile_of
from topoplan.specs.spec import Spec
from topoplan.units import GIB

RULES_OF_A_GIVEN_LAYOUT = SHAPE_RULES + STEP_RULES + MODE_RULES
"""What a search leaves out as slow is predicted when it is asked for by name."""


def memory_of(
    case: Case,
    layout: Layout,
    *,
    all_stages: bool = False,
    states: ShapeStates | None = None,
    until_over: bool = False,
) -> Memory:
    """Memory of a layout that is known to be legal; options as in `predict_memory`."""
    if not layout.is_megatron:
        return sharded_memory(case, layout, with_moments=all_stages)
    return predict_memory(case, layout, all_stages=all_stages, states=states, until_over=until_over)


def plan_of(spec: Spec, case: Case, layout: Layout, memory: Memory, terms: StepTerms | None = None) -> Plan:
    """The plan of a legal layout whose memory is known, and its `step_terms` perhaps too."""
    time = predict_time(case, layout, terms) if layout.is_megatron else sharded_time(case, layout)
    gpus = spec.cluster.world_size
    rate = model_flops_per_step(spec.model, spec.job) / time.step_s / gpus
    return Plan(
        layout=layout,
        memory=memory,
        time=time,
        tokens_per_s_per_gpu=tokens_per_step(spec.job) / time.step_s / gpus,
        model_flops_per_s_per_gpu=rate,
        mfu=rate / peak_flops(spec.cluster.gpu, spec.job.precision),
        warnings=_warnings(spec, layout, memory),
        padding_share=padding_share(case, layout) if spec.job.lengths else None,
    )


def predict(spec: Spec, layout: Layout | Mapping[str, Any]) -> Plan:
    """Memory and time of one layout, whether it fits or not; every pipeline stage is listed.

    Layers that do not divide by pp * vpp are spread evenly, which the plan's warnings say.

    Raises LayoutError for a layout that breaks a rule, SpecError for a job that is not predicted.
    """
    check_precision(spec)
    form = layout_to_dict(layout) if isinstance(layout, Layout) else _with_stages(layout, spec)
    layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
    check_backend(spec, layout.backend)
    rules = RULES_OF_A_GIVEN_LAYOUT if layout.is_megatron else SHARDED_RULES
    if broken := broken_rule(spec, layout, rules):
        rule, equation = broken
        raise LayoutError(equation, where=f"layout breaks rule {rule.name}", remedy=rule.fix)
    case = case_of(spec, layout.backend)
    return plan_of(spec, case, layout, memory_of(case, layout, all_stages=True))


def check_backend(spec: Spec, backend: str) -> None:
    """Raise ModelError or SpecError for a job that a backend cannot run with any layout."""
    if backend in MEGATRON_BACKENDS:
        check_finetuning(spec.job, spec.model, backend, spec.path or "")
        check_optimizer(spec.job, spec.path or "")
    if backend == "mca":
        check_token_prediction(spec)


def _with_stages(form: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """The form with a pipeline layout where its layers do not divide, as the trainers' users have to write one."""
    pp, vpp = form.get("pp", 1), form.get("vpp", 1)
    if form.get("pipeline_layout") or not (isinstance(pp, int) and isinstance(vpp, int)) or pp < 1 or vpp < 1:
        return form
    layers, mtp_layers = spec.model.num_layers, spec.job.mtp_num_layers
    if layers % (pp * vpp) and (even := balanced_pipeline_layout(layers, pp, vpp, mtp_layers)):
        return {**form, "pipeline_layout": even}
    return form


def _warnings(spec: Spec, layout: Layout, memory: Memory) -> tuple[str, ...]:
    """What a user should know before choosing the plan."""
    gpu, profile = spec.cluster.gpu, profile_of(spec.cluster.gpu, spec.profile)
    found = list(profile_notes(profile, gpu, spec.model, spec.job, is_megatron=layout.is_megatron))
    if layout.backend == "mca" and spec.model.model_type not in SUPPORTED_MODEL_TYPES:
        found.append(f"the MCA trainer does not support model_type {spec.model.model_type!r}")
    host = memory.host_capacity_bytes
    if host is not None and memory.host_bytes > host:
        found.append(f"offload needs {memory.host_bytes / GIB:.0f} GiB of a node's {host / GIB:.0f} GiB host memory")
    if layout.backend == "mca" and spec.model.model_type == "qwen3_next":
        found.append(
            "mcore_adapter 0.10 cannot build Qwen3-Next on megatron-core 0.15.3 to 0.16.1: try the trainer first"
        )
    if not layout.is_megatron and facts_of(spec.model).is_moe:
        # ms-swift examples/megatron/moe/qwen3_moe.sh: 91.2 s a step under ZeRO-3, 9.6 under Megatron.
        found.append(
            "experts as transformers 5 computes them, in grouped products, of which no measured run is known; with"
            " transformers 4, one by one, ZeRO-3 took ten times Megatron's step (Qwen3-30B-A3B on 16 A800)"
        )
    adapters = adapters_of(spec.job) if layout.is_megatron else None
    if adapters and spec.cluster.margin is not None:
        # catalog/measured/megatron.jsonl
        found.append("published runs of LoRA with Megatron took 17 to 31% more memory than predicted; mind the margin")
    if adapters and facts_of(spec.model).is_moe and adapters.on("experts.linear_fc1"):
        found.append("every expert has adapters of its own; as other backends build the model, experts have none")
    if layout.pipeline_layout:
        found.append(f"{spec.model.num_layers} layers in uneven stages: {layout.pipeline_layout}")
    if layout.tp > 1 and not spec.cluster.nvlink_bytes_per_s:
        found.append(f"tp {layout.tp} over PCIe: no NVLink in these nodes")
    if layout.ep * layout.etp > (domain := tensor_parallel_domain(spec)):
        found.append(f"ep {layout.ep} * etp {layout.etp} crosses nodes: an NVLink domain has {domain} GPUs")
    found += environment_warnings(spec, layout, trainer_of(spec, layout, spec.trainer))
    if layout.ep > 1 and spec.job.token_imbalance == 1.0:
        found.append("assumes that tokens are spread evenly over the experts (token_imbalance of the job)")
    is_usual = layout.ep > 1 and layout.moe_token_dispatcher_type is None
    if is_usual and dispatcher_of(shard_of(case_of(spec, layout.backend), layout), spec.cluster) == "flex":
        found.append("assumes the flex dispatcher, DeepEP or HybridEP, between nodes (moe_token_dispatcher_type)")
    if spec.model.vision and spec.job.images_per_sequence:
        count, pixels = spec.job.images_per_sequence, spec.job.image_max_pixels
        found.append(f"assumes {count:g} image(s) a sequence of {pixels} pixels")
    if 0 < spec.model.max_position_embeddings < spec.job.seq_len:
        found.append(f"seq_len {spec.job.seq_len} exceeds the model's {spec.model.max_position_embeddings} positions")
    return tuple(found)
