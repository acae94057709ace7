"""What makes a layout illegal. Each rule has a name, a source and, when it fails, its equation with the numbers in it.

MLM is megatron-core 0.16 (`megatron/core/`), MCA is mcore_adapter 0.10 (`mcore_adapter/`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.layout.stages import split_stages
from topoplan.specs.model import Attention, LatentAttention, LinearAttention, Mlp, Model, Moe
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class Facts:
    """The divisors that a model offers, gathered once."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    expert_widths: tuple[int, ...]
    experts: tuple[int, ...]
    linear_attention: bool

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)


@lru_cache(maxsize=64)
def facts_of(model: Model) -> Facts:
    """Head counts, widths and expert counts of all layers of a model."""
    heads: set[int] = set()
    kv_heads: set[int] = set()
    mlp: set[int] = set()
    expert: set[int] = set()
    experts: set[int] = set()
    linear = False
    for layer in {id(layer): layer for layer in model.layers}.values():
        if isinstance(layer.attention, LinearAttention):
            linear = True
            heads |= {layer.attention.key_heads, layer.attention.value_heads}
        elif isinstance(layer.attention, LatentAttention):
            heads.add(layer.attention.heads)
        elif isinstance(layer.attention, Attention):
            heads.add(layer.attention.heads)
            kv_heads.add(layer.attention.kv_heads)
        if isinstance(layer.ffn, Mlp):
            mlp.add(layer.ffn.intermediate_size)
        elif isinstance(layer.ffn, Moe):
            experts.add(layer.ffn.experts)
            expert.add(layer.ffn.intermediate_size)
            if layer.ffn.shared_intermediate_size:
                mlp.add(layer.ffn.shared_intermediate_size)
    as_tuple = (tuple(sorted(values)) for values in (heads, kv_heads, mlp, expert, experts))
    return Facts(*as_tuple, linear_attention=linear)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    name: str
    source: str
    failed: Callable[[Spec, Layout], str | None]
    """The failed equation, or None."""
    fix: str


def tensor_parallel_domain(spec: Spec) -> int:
    """GPUs that tensor parallel may span: the NVLink domain, or the node where there is no NVLink."""
    cluster = spec.cluster
    return max(cluster.nvlink_domain_gpus if cluster.nvlink_bytes_per_s else 1, cluster.gpus_per_node)


def _remainder(what: str, value: int, by: str, divisor: int) -> str | None:
    return f"{what} {value} % {by} {divisor} = {value % divisor}" if value % divisor else None


def _world(spec: Spec, layout: Layout) -> str | None:
    product = layout.tp * layout.pp * layout.cp
    world = spec.cluster.world_size
    if world % product:
        return f"world size {world} % (tp {layout.tp} * pp {layout.pp} * cp {layout.cp}) = {world % product}"
    return None


def _tp_domain(spec: Spec, layout: Layout) -> str | None:
    domain = tensor_parallel_domain(spec)
    kind = "NVLink domain" if spec.cluster.nvlink_bytes_per_s else "node"
    if layout.tp > domain:
        return f"tp {layout.tp} > {kind} of {domain} GPUs"
    if spec.cluster.world_size > domain:
        return _remainder(f"GPUs a {kind}", domain, "tp", layout.tp)
    return None


def _heads(spec: Spec, layout: Layout) -> str | None:
    return next(filter(None, (_remainder("heads", n, "tp", layout.tp) for n in facts_of(spec.model).heads)), None)


def _kv_heads(spec: Spec, layout: Layout) -> str | None:
    for n in facts_of(spec.model).kv_heads:
        if n % layout.tp and layout.tp % n:
            return f"KV heads {n} % tp {layout.tp} = {n % layout.tp}, tp {layout.tp} % KV heads {n} = {layout.tp % n}"
    return None


def _widths(spec: Spec, layout: Layout) -> str | None:
    facts = facts_of(spec.model)
    mlp = (_remainder("MLP width", n, "tp", layout.tp) for n in facts.mlp_widths)
    experts = (_remainder("expert width", n, "etp", layout.etp) for n in facts.expert_widths)
    return next(filter(None, (*mlp, *experts)), None)


def _vocabulary(spec: Spec, layout: Layout) -> str | None:
    if layout.backend != "mca":
        return None  # Megatron-LM pads instead
    return _remainder("vocabulary", spec.model.vocab_size, "tp", layout.tp)


def _sequence_parallel(spec: Spec, layout: Layout) -> str | None:
    if layout.sequence_parallel and layout.tp == 1:
        return "sequence_parallel with tp 1"
    if not layout.sequence_parallel and layout.tp > 1 and facts_of(spec.model).is_moe:
        return f"a mixture of experts with tp {layout.tp} and no sequence_parallel"
    return None


def _sequence_length(spec: Spec, layout: Layout) -> str | None:
    pieces = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)
    return _remainder("seq_len", spec.job.seq_len, "(2 * cp) * tp" if layout.cp > 1 else "tp", pieces)


def _context_parallel(spec: Spec, layout: Layout) -> str | None:
    if layout.cp > 1 and facts_of(spec.model).linear_attention:
        return f"cp {layout.cp} with linear attention layers"
    return None


def _experts(spec: Spec, layout: Layout) -> str | None:
    facts = facts_of(spec.model)
    if not facts.is_moe:
        if layout.ep > 1 or layout.etp > 1:
            return f"ep {layout.ep}, etp {layout.etp} on a model without experts"
        return None
    return next(filter(None, (_remainder("experts", n, "ep", layout.ep) for n in facts.experts)), None)


def _expert_grid(spec: Spec, layout: Layout) -> str | None:
    if not facts_of(spec.model).is_moe:
        return None
    world, product = spec.cluster.world_size, layout.etp * layout.ep * layout.pp
    if world % product:
        return f"world size {world} % (etp {layout.etp} * ep {layout.ep} * pp {layout.pp}) = {world % product}"
    return None


def _expert_domain(spec: Spec, layout: Layout) -> str | None:
    asked = {"ep", "etp"} & set(spec.job.pin)
    domain = tensor_parallel_domain(spec)
    if layout.backend == "mca" and not asked and layout.ep > 1 and layout.ep * layout.etp > domain:
        return f"ep {layout.ep} * etp {layout.etp} > NVLink domain of {domain} GPUs"
    return None


def _pipeline_split(spec: Spec, layout: Layout) -> str | None:
    if layout.vpp > 1 and layout.pp == 1:
        return f"vpp {layout.vpp} with pp 1"
    try:
        split_stages(spec.model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)
    except LayoutError as error:
        return error.what
    return None


def _vision_first_stage(spec: Spec, layout: Layout) -> str | None:
    tower = spec.model.vision
    if tower is None or layout.pp == 1 or not tower.min_first_stage_layers:
        return None
    first = split_stages(spec.model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[0][0].num_layers
    if first < tower.min_first_stage_layers:
        return f"{first} layers on the first stage < {tower.min_first_stage_layers} deepstack inputs of the vision tower"
    return None


def _batch(spec: Spec, layout: Layout) -> str | None:
    batch, product = spec.job.global_batch_size, layout.micro_batch_size * layout.dp
    if batch % product:
        micro = layout.micro_batch_size
        return f"global_batch_size {batch} % (micro_batch_size {micro} * dp {layout.dp}) = {batch % product}"
    return None


def _interleaving(spec: Spec, layout: Layout) -> str | None:
    steps = layout.gradient_accumulation_steps
    if layout.vpp > 1 and steps % layout.pp:
        return f"gradient_accumulation_steps {steps} % pp {layout.pp} = {steps % layout.pp} with vpp {layout.vpp}"
    return None


_STATE = "MLM parallel_state.py::initialize_model_parallel"
_CONFIG = "MLM transformer/transformer_config.py::__post_init__"

SHAPE_RULES = (
    Rule("world-size", _STATE, _world, "choose degrees whose product divides the number of GPUs"),
    Rule("tp-in-nvlink-domain", "tensor parallel moves every activation twice a layer", _tp_domain, "lower tp, raise pp"),
    Rule("heads", _CONFIG, _heads, "choose tp among the divisors of the head count"),
    Rule("kv-heads", _CONFIG, _kv_heads, "choose tp among the divisors or multiples of the KV head count"),
    Rule("widths", "MLM tensor_parallel/layers.py (divide)", _widths, "lower tp or etp"),
    Rule("vocabulary", "MCA models: padded_vocab_size is the checkpoint's", _vocabulary, "lower tp"),
    Rule("context-parallel", _CONFIG + " (gated_delta_net)", _context_parallel, "set cp to 1"),
    Rule("experts", "MLM transformer/moe/moe_layer.py", _experts, "choose ep among the divisors of the expert count"),
    Rule("expert-grid", _STATE, _expert_grid, "lower ep or etp"),
    Rule("ep-in-nvlink-domain", "all-to-all across nodes; pin ep to allow it", _expert_domain, "lower ep, or pin it"),
    Rule("pipeline-split", "MCA models/model_config.py", _pipeline_split, "choose pp and vpp that divide the layers"),
    Rule("vision-first-stage", "MCA models/qwen3_vl/modeling_qwen3_vl.py", _vision_first_stage, "lower pp or vpp"),
)
"""Rules on degrees alone: the same for every micro batch and recompute mode."""

STEP_RULES = (
    Rule("batch", "MLM num_microbatches_calculator.py", _batch, "change global_batch_size, or lower micro_batch_size"),
    Rule("interleaving", "MLM pipeline_parallel/schedules.py", _interleaving, "set vpp to 1 or change the micro batch"),
    Rule("sequence-parallel", "MLM model_parallel_config.py; moe/moe_layer.py", _sequence_parallel, "switch it"),
    Rule("sequence-length", "MLM utils.py::get_batch_on_this_cp_rank", _sequence_length, "lengthen seq_len to a multiple"),
)
"""Rules that also look at the micro batch and the switches."""

RULES = SHAPE_RULES + STEP_RULES


def broken_rule(spec: Spec, layout: Layout, rules: tuple[Rule, ...] = RULES) -> tuple[Rule, str] | None:
    """The first rule that a layout breaks, with its failed equation."""
    for rule in rules:
        if equation := rule.failed(spec, layout):
            return rule, equation
    return None
