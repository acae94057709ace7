"""What makes a layout illegal: each rule has a name, a source and, when it fails, its equation with numbers filled in.

MLM is megatron-core 0.16 (`megatron/core/`), MCA is mcore_adapter 0.10 (`mcore_adapter/`), LF is LLaMA-Factory 0.9.5
(`llamafactory/`), TE is Transformer Engine (`transformer_engine/`).
"""

from __future__ import annotations

import math

from topoplan.engines.rule import Rule
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout, batch_remedy, stages_of, undivided
from topoplan.layout.stages import sized_pipeline_layout
from topoplan.operators.dispatch import flex_obstacle
from topoplan.operators.layers import divided, sizes_divided
from topoplan.operators.padding import is_padded_to_seq_len, pad_multiple
from topoplan.operators.softmax_attention import qkv_width
from topoplan.specs.case import Case
from topoplan.specs.facts import facts_of
from topoplan.specs.layout_parts import RECOMPUTE_MODULES, stage_sizes_in


def tensor_parallel_domain(case: Case) -> int:
    """Return the number of GPUs that tensor parallelism may span: the NVLink domain, or without NVLink the node."""
    cluster = case.cluster
    return max(cluster.nvlink_domain_gpus if cluster.nvlink_bytes_per_s else 1, cluster.gpus_per_node)


def _remainder(what: str, value: int, by: str, divisor: int) -> str | None:
    return f"{what} {value} % {by} {divisor} = {value % divisor}" if value % divisor else None


def _first_remainder(what: str, values: tuple[int, ...], by: str, divisor: int) -> str | None:
    for value in values:
        if value % divisor:
            return _remainder(what, value, by, divisor)
    return None


def _fits_domain(case: Case, words: str, ranks: int) -> str | None:
    """Return why consecutive groups of `ranks` GPUs are not each inside one domain, or None.

    `words` says what `ranks` is made of.
    """
    domain = tensor_parallel_domain(case)
    kind = "NVLink domain" if case.cluster.nvlink_bytes_per_s else "node"
    if ranks > domain:
        return f"{words} > {kind} of {domain} GPUs"
    if case.cluster.world_size > domain and domain % ranks:
        return f"{domain} GPUs of {'a' if kind == 'node' else 'an'} {kind} % ({words}) = {domain % ranks}"
    return None


# Tensor, pipeline and context parallel -------------------------------------------------------------------------------


def _world(case: Case, layout: Layout) -> str | None:
    product = layout.tp * layout.pp * layout.cp
    world = case.cluster.world_size
    if world % product:
        return f"world size {world} % (tp {layout.tp} * pp {layout.pp} * cp {layout.cp}) = {world % product}"
    if product * layout.dp != world:
        return (
            f"tp {layout.tp} * pp {layout.pp} * cp {layout.cp} * dp {layout.dp} = {product * layout.dp}"
            f" != world size {world}"
        )
    return None


def _tp_domain(case: Case, layout: Layout) -> str | None:
    return _fits_domain(case, f"tp {layout.tp}", layout.tp)


def _heads(case: Case, layout: Layout) -> str | None:
    return _first_remainder("heads", sizes_divided(case.model, "heads"), "tp", layout.tp)


def _kv_heads(case: Case, layout: Layout) -> str | None:
    tp = layout.tp
    for attention in facts_of(case.model).grouped:
        kv_heads = attention.kv_heads
        if kv_heads % tp == 0:
            continue
        if tp % kv_heads:
            return f"KV heads {kv_heads} % tp {tp} = {kv_heads % tp}, tp {tp} % KV heads {kv_heads} = {tp % kv_heads}"
        # With fewer KV heads than ranks, the fused QKV matrix is split nevertheless, and gathered again. The adapter
        # runs with megatron-core 0.16, which does not split the gate (known_faults.py).
        if attention.output_gate and case.traits.is_adapter:
            return f"tp {tp} > KV heads {kv_heads} with an output gate"
        if equation := _remainder("QKV width", qkv_width(attention), "tp", tp):
            return equation
    return None


def _widths(case: Case, layout: Layout) -> str | None:
    return _first_remainder("MLP width", sizes_divided(case.model, "MLP width"), "tp", layout.tp)


def _vocabulary(case: Case, layout: Layout) -> str | None:
    if not case.traits.vocab_must_divide:
        return None  # it is padded instead
    return _remainder("vocabulary", case.model.vocab_size, "tp", layout.tp)


def _context_parallel(case: Case, layout: Layout) -> str | None:
    if layout.cp == 1:
        return None
    if facts_of(case.model).linear_attention:
        return f"cp {layout.cp} with linear attention layers"
    if case.traits.is_adapter and case.model.vision is not None:
        return f"cp {layout.cp} with images: the trainer cuts every tensor of a batch at its second dimension"
    if case.traits.is_adapter and case.job.stage == "dpo" and facts_of(case.model).is_moe:
        # LLaMA-Factory train/mca/workflow.py, _data_collator_wrapper shifts ids and labels but not a pair's mask, which
        # the adapter drops for dense models only (trainer/trainer.py, _prepare_train_inputs).
        return (
            f"cp {layout.cp} in stage dpo with experts: the mask is a token longer than the sequence, and cannot be cut"
        )
    if case.cluster.gpu.architecture == "volta":
        return f"cp {layout.cp} without Transformer Engine, which Volta lacks"
    if layout.attention_backend == "unfused":
        return f"cp {layout.cp} with attention_backend unfused"
    return _all_to_all_heads(case, layout) if layout.cp_comm_type == "a2a" else None


def _all_to_all_heads(case: Case, layout: Layout) -> str | None:
    """All ranks of a sequence must get the same number of its heads, of queries and of keys."""
    facts, cp, tp = facts_of(case.model), layout.cp, layout.tp
    if facts.latent_attention:
        return f"cp {cp} by all-to-all with latent attention"
    for attention in facts.grouped:
        for what, heads in (("heads", attention.heads), ("KV heads", attention.kv_heads)):
            if rest := max(1, heads // tp) % cp:
                return f"{what} {heads} / tp {tp} % cp {cp} = {rest} by all-to-all"
    return None


# Switches ------------------------------------------------------------------------------------------------------------


def _overlap(case: Case, layout: Layout) -> str | None:
    if not layout.overlap_param_gather:
        return None
    if not layout.distributed_optimizer:
        return "overlap_param_gather without distributed_optimizer"
    if not layout.overlap_grad_reduce:
        return "overlap_param_gather without overlap_grad_reduce"
    return None


def _adapter(case: Case, layout: Layout) -> str | None:
    """What mcore_adapter has no key for, or overrides."""
    if not case.traits.is_adapter:
        return None
    if layout.precision_aware_optimizer:
        return "precision_aware_optimizer, which the adapter does not pass on"
    if not layout.grad_reduce_in_fp32 and case.job.precision != "fp16":
        return f"grad_reduce_in_fp32 false with precision {case.job.precision}: the adapter switches it on"
    if layout.cross_entropy_fusion and layout.tp > 1:
        return f"cross_entropy_fusion with tp {layout.tp}: the adapter fuses it with tp 1 alone"
    if layout.attention_backend != "auto":
        return f"attention_backend {layout.attention_backend}, which the adapter has no key for"
    if layout.tp_comm_overlap:
        return "tp_comm_overlap, for which the adapter makes no user buffers"
    if layout.cp_comm_type != "p2p":
        return f"cp_comm_type {layout.cp_comm_type}, which the adapter does not pass on"
    if layout.moe_token_dispatcher_type == "flex":
        return "moe_token_dispatcher_type flex: the adapter takes allgather and alltoall"
    if layout.fp8_param and layout.optimizer_offload_fraction:
        # Megatron-LM training/arguments.py refuses it; the adapter does not check.
        return "optimizer_offload_fraction with fp8_param: Megatron offloads for the delayed fp8 recipe alone"
    return None


def _optimizer(case: Case, layout: Layout) -> str | None:
    for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if (dtype := getattr(layout, key)) != "fp32":
            if not layout.precision_aware_optimizer:
                return f"{key} {dtype} without precision_aware_optimizer"
            if layout.optimizer_offload_fraction:
                # HybridDeviceOptimizer is constructed without these dtypes (`optimizer/__init__.py`).
                return f"{key} {dtype} with optimizer_offload_fraction, whose optimizer keeps fp32"
    if layout.distributed_optimizer:
        return None
    if layout.precision_aware_optimizer:
        return "precision_aware_optimizer without distributed_optimizer"
    if layout.optimizer_offload_fraction:
        # Float16OptimizerWithFloat16Params puts fp32 weights into its groups, which the hybrid optimizer then does not
        # know.
        return f"optimizer_offload_fraction {layout.optimizer_offload_fraction:g} without distributed_optimizer"
    return None


def _user_buffers(case: Case, layout: Layout) -> str | None:
    """Transformer Engine has user buffers for the layers named qkv, proj, fc1 and fc2."""
    if not layout.tp_comm_overlap:
        return None
    if layout.tp == 1:
        return "tp_comm_overlap with tp 1"
    facts = facts_of(case.model)
    if facts.latent_attention or facts.linear_attention:
        return f"tp_comm_overlap with {'latent' if facts.latent_attention else 'linear'} attention: Megatron drops it"
    if case.job.finetuning == "lora":
        return "tp_comm_overlap with adapters, which is not predicted"
    if not case.cluster.nvlink_bytes_per_s:
        return "tp_comm_overlap without NVLink, over which user buffers are mapped"
    return None


# Experts -------------------------------------------------------------------------------------------------------------


def _experts(case: Case, layout: Layout) -> str | None:
    facts = facts_of(case.model)
    if not facts.is_moe:
        if layout.ep > 1 or layout.etp > 1:
            return f"ep {layout.ep}, etp {layout.etp} on a model without experts"
        return None
    return _first_remainder("experts", facts.experts, "ep", layout.ep)


def _experts_fix(case: Case, layout: Layout) -> str:
    experts = facts_of(case.model).experts
    return f"choose ep among the divisors of {experts[0]}" if experts else "leave ep and etp out"


def _expert_grid(case: Case, layout: Layout) -> str | None:
    if not facts_of(case.model).is_moe:
        return None
    world, product = case.cluster.world_size, layout.etp * layout.ep * layout.pp
    if world % product:
        return f"world size {world} % (etp {layout.etp} * ep {layout.ep} * pp {layout.pp}) = {world % product}"
    return None


def _expert_widths(case: Case, layout: Layout) -> str | None:
    return _first_remainder("expert width", sizes_divided(case.model, "expert width"), "etp", layout.etp)


def _expert_adapters(case: Case, layout: Layout) -> str | None:
    """mcore_bridge builds no adapters for experts that tensor parallelism splits: "LoRA does not support ETP"."""
    if case.job.finetuning != "lora" or layout.etp == 1 or not facts_of(case.model).is_moe:
        return None
    if {"all", "linear_fc1", "linear_fc2"}.isdisjoint(case.job.lora_target):
        return None
    return f"etp {layout.etp} with adapters on the experts, which mcore_bridge builds for etp 1 alone"


def _dispatcher(case: Case, layout: Layout) -> str | None:
    if layout.moe_token_dispatcher_type != "flex" or case.traits.is_adapter:
        return None
    if not facts_of(case.model).is_moe:
        return "flex on a model without experts"
    return flex_obstacle(case.cluster, layout.ep, layout.etp)


def _combined(case: Case, layout: Layout) -> str | None:
    """Megatron-core combines a forward with the backward of another micro-batch."""
    if not layout.overlap_moe_expert_parallel_comm:
        return None
    if case.traits.is_adapter:
        return "overlap_moe_expert_parallel_comm, for which the adapter's forward step makes no plan of the layers"
    if layout.ep == 1:
        return "overlap_moe_expert_parallel_comm with ep 1"
    if layout.pp > 1 and layout.vpp == 1:
        return f"overlap_moe_expert_parallel_comm with pp {layout.pp} and vpp 1"
    return None


def _expert_domain(case: Case, layout: Layout) -> str | None:
    if layout.ep == 1 or {"ep", "etp"} & set(case.job.pin):
        return None
    ranks = layout.etp * layout.ep
    return _fits_domain(
        case, f"etp {layout.etp} * ep {layout.ep} = {ranks}" if layout.etp > 1 else f"ep {ranks}", ranks
    )


def _expert_tensor(case: Case, layout: Layout) -> str | None:
    if layout.ep == 1 and layout.etp != layout.tp and facts_of(case.model).is_moe and "etp" not in case.job.pin:
        return f"etp {layout.etp} != tp {layout.tp} with ep 1: gradients of the experts' copies are not summed"
    return None


# Quantized matrix multiplications ------------------------------------------------------------------------------------


def fp8_alignment(case: Case) -> int:
    """Return the multiple that both sides of a matrix must be in the job's precision; 1 without quantization.

    MLM `fp8_utils.py::get_fp8_align_size`, `fp4_utils.py::get_fp4_align_size`; TE
    `pytorch/utils.py::assert_dim_for_fp8_exec` and `pytorch/tensor/mxfp8_tensor.py`. On Blackwell mcore_adapter's fp8
    is mxfp8.
    """
    precision = case.job.precision
    if precision in ("bf16", "fp16"):
        return 1
    block_scaled = case.traits.is_adapter and case.cluster.gpu.architecture == "blackwell"
    return 32 if precision in ("mxfp8", "nvfp4") or block_scaled else 16


def _fp8_widths(case: Case, layout: Layout) -> str | None:
    align = fp8_alignment(case)
    if align == 1:
        return None
    model, tp, etp, precision = case.model, layout.tp, layout.etp, case.job.precision
    others = [one for one in divided(model) if one[0] not in ("heads", "KV heads", "MLP width", "expert width")]
    for what, width in (*others, *(("MLP width", size) for size in sizes_divided(model, "MLP width"))):
        if width // tp % align:
            return f"{what} {width} / tp {tp} % {align} = {width // tp % align} in {precision}"
    for width in sizes_divided(model, "expert width"):
        if width // etp % align:
            return f"expert width {width} / etp {etp} % {align} = {width // etp % align} in {precision}"
    return None


# Stages --------------------------------------------------------------------------------------------------------------


def _pipeline_split(case: Case, layout: Layout) -> str | None:
    if layout.vpp > 1 and layout.pp == 1:
        return f"vpp {layout.vpp} with pp 1"
    job, layers, sizes = case.job, case.model.num_layers, stage_sizes_in(case.job.pin)
    try:
        if sizes and layout.pipeline_layout != sized_pipeline_layout(
            layers, layout.pp, layout.vpp, sizes, job.mtp_num_layers
        ):
            return "other stages than those that are pinned"
        stages_of(case.model, job, layout)
    except LayoutError as error:
        return error.what
    return None


def _split_fix(case: Case, layout: Layout) -> str:
    layers = case.model.num_layers
    if layout.vpp > 1 and layout.pp == 1:
        return "set vpp to 1, or pp to 2 or more"
    if layout.pipeline_layout:
        stages = f"{layout.pp * layout.vpp} stages with `|` between them"
        return f"write E, then t once for each of the {layers} layers in {stages}, then L; or leave it out"
    return f"choose pp and vpp whose product divides the {layers} layers, or write a pipeline_layout"


def _vision_first_stage(case: Case, layout: Layout) -> str | None:
    tower = case.model.vision
    if tower is None or not tower.min_first_stage_layers:
        return None
    inputs = tower.min_first_stage_layers
    first = stages_of(case.model, case.job, layout)[0][0].num_layers
    if case.traits.is_adapter and first <= inputs:
        return f"{first} layers on the first stage <= {inputs} deepstack inputs of the vision tower"
    if first < inputs:
        return f"{first} layers on the first stage < {inputs} deepstack inputs of the vision tower"
    return None


def _token_prediction(case: Case, layout: Layout) -> str | None:
    if not case.job.mtp_num_layers or not case.traits.is_adapter:
        return None
    last = stages_of(case.model, case.job, layout)[-1][-1]
    if not last.mtp_layers:
        return "multi-token prediction before the last stage, where the adapter loads its weights"
    if not last.num_layers:
        return "no layer beside multi-token prediction on the last stage, whose last one it is built as"
    return None


# A step --------------------------------------------------------------------------------------------------------------


def _batch(case: Case, layout: Layout) -> str | None:
    batch, product = case.job.global_batch_size, layout.micro_batch_size * layout.dp
    product_words = f"micro_batch_size {layout.micro_batch_size} * dp {layout.dp}"
    if equation := undivided(batch, layout.micro_batch_size, layout.dp):
        return equation
    if product * layout.gradient_accumulation_steps != batch:
        return (
            f"{product_words} * gradient_accumulation_steps {layout.gradient_accumulation_steps}"
            f" != global_batch_size {batch}"
        )
    if case.traits.is_adapter and case.job.samples is not None and case.job.samples < product:
        return f"samples {case.job.samples} < {product_words} = {product}: no rank would get a full micro batch"
    return None


def _batch_fix(case: Case, layout: Layout) -> str:
    """Return how to correct a batch that breaks the rule."""
    batch, product = case.job.global_batch_size, layout.micro_batch_size * layout.dp
    if not batch % product:
        return "leave gradient_accumulation_steps out, or take more samples"
    return batch_remedy(batch, layout.micro_batch_size, layout.dp)


def _interleaving(case: Case, layout: Layout) -> str | None:
    # With microbatch_group_size_per_vp_stage at its default, pp, the requirement "0 or at least pp" leaves only 0.
    steps = layout.gradient_accumulation_steps
    if layout.vpp > 1 and steps % layout.pp:
        return f"gradient_accumulation_steps {steps} % pp {layout.pp} = {steps % layout.pp} with vpp {layout.vpp}"
    return None


def _sequence_parallel(case: Case, layout: Layout) -> str | None:
    if layout.sequence_parallel and layout.tp == 1:
        return "sequence_parallel with tp 1"
    if layout.tp_comm_overlap and not layout.sequence_parallel:
        return "tp_comm_overlap without sequence_parallel"
    if not layout.sequence_parallel and layout.tp > 1 and facts_of(case.model).is_moe:
        return f"a mixture of experts with tp {layout.tp} and no sequence_parallel"
    return None


def sequence_parts(layout: Layout) -> int:
    """Return the number of pieces that a sequence is cut into.

    Ring attention cuts it into 2 * cp, and sequence parallelism cuts a rank's own part into tp.
    """
    parts = 2 * layout.cp if layout.cp > 1 else 1
    return math.lcm(parts, layout.cp * layout.tp) if layout.sequence_parallel else parts


def _sequence_length(case: Case, layout: Layout) -> str | None:
    cp, tp, job = layout.cp, layout.tp, case.job
    parts, words = sequence_parts(layout), f"(2 * cp {cp})"
    if layout.sequence_parallel:
        words = f"lcm(2 * cp {cp}, cp {cp} * tp {tp})" if cp > 1 else f"tp {tp}"
    align = fp8_alignment(case)
    if parts == 1 and align == 1:
        return None
    length, what = job.seq_len, "seq_len"
    if case.traits.is_adapter:
        pad = pad_multiple(case.traits.padding, job)
        if is_padded_to_seq_len(case.traits.padding, job, layout):
            length = -(-job.seq_len // pad) * pad
            what = "seq_len" if length == job.seq_len else f"seq_len {job.seq_len} padded to"
        else:
            length, what = pad, "sequences padded to multiples of"
    if length % parts:
        return f"{what} {length} % {words} = {length % parts}"
    tokens = length // cp * layout.micro_batch_size
    if tokens % align:
        micro_batch = f"micro_batch_size {layout.micro_batch_size}"
        return f"{what} {length} / cp {cp} * {micro_batch} % {align} = {tokens % align} in {job.precision}"
    return None


def _recompute(case: Case, layout: Layout) -> str | None:
    recompute, facts = layout.recompute, facts_of(case.model)
    if recompute.granularity == "none":
        return None
    if layout.overlap_moe_expert_parallel_comm and (recompute.granularity == "full" or "moe" in recompute.modules):
        what = "full" if recompute.granularity == "full" else "moe"
        return f"recompute {what} with overlap_moe_expert_parallel_comm"
    adapter = case.traits.is_adapter
    if recompute.granularity == "full":
        if (recompute.num_layers or 1) > case.model.num_layers:
            return f"recompute num_layers {recompute.num_layers} > {case.model.num_layers} layers of the model"
        if case.job.mtp_num_layers and recompute.method == "uniform" and (recompute.num_layers or 1) > 1:
            return f"recompute num_layers {recompute.num_layers} != 1 with multi-token prediction"
        deepstack = case.model.vision is not None and case.model.vision.min_first_stage_layers
        if adapter and deepstack and recompute.method == "uniform" and (recompute.num_layers or 1) > 1:
            return f"recompute num_layers {recompute.num_layers} != 1 with deepstack inputs"
        return None
    modules = recompute.modules
    if unknown := [module for module in modules if module not in RECOMPUTE_MODULES]:
        return f"no module {unknown[0]!r} to recompute"
    if "mla_up_proj" in modules and not facts.latent_attention:
        return "recompute mla_up_proj without latent attention"
    if "moe_act" in modules and not facts.is_moe:
        return "recompute moe_act on a model without experts"
    if "moe_act" in modules and adapter and case.cluster.gpu.architecture == "volta":
        return "recompute moe_act without grouped GEMM, which Volta lacks"
    if "moe" in modules and facts.is_moe and adapter and fp8_alignment(case) == 32:
        return "recompute moe in mxfp8"
    return None


_STATE = "MLM parallel_state.py::initialize_model_parallel"
_CONFIG = "MLM transformer/transformer_config.py::__post_init__"
_CP_SOURCE = (
    _CONFIG + " (gated_delta_net); MCA models/model_factory.py::get_batch_on_this_cp_rank;"
    " MLM transformer/dot_product_attention.py; TE context_parallel.py::attn_forward_func_with_cp"
)
_OPTIMIZER_SOURCE = "MLM optimizer/optimizer_config.py; optimizer/cpu_offloading/hybrid_optimizer.py::step"
_USER_BUFFERS = "MLM extensions/transformer_engine.py::TELinear.__init__; TE pytorch/module/base.py::initialize_ub"
_KV_SOURCE = _CONFIG + "; transformer/attention.py::SelfAttention.get_query_key_value_tensors"
_VISION_SOURCE = "MCA models/qwen3_vl/transformer_block.py::forward"
_MTP_SOURCE = (
    "MCA models/converter/dist_converter.py::is_on_this_rank, models/model_factory.py::_get_mtp_block_spec;"
    " MLM models/gpt/gpt_layer_specs.py::get_gpt_mtp_block_spec_for_backend"
)
_BATCH_SOURCE = "MLM num_microbatches_calculator.py; MCA trainer/trainer.py::_get_train_cyclic_iterator"
_SP_FIX = "switch sequence_parallel on with experts or tp_comm_overlap, and off with tp 1"
_SEQUENCE_SOURCE = "MLM utils.py::get_batch_on_this_cp_rank, tensor_parallel/mappings.py; LF train/mca/workflow.py"
_RECOMPUTE_SOURCE = _CONFIG + "; MCA models/qwen3_vl/transformer_block.py, training_args.py (fp8_recipe)"

_ADAPTER_SOURCE = "mcore_bridge tuners/lora.py::LoraParallelLinear.__init__"

SPLIT_RULES = (
    Rule("overlap", "MCA training_args.py; Megatron-LM arguments.py", _overlap, "set overlap_param_gather to false"),
    Rule("adapter", "MCA training_args.py, trainer/trainer.py", _adapter, "leave it out, or predict backend megatron"),
    Rule("user-buffers", _USER_BUFFERS, _user_buffers, "set tp_comm_overlap to false"),
    Rule("optimizer", _OPTIMIZER_SOURCE, _optimizer, "leave it out, or switch on what it needs"),
    Rule("world-size", _STATE, _world, "choose degrees whose product divides the number of GPUs"),
    Rule(
        "tp-in-nvlink-domain", "tensor parallel moves every activation twice a layer", _tp_domain, "lower tp, raise pp"
    ),
    Rule("heads", _CONFIG, _heads, "choose tp among the divisors of the head count"),
    Rule("kv-heads", _KV_SOURCE, _kv_heads, "choose tp among the divisors of the KV head count"),
    Rule("widths", "MLM tensor_parallel/layers.py (divide)", _widths, "lower tp"),
    Rule("vocabulary", "MCA models: padded_vocab_size is the checkpoint's", _vocabulary, "lower tp"),
    Rule("context-parallel", _CP_SOURCE, _context_parallel, "set cp to 1, or its cp_comm_type to p2p"),
)
"""Rules on the switches, and on tp, pp and cp. Switches come first so that a pin that nothing can satisfy is
reported."""

GRID_RULES = (
    Rule(
        "experts",
        "MLM transformer/moe/moe_layer.py",
        _experts,
        "choose ep among the divisors of the expert count",
        _experts_fix,
    ),
    Rule("expert-grid", _STATE, _expert_grid, "lower ep or etp"),
    Rule("dispatcher", "MLM moe/token_dispatcher.py; DeepEP csrc/deep_ep.cpp", _dispatcher, "leave the dispatcher out"),
    Rule("combined-passes", _CONFIG, _combined, "set overlap_moe_expert_parallel_comm to false"),
    Rule("expert-widths", "MLM tensor_parallel/layers.py (divide)", _expert_widths, "lower etp"),
    Rule("expert-adapters", _ADAPTER_SOURCE, _expert_adapters, "set etp to 1, or leave the experts out of lora_target"),
    Rule("fp8-widths", "TE pytorch/utils.py::assert_dim_for_fp8_exec", _fp8_widths, "lower tp or etp"),
    Rule(
        "pipeline-split",
        "MCA models/model_config.py",
        _pipeline_split,
        "choose pp and vpp that divide the layers",
        _split_fix,
    ),
    Rule("mtp-stage", _MTP_SOURCE, _token_prediction, "choose pp and vpp that leave the last stage a layer"),
    Rule("vision-first-stage", _VISION_SOURCE, _vision_first_stage, "lower pp or vpp"),
)
"""Rules that also depend on ep, etp, vpp and the stages."""

SHAPE_RULES = SPLIT_RULES + GRID_RULES
"""Rules on degrees and switches, independent of micro-batch and recompute mode."""

STEP_RULES = (
    Rule("batch", _BATCH_SOURCE, _batch, "change global_batch_size, or lower micro_batch_size", _batch_fix),
    Rule("interleaving", "MLM pipeline_parallel/schedules.py", _interleaving, "set vpp to 1 or change the micro batch"),
    Rule("sequence-parallel", "MLM model_parallel_config.py; moe/moe_layer.py", _sequence_parallel, _SP_FIX),
    Rule("sequence-length", _SEQUENCE_SOURCE, _sequence_length, "lengthen seq_len to a multiple, or lower cp or tp"),
)
"""Rules that also depend on the micro-batch and sequence parallelism."""

MODE_RULES = (Rule("recompute", _RECOMPUTE_SOURCE, _recompute, "choose another recompute mode"),)
"""Rules that also depend on the recompute mode."""

SEARCH_RULES = (
    Rule("ep-in-nvlink-domain", "all-to-all across nodes", _expert_domain, "lower ep, or pin it"),
    Rule(
        "expert-tensor",
        "MLM extensions/transformer_engine.py: with ep 1 experts count as dense weights (until 0.19)",
        _expert_tensor,
        "set etp to tp",
    ),
)
"""Rules that a search applies unless a pin overrides them; layouts that break one would run."""

RULES = SHAPE_RULES + SEARCH_RULES + STEP_RULES + MODE_RULES
"""All rules, in the order in which a search checks them."""

RULES_OF_A_GIVEN_LAYOUT = SHAPE_RULES + STEP_RULES + MODE_RULES
"""The rules of a layout that is asked for by name: one that a search leaves out as slow is predicted."""
