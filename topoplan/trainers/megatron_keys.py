"""Keys that both Megatron trainers share, and the parts of a layout that they stand for."""

from __future__ import annotations

from dataclasses import replace

from topoplan.errors import LayoutError
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.stages import sized_pipeline_layout, vpp_of
from topoplan.reading.values import Keys
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.layout_parts import stage_sizes_in
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Comment, Reading, Row, Write, by_key, flag

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SPLIT, SP = "pipeline_model_parallel_layout", "sequence_parallel"
DISPATCHER = "moe_token_dispatcher_type"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


# Reading -------------------------------------------------------------------------------------------------------------


def _virtual_stages(reading: Reading, key: str) -> int:
    given, text = reading.keys.degree(key), reading.keys.text(SPLIT)
    if text is None:
        return given
    try:
        return vpp_of(text, reading.parts["pp"])
    except LayoutError as error:
        reading.keys.fail(SPLIT, str(error))


def _pipeline_layout(reading: Reading, key: str) -> str | None:
    """Return the pipeline split as written, or computed from the sizes of the first and last stages."""
    keys, pp, vpp = reading.keys, reading.parts["pp"], reading.parts["vpp"]
    said = {name: keys.count(name) for name in (FIRST, LAST)} | {name: keys.flag(name) for name in (EMBEDDING, LOSS)}
    sizes, text = stage_sizes_in(said), keys.text(key)
    if sizes is None:
        return text
    first = next(name for name, value in said.items() if value)
    if text is not None:
        keys.fail(first, f"{first} beside {key}", expected="expected one of them")
    mtp_layers = keys.value("mtp_num_layers") and keys.degree("mtp_num_layers")
    try:
        return sized_pipeline_layout(reading.model.num_layers, pp, vpp, sizes, mtp_layers or 0)
    except LayoutError as error:
        keys.fail(first, f"{first}: {error.what}")


def _recompute(reading: Reading, key: str) -> Recompute:
    keys = reading.keys
    granularity, modules = keys.value(key), keys.value("recompute_modules")
    in_moe = keys.flag("moe_layer_recompute")
    if granularity in (None, "none") and not in_moe:
        return Recompute()
    if in_moe and granularity != "full":
        # MLM transformer_config.py: a deprecated alias for selective recomputation of `moe`
        names = modules if isinstance(modules, list) else str(modules or "core_attn").split(",")
        modules, granularity = [*(names if granularity == "selective" else ()), "moe"], "selective"
    form = {"granularity": granularity}
    if granularity == "selective":
        form["modules"] = modules.split() if isinstance(modules, str) and "," not in modules else modules
    elif granularity == "full":
        form["method"] = keys.value("recompute_method")
        form["num_layers"] = keys.count("recompute_num_layers")
    try:
        return recompute_from_value(form, key)
    except LayoutError as error:
        keys.fail(key, f"{key}: {error.what}", expected=error.expected)


# Writing -------------------------------------------------------------------------------------------------------------


def expert_tensor(spec: Spec, layout: Layout) -> int | None:
    """Return the tensor-parallel size of the experts; None without experts."""
    return layout.etp if facts_of(spec.model).is_moe else None


def modules(_: Spec, layout: Layout) -> str | None:
    """Return the modules recomputed selectively, in one string without spaces: mcore_adapter only splits at commas."""
    recompute = layout.recompute
    return ",".join(recompute.modules) or "core_attn" if recompute.granularity == "selective" else None


def in_full(value: Write) -> Write:
    """Restrict a value to full recomputation; None otherwise."""
    return lambda spec, layout: value(spec, layout) if layout.recompute.granularity == "full" else None


DEGREES = by_key(
    Row(TP, "tp"),
    Row(PP, "pp"),
    Row(VPP, "vpp", _virtual_stages, "model chunks per GPU", lambda _, layout: layout.vpp if layout.vpp > 1 else None),
    Row(SPLIT, "pipeline_layout", _pipeline_layout),
    Row(CP, "cp"),
    Row(
        EP,
        "ep",
        comment="uses the data-parallel ranks",
        write=lambda spec, layout: layout.ep if facts_of(spec.model).is_moe else None,
    ),
    Row(
        ETP,
        "etp",
        lambda reading, key: reading.keys.degree(key) if reading.is_moe else 1,
        "the default is 1, not TP",
        expert_tensor,
    ),
    Row(
        SP,
        "sequence_parallel",
        lambda reading, key: reading.parts["tp"] > 1 and reading.keys.flag(key),
        lambda _, layout: "splits norms along the sequence within a TP group" if layout.tp > 1 else "needs TP > 1",
    ),
)
MEMORY = by_key(
    Row(
        "recompute_granularity",
        "recompute",
        _recompute,
        write=lambda _, layout: None if layout.recompute.granularity == "none" else layout.recompute.granularity,
    ),
    Row("recompute_method", write=in_full(lambda _, layout: layout.recompute.method or "uniform")),
    Row("recompute_num_layers", write=in_full(lambda _, layout: layout.recompute.num_layers or 1)),
    Row("recompute_modules", comment="recomputed in backward instead of saved", write=modules),
    Row(
        "use_distributed_optimizer", "distributed_optimizer", flag, "optimizer states sharded over the dp and cp ranks"
    ),
    Row("overlap_grad_reduce", "overlap_grad_reduce", flag, "gradients are reduced during backward"),
    Row("overlap_param_gather", "overlap_param_gather", flag, "parameters are gathered during forward"),
    Row(
        "optimizer_cpu_offload",
        write=lambda _, layout: layout.optimizer_offload_fraction > 0 or None,
        show=lambda _, layout: layout.optimizer_offload_fraction > 0,
    ),
    Row(
        "optimizer_offload_fraction",
        "optimizer_offload_fraction",
        lambda reading, key: reading.keys.fraction(key) if reading.keys.flag("optimizer_cpu_offload") else 0.0,
        "fraction of the optimizer states in host memory",
        lambda _, layout: float(layout.optimizer_offload_fraction) or None,
    ),
    Row(
        "moe_expert_capacity_factor",
        "moe_expert_capacity_factor",
        lambda reading, key: reading.keys.positive(key),
        "an expert drops tokens beyond this multiple of the average",
        show=lambda _, layout: layout.moe_expert_capacity_factor,
    ),
)
MEMORY_KEYS = (
    *("use_distributed_optimizer", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "optimizer_cpu_offload", "optimizer_offload_fraction", "moe_expert_capacity_factor"),
)
"""Keys in the order of their section of train.yaml."""


def with_comment(key: str, comment: Comment) -> Row:
    """Return the row of a shared key with another comment."""
    return replace((MEMORY if key in MEMORY else DEGREES)[key], comment=comment)


def title(layout: Layout) -> str:
    """Return the title of train.yaml's section on the layout."""
    return f"Layout: dp {layout.dp} = {layout.world_size} GPUs / (tp {layout.tp} * pp {layout.pp} * cp {layout.cp})"


def dispatcher_assumption(keys: Keys, layout: Layout) -> str:
    """Return a sentence if tokens are dispatched in a way that is only approximated; else empty."""
    dispatcher = keys.value(DISPATCHER)
    if layout.ep == 1 or dispatcher in ("alltoall", "flex"):
        return ""
    return f"the {dispatcher} dispatcher is predicted as alltoall, which sends less"


def check_something_trained(keys: Keys, key: str, job: Job) -> None:
    """Raise SpecError at `key` if every part of the model is frozen."""
    if job.freeze_language_model and job.freeze_vision_tower and job.freeze_multi_modal_projector:
        keys.fail(key, "everything is frozen, so nothing would be trained")


def targets(keys: Keys, key: str) -> tuple[str, ...]:
    """Return the linear layers that get adapters, from a list or text separated by commas or blanks; empty for none."""
    written = keys.value(key)
    names = map(str, written) if isinstance(written, list) else str(written or "").replace(",", " ").split()
    found = tuple(name.strip() for name in names if name.strip())
    return ("all",) if "all-linear" in found else found
