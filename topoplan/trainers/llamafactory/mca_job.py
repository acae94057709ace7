"""LLaMA-Factory's Megatron path (mcore_adapter): the job and the layout that its keys mean.

Defaults are those of the key list of `catalog/trainer_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.key_list import known_keys
from topoplan.trainers.llamafactory.mca_yaml import FREEZABLE_MODEL_TYPES
from topoplan.trainers.megatron_keys import check_something_trained, layout_from, shared_values
from topoplan.units import shown

STAGES = ("pt", "sft", "dpo")
"""That have a Megatron workflow (LLaMA-Factory `train/tuner.py`)."""


def defaults() -> Mapping[str, Any]:
    """LLaMA-Factory's own."""
    return {name: key.default for name, key in known_keys().items()}


def layout_of(keys: Keys, model: Model, world: int) -> Layout:
    """The layout on `world` GPUs. Raises SpecError for a value of a wrong type."""
    values = shared_values(keys, model)
    tp, ep = values["tp"], values["ep"]
    is_moe = facts_of(model).is_moe
    fp8 = keys.value("fp8") is not None
    return layout_from(
        "mca",
        values,
        world=world,
        micro_batch_size=keys.degree("per_device_train_batch_size"),
        gradient_accumulation_steps=keys.degree("gradient_accumulation_steps"),
        etp=expert_tensor(keys.count("expert_tensor_parallel_size"), tp) if is_moe else 1,
        sequence_parallel=sequence_parallel(keys.flag("sequence_parallel"), tp, ep),
        # training_args.py: bf16 switches it on
        grad_reduce_in_fp32=keys.flag("bf16") or keys.flag("accumulate_allreduce_grads_in_fp32"),
        cross_entropy_fusion=keys.flag("cross_entropy_loss_fusion") and tp == 1,  # its help: only with TP 1
        fp8_param=fp8 and keys.flag("fp8_param"),
    )


def job_of(keys: Keys, model: Model, layout: Layout, seq_len: int) -> Job:
    """The job. Raises SpecError for what is not predicted."""
    stage = keys.text("stage") or "sft"
    if stage not in STAGES:
        keys.fail(
            "stage", f"stage {shown(stage)} does not reach the Megatron trainer", expected="expected pt, sft or dpo"
        )
    if keys.text("optimizer") != "adam":
        keys.fail("optimizer", f"optimizer {keys.text('optimizer')} is not predicted", expected="expected adam")
    packing = keys.given("packing")
    apart = stage == "sft" and (keys.flag("neat_packing") or keys.flag("sequence_packing"))
    # train/mca/workflow.py::_freeze_model_parameters; run_pt does not call it.
    freezes = stage != "pt" and model.vision is not None and model.model_type in FREEZABLE_MODEL_TYPES
    job = Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision=_precision(keys),
        stage=stage,
        packing=apart or packs(stage, packing),
        freeze_vision_tower=freezes and keys.flag("freeze_vision_tower"),
        freeze_multi_modal_projector=freezes and keys.flag("freeze_multi_modal_projector"),
        freeze_language_model=freezes and keys.flag("freeze_language_model"),
        image_max_pixels=keys.degree("image_max_pixels"),
        mtp_num_layers=keys.value("mtp_num_layers") and keys.degree("mtp_num_layers"),
        trainer={"neat_packing": True} if apart else {},
        pin={"cp": 1} if apart else {},  # its sub-sequences are no multiples of 2 * cp (emit/user_keys.py)
    )
    check_something_trained(keys, "freeze_language_model", job)
    return replace(job, samples=None if job.packs else _most_samples(keys))


def _precision(keys: Keys) -> str:
    if keys.flag("fp16"):
        return "fp16"
    if not keys.flag("bf16"):
        keys.fail("bf16", "neither bf16 nor fp16 is on: the trainer then keeps weights in fp32, which is not predicted")
    if keys.value("fp8") is None:
        return "bf16"
    return "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"


def _most_samples(keys: Keys) -> int | None:
    """Samples of an epoch at most: LLaMA-Factory takes `max_samples` of every data set."""
    limit, names = keys.count("max_samples"), keys.value("dataset")
    if limit is None or not isinstance(names, str) or keys.flag("streaming"):
        return None
    return limit * len([name for name in names.split(",") if name.strip()]) or None


# What the adapter makes of values that are missing or do not go together ----------------------------------------------


def expert_tensor(given: int | None, tp: int) -> int:
    """MLM `model_parallel_config.py`: None takes tensor_model_parallel_size."""
    return given or tp


def sequence_parallel(on: bool, tp: int, ep: int) -> bool:
    """`models/model_config.py::McaModelConfig.__post_init__`: off without TP, on with TP and EP."""
    return tp > 1 and (on or ep > 1)


def packs(stage: Any, packing: Any) -> bool:
    """`hparams/parser.py`: the default of stage pt alone."""
    return stage == "pt" if packing is None else bool(packing)
