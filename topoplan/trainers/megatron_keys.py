"""Keys that both Megatron trainers have under one name -> values of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import LayoutError
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.stages import spread_pipeline_layout, vpp_of
from topoplan.reading.values import Keys
from topoplan.specs.job import Job
from topoplan.specs.model import Model

_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def shared_values(keys: Keys, model: Model) -> dict[str, Any]:
    """Layout values of the keys that both have under one name."""
    pp = keys.degree("pipeline_model_parallel_size")
    vpp = keys.degree("virtual_pipeline_model_parallel_size")
    text = keys.text("pipeline_model_parallel_layout")
    if text is not None:
        try:
            vpp = vpp_of(text, pp)
        except LayoutError as error:
            keys.fail("pipeline_model_parallel_layout", str(error))
    elif keys.flag(_EMBEDDING) or keys.flag(_LOSS):
        text = _accounted_layout(keys, model.num_layers, pp, vpp)
    return {
        "tp": keys.degree("tensor_model_parallel_size"),
        "pp": pp,
        "vpp": vpp,
        "cp": keys.degree("context_parallel_size"),
        "ep": keys.degree("expert_model_parallel_size"),
        "pipeline_layout": text,
        "recompute": _recompute(keys),
        "distributed_optimizer": keys.flag("use_distributed_optimizer"),
        "overlap_grad_reduce": keys.flag("overlap_grad_reduce"),
        "overlap_param_gather": keys.flag("overlap_param_gather"),
        "optimizer_offload_fraction": (
            keys.fraction("optimizer_offload_fraction") if keys.flag("optimizer_cpu_offload") else 0.0
        ),
    }


def _accounted_layout(keys: Keys, layers: int, pp: int, vpp: int) -> str | None:
    """The split in which embedding or loss count as a layer (MLM `transformer_block.py::get_num_layers_to_build`)."""
    first, last, count = int(keys.flag(_EMBEDDING)), int(keys.flag(_LOSS)), pp * vpp
    total = layers + first + last
    if count == 1:
        return None
    if total % count:
        equation = f"({layers} layers + {first + last}) % (pp {pp} * vpp {vpp}) = {total % count}"
        keys.fail(_EMBEDDING if first else _LOSS, equation, expected="expected stages of equal length")
    return spread_pipeline_layout(layers, pp, vpp, total // count - first, total // count - last)


def _recompute(keys: Keys) -> Recompute:
    granularity = keys.value("recompute_granularity")
    in_moe = keys.flag("moe_layer_recompute")
    modules = keys.value("recompute_modules")
    if granularity in (None, "none") and not in_moe:
        return Recompute()
    if in_moe and granularity != "full":
        # MLM transformer_config.py: the old name of selective recomputation of `moe`
        names = modules if isinstance(modules, list) else str(modules or "core_attn").split(",")
        modules, granularity = [*(names if granularity == "selective" else ()), "moe"], "selective"
    form = {"granularity": granularity}
    if granularity == "selective":
        form["modules"] = modules.split() if isinstance(modules, str) and "," not in modules else modules
    elif granularity == "full":
        form["method"] = keys.value("recompute_method")
        form["num_layers"] = keys.count("recompute_num_layers")
    try:
        return recompute_from_value(form, "recompute_granularity")
    except LayoutError as error:
        keys.fail("recompute_granularity", f"recompute_granularity: {error.what}", expected=error.expected)


def layout_from(backend: str, values: Mapping[str, Any], *, world: int, **others: Any) -> Layout:
    """A layout of the shared values and the trainer's own, with the data parallel size that is left of `world`."""
    dp = max(1, world // (values["tp"] * values["pp"] * values["cp"]))
    return Layout.of(backend=backend, dp=dp, **values, **others)


def check_something_trained(keys: Keys, key: str, job: Job) -> None:
    """Raise SpecError at `key` where every part of the model is frozen."""
    if job.freeze_language_model and job.freeze_vision_tower and job.freeze_multi_modal_projector:
        keys.fail(key, "everything is frozen, so nothing would be trained")


def targets(keys: Keys) -> tuple[str, ...]:
    """The linear layers that ms-swift puts adapters on."""
    names = keys.value("target_modules")
    words = [str(word) for word in names] if isinstance(names, list) else str(names).replace(",", " ").split()
    return ("all",) if "all-linear" in words or not words else tuple(words)
