"""LLaMA-Factory's Megatron path (mcore_adapter): the meaning of its keys, and how a layout is written in them.

Defaults are those of the key list in `catalog/trainer_keys`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, Row, by_key, layout_of, nothing
from topoplan.trainers.llamafactory.common import carried, takes
from topoplan.trainers.llamafactory.key_list import defaults_of
from topoplan.trainers.llamafactory.mca_refusals import FREEZABLE_MODEL_TYPES, STAGES, job_refusals
from topoplan.trainers.megatron_keys import (
    DEGREES,
    ETP,
    MEMORY,
    SP,
    SPLIT,
    check_something_trained,
    dispatcher_assumption,
    expert_tensor,
    with_comment,
)
from topoplan.trainers.train_yaml import why_accumulation
from topoplan.units import shown


def _why_method(_: Spec, layout: Layout) -> str:
    block = "; the parser's help says recompute, Megatron expects block" if layout.recompute.method == "block" else ""
    return f"full needs both method and number of layers{block}"


def _why_gather(spec: Spec, layout: Layout) -> str:
    if layout.overlap_param_gather or spec.job.trainer.get("save_strategy") != "no":
        return "gathers parameters during forward; needs both above"
    return "with overlap, the final model would partly be that of the previous step"


ROWS = by_key(
    *DEGREES.values(),
    with_comment(SPLIT, "uneven stages; the adapter accepts only this form"),
    Row(
        ETP,
        "etp",
        # MLM model_parallel_config.py: None takes tensor_model_parallel_size.
        lambda reading, key: (reading.keys.count(key) or reading.parts["tp"]) if reading.is_moe else 1,
        lambda _, layout: "the default is TP" + ("" if layout.etp == layout.tp else "; checkpoints are torch_dist"),
        lambda spec, layout: expert_tensor(spec, layout) if layout.tp > 1 or layout.etp > 1 else None,
        expert_tensor,
    ),
    replace(
        DEGREES[SP],
        # models/model_config.py::McaModelConfig.__post_init__: disabled without TP, enabled with TP and EP.
        read=lambda reading, key: reading.parts["tp"] > 1 and (reading.keys.flag(key) or reading.parts["ep"] > 1),
    ),
    Row(
        "per_device_train_batch_size",
        "micro_batch_size",
        comment=lambda spec, _: (
            "pairs; Megatron's micro batch has twice as many sequences"
            if spec.job.sequences_per_sample > 1
            else "Megatron's micro batch"
        ),
    ),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps", comment=why_accumulation),
    *MEMORY.values(),
    with_comment(
        "recompute_granularity",
        lambda _, layout: "keeps only the input of each layer" if layout.recompute.granularity == "full" else "",
    ),
    with_comment("recompute_method", _why_method),
    with_comment("overlap_param_gather", _why_gather),
    Row(
        "accumulate_allreduce_grads_in_fp32",
        "grad_reduce_in_fp32",
        # training_args.py: bf16 enables it.
        lambda reading, key: reading.keys.flag("bf16") or reading.keys.flag(key),
        "by default, fp16 reduces gradients in fp16",
        lambda spec, layout: layout.grad_reduce_in_fp32 if spec.job.precision == "fp16" else None,
        nothing,
    ),
    Row(
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion",
        lambda reading, key: reading.keys.flag(key) and reading.parts["tp"] == 1,  # its help: only with TP 1
        "effective only with TP 1",
        lambda _, layout: layout.cross_entropy_fusion or None,
        nothing,
    ),
    Row(
        "fp8_param",
        "fp8_param",
        lambda reading, key: reading.keys.value("fp8") is not None and reading.keys.flag(key),
        write=lambda _, layout: layout.fp8_param or None,
        show=nothing,
    ),
)
LAYOUT_KEYS = (*DEGREES, "per_device_train_batch_size", "gradient_accumulation_steps")
"""Keys in the order of their section of train.yaml."""


def _assumptions(reading: Reading, layout: Layout, _: Job) -> Iterator[str]:
    if (method := reading.keys.value("finetuning_type")) != "full":
        yield f"finetuning_type {method} trains all weights in this trainer"
    yield dispatcher_assumption(reading.keys, layout)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys, model = reading.keys, reading.model
    stage = keys.text("stage") or "sft"
    if stage not in STAGES:
        keys.fail(
            "stage", f"stage {shown(stage)} does not reach the Megatron trainer", expected="expected pt, sft or dpo"
        )
    if keys.text("optimizer") != "adam":
        keys.fail("optimizer", f"optimizer {keys.text('optimizer')} is not predicted", expected="expected adam")
    apart = stage == "sft" and (keys.flag("neat_packing") or keys.flag("sequence_packing"))
    # train/mca/workflow.py::_freeze_model_parameters; run_pt does not call it.
    freezes = stage != "pt" and model.model_type in FREEZABLE_MODEL_TYPES
    job = Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision=_precision(keys),
        **of_stage(reading, stage, apart=apart, freezes=freezes),
        mtp_num_layers=keys.value("mtp_num_layers") and keys.degree("mtp_num_layers"),
        pin={"cp": 1} if apart else {},  # sub-sequence lengths are not multiples of 2 * cp (mca_user_keys.py)
    )
    check_something_trained(keys, "freeze_language_model", job)
    return replace(job, samples=None if job.packs else _most_samples(keys))


def _precision(keys: Keys) -> str:
    if keys.flag("fp16"):
        if keys.flag("bf16"):
            keys.fail("fp16", "bf16 and fp16 are both on, and exclude each other", expected="expected one of them")
        return "fp16"
    if not keys.flag("bf16"):
        what = "neither bf16 nor fp16 is on: the trainer then keeps weights in fp32, which is not predicted"
        keys.fail("bf16", what, expected="expected bf16: true, or fp16: true")
    if keys.value("fp8") is None:
        return "bf16"
    return "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"


def _most_samples(keys: Keys) -> int | None:
    """Return the maximum number of samples per epoch: LLaMA-Factory takes up to `max_samples` from every dataset."""
    limit, names = keys.count("max_samples"), keys.value("dataset")
    if limit is None or not isinstance(names, str) or keys.flag("streaming"):
        return None
    return limit * len([name for name in names.split(",") if name.strip()]) or None


def packs(stage: Any, packing: Any) -> bool:
    """Whether a job packs, following `hparams/parser.py`: by default only in stage pt."""
    return stage == "pt" if packing is None else bool(packing)


def of_stage(reading: Reading, stage: str, *, apart: bool, freezes: bool) -> dict[str, Any]:
    """Return keys of a job that both paths read in the same way: its stage, packing, frozen parts, images.

    `apart`: samples of a packed sequence do not attend to each other. `freezes`: the trainer knows the model's parts.
    """
    keys = reading.keys
    parts = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    return {
        "stage": "sft" if stage == "kto" else stage,
        "reference_forwards": _reference_forwards(keys, stage),
        "packing": apart or packs(stage, keys.given("packing")),
        "trainer": {"neat_packing": True} if apart else {},
        "image_max_pixels": keys.degree("image_max_pixels"),
        **{part: freezes and reading.model.vision is not None and keys.flag(part) for part in parts},
    }


def _reference_forwards(keys: Keys, stage: str) -> int | None:
    """Return the number of reference forward passes if it differs from the default of the stage."""
    if stage == "kto":
        return 3  # train/kto/trainer.py: policy and reference see the sample, and again with a mismatched answer
    # hparams/finetuning_args.py, use_ref_model
    return 0 if stage == "dpo" and keys.value("pref_loss") in ("orpo", "simpo") else None


CODEC = Codec(
    reads="mca",
    rows=ROWS,
    defaults=partial(defaults_of, "mca"),
    length="cutoff_len",
    layout=lambda reading: layout_of(ROWS, reading, backend="mca"),
    job=_job,
    carries=carried,
    takes=partial(takes, path="mca"),
    refusals=job_refusals,
    follows=("apply_rope_fusion", "moe_token_dispatcher_type"),
    assumptions=_assumptions,
)
