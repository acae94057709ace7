"""What each GPU holds while a model is quantized as it is loaded, before only its shard stays there.

Without a device_map, transformers loads a model for bitsandbytes to the rank's GPU (4.55.4 and 5.6.0
`quantizers/quantizer_bnb_4bit.py::update_device_map`). For ZeRO-3 and FSDP the trainers give none (LLaMA-Factory
`model/model_utils/quantization.py`, ms-swift `model/utils.py::get_default_device_map`). With ZeRO-3, transformers 4
moves each weight to the host as soon as it is quantized (4.55.4 `modeling_utils.py::_load_state_dict_into_meta_model`);
5 does not (5.6.0 `core_model_loading.py`). With FSDP, version 4 does so for cpu_ram_efficient_loading alone, with which
the other ranks have no weights: accelerate 1.15 does not send 4-bit ones (`utils/fsdp_utils.py::fsdp2_prepare_model`).
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.catalog.packages import allows
from topoplan.engines.data_parallel.parameter_bytes import NF4_BYTES
from topoplan.engines.data_parallel.states import largest_linear
from topoplan.layout.layout import Layout
from topoplan.operators.finetuning import elements_of
from topoplan.operators.op import BF16
from topoplan.specs.case import case_with
from topoplan.specs.spec import Spec
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.traits import HUGGING_FACE
from topoplan.units import GIB

_FREES_WHILE_LOADING = "<5"
"""Versions of transformers with which ZeRO-3 keeps quantized weights on the host until they are sharded."""


def loaded_bytes(spec: Spec, layout: Layout) -> float:
    """Return what a GPU holds at the end of loading, the CUDA context included, if that is the whole quantized model
    although a layout shards it; 0 otherwise.

    The last weight is still in 16 bits beside the others.
    """
    if spec.job.finetuning != "qlora" or not (layout.backend == "fsdp2" or layout.zero_stage == 3):
        return 0.0
    version = spec.cluster.software.get("transformers")
    if layout.backend != "fsdp2" and version is not None and allows(_FREES_WHILE_LOADING, version):
        return 0.0
    elements = elements_of(spec.model, spec.job)
    kept = BF16 * (elements.total - elements.trained - elements.quantised) + NF4_BYTES * elements.quantised
    return kept + BF16 * largest_linear(spec.model) + case_with(spec, HUGGING_FACE).profile.context_bytes


def too_large_to_load(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse a layout whose quantized model does not fit on each GPU while it is loaded, whatever is sharded later."""
    if _is_certain(spec, layout) and (what := _exceeds(spec, layout)):
        yield Refusal(
            "loading",
            f"QLoRA {what}",
            where=f"layout.{'backend' if layout.backend == 'fsdp2' else 'zero_stage'}",
            remedy="take ZeRO-3 with transformers 4, named under `software` in the spec, or a smaller model",
        )


def loading_caveats(spec: Spec, layout: Layout) -> Iterator[str]:
    """Say of a layout that only some versions of transformers can load what the others need."""
    if not _is_certain(spec, layout) and (what := _exceeds(spec, layout)):
        yield (
            "QLoRA with ZeRO-3 needs transformers 4, named under `software` in the spec: from transformers 5 on, it"
            f" {what}"
        )


def loading_note(spec: Spec, layout: Layout, device_bytes: float) -> str:
    """Return a sentence if loading a model that fits takes more of a GPU than training it; else empty."""
    held = loaded_bytes(spec, layout)
    if not device_bytes < held <= spec.cluster.gpu.memory_bytes:
        return ""
    since = "" if _is_certain(spec, layout) else "from transformers 5 on, "
    return (
        f"{since}loading takes {held / GIB:.1f} GiB of each GPU, more than training: every rank holds the whole"
        " quantized model until it is sharded"
    )


def _is_certain(spec: Spec, layout: Layout) -> bool:
    return layout.backend == "fsdp2" or "transformers" in spec.cluster.software


def _exceeds(spec: Spec, layout: Layout) -> str:
    held, card = loaded_bytes(spec, layout), spec.cluster.gpu.memory_bytes
    if held <= card:
        return ""
    return f"loads the whole quantized model on every GPU: {held / GIB:.1f} of {card / GIB:.1f} GiB"
