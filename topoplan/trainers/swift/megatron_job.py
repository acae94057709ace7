"""ms-swift's `megatron sft`: the job and the layout that its keys mean.

Defaults are those of `swift/megatron/arguments/megatron_args.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topoplan.errors import SpecError
from topoplan.layout.layout import Layout
from topoplan.reading.processes import Processes
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.megatron_keys import check_something_trained, layout_from, shared_values, targets
from topoplan.trainers.swift.refusals import check_finetuning
from topoplan.units import shown

DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn",
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "optimizer_offload_fraction": 1.0,
    "use_distributed_optimizer": True,
    "main_grads_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "freeze_vit": True,
    "freeze_aligner": True,
    "torch_dtype": "bfloat16",
    "num_train_epochs": 1,
    "target_modules": "all-linear",
}
"""`MegatronArguments` and `MegatronTunerMixin` of ms-swift. A model's torch_dtype is its checkpoint's; nearly all have
bfloat16."""


_OFF: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("target_regex", "modules_to_save"), ("",)),
    "lora_bias": ("none",),
}
"""What else may be trained with adapters, and the values that leave it off."""

_ADAPTERS = ("adapters", "mcore_adapter", "ref_adapters", "mcore_ref_adapter")
"""With one of them all weights are not trained, whatever tuner_type says (`MegatronArguments.__post_init__`)."""


def layout_of(keys: Keys, model: Model, world: int) -> Layout:
    """The layout on `world` GPUs. Raises SpecError for what is not predicted."""
    values = shared_values(keys, model)
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "use_megatron_fsdp"):
        if keys.given(key):
            keys.fail(key, f"{key} is not predicted")
    is_moe, tp = facts_of(model).is_moe, values["tp"]
    dp = max(1, world // (tp * values["pp"] * values["cp"]))
    micro_batch = keys.degree("micro_batch_size")
    dispatcher = keys.text("moe_token_dispatcher_type")
    return layout_from(
        "megatron",
        values,
        world=world,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=max(1, keys.degree("global_batch_size") // (micro_batch * dp)),
        etp=keys.degree("expert_tensor_parallel_size") if is_moe else 1,
        sequence_parallel=tp > 1 and keys.flag("sequence_parallel"),
        # megatron_args.py::MegatronArguments._map_dtype
        grad_reduce_in_fp32=keys.value("main_grads_dtype") == "fp32" or keys.flag("accumulate_allreduce_grads_in_fp32"),
        cross_entropy_fusion=keys.flag("cross_entropy_loss_fusion"),
        cross_entropy_fusion_impl=str(keys.value("cross_entropy_fusion_impl")),
        precision_aware_optimizer=keys.flag("use_precision_aware_optimizer"),
        fp8_param=keys.value("fp8_format") is not None and keys.flag("fp8_param_gather"),
        moe_token_dispatcher_type=("flex" if dispatcher == "flex" else "alltoall") if is_moe else None,
    )


def job_of(keys: Keys, model: Model, seq_len: int, processes: Processes | None) -> Job:
    """The job; its command says whether it is pt, sft or rlhf. Raises SpecError for what is not predicted."""
    kind_key = "tuner_type" if keys.given("tuner_type") is not None else "train_type"
    method = keys.given(kind_key) or "full"
    if method not in ("full", "lora"):
        keys.fail(kind_key, f"{kind_key} {shown(method)} is not predicted yet", expected="expected full or lora")
    refuse(keys, _OFF if method == "lora" else dict.fromkeys(_ADAPTERS, ("",)))
    if (optimizer := keys.given("optimizer")) not in (None, "adam"):
        keys.fail("optimizer", f"optimizer {shown(optimizer)} is not predicted", expected="expected adam")
    launch = processes.launch if processes else None
    words = [launch.program.rpartition(".")[2], *launch.arguments[:1]] if launch else []
    stage = next((word for word in words if word in ("pt", "sft", "rlhf")), "sft")
    if stage == "rlhf":
        if keys.given("rlhf_type") != "dpo":
            keys.fail("rlhf_type", f"rlhf_type {shown(keys.given('rlhf_type'))} is not predicted")
        stage = "dpo"
    dtype = "float16" if keys.flag("fp16") else keys.value("torch_dtype")
    if dtype not in ("bfloat16", "float16"):
        keys.fail("torch_dtype", f"torch_dtype {shown(dtype)} is not predicted")
    precision = "fp16" if dtype == "float16" else "bf16"
    if keys.value("fp8_format") is not None:
        precision = "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"
    sees = model.vision is not None
    job = Job(
        seq_len=seq_len,
        global_batch_size=keys.degree("global_batch_size"),
        precision=precision,
        finetuning=str(method),
        stage=stage,
        packing=keys.flag("packing"),
        mtp_num_layers=keys.count("mtp_num_layers") or 0,
        lora_rank=keys.count("lora_rank"),
        lora_target=targets(keys) if method == "lora" else ("all",),
        freeze_vision_tower=sees and keys.flag("freeze_vit"),
        freeze_multi_modal_projector=sees and keys.flag("freeze_aligner"),
        freeze_language_model=sees and keys.flag("freeze_llm"),
        pin={
            "backend": "megatron",
            **({"moe_token_dispatcher_type": "alltoall"} if facts_of(model).is_moe else {}),
            "cross_entropy_fusion": keys.flag("cross_entropy_loss_fusion"),
            "cross_entropy_fusion_impl": str(keys.value("cross_entropy_fusion_impl")),
        },
    )
    check_something_trained(keys, "freeze_llm", job)
    try:
        check_finetuning(job, model, "megatron")
    except SpecError as error:
        raise NotPredictedError(kind_key, error.what, where=keys.place(kind_key)) from None
    return job
