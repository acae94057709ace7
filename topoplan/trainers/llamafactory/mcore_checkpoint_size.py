"""Checkpoint sizes on Megatron: what mcore_adapter saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout, changed
from topoplan.specs.case import case_with
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.llamafactory.mca_facts import resumable
from topoplan.trainers.traits import MCA

_WEIGHT_BYTES = 2  # bf16 or fp16
_STATE_BYTES = {"adam": 12, "sgd": 8}  # fp32: the weight, and two moments or one


def checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """Return the checkpoint sizes of a run with these trainer keys.

    mcore_adapter trainer/trainer.py, save_model and _save_optimizer_and_scheduler; checkpointing.py,
    save_config_and_state_dict: a legacy checkpoint has the files of all ranks with expert data-parallel rank 0, and
    therefore the non-expert weights once per expert-parallel rank. Megatron-core distrib_optimizer.py: the distributed
    optimizer saves every element once, in fp32.
    """
    all_trained = replace(
        spec.job, freeze_language_model=False, freeze_vision_tower=False, freeze_multi_modal_projector=False
    )
    one = changed(layout, tp=1, pp=1, vpp=1, ep=1, etp=1, pipeline_layout=None)
    every = stage_parameters(case_with(replace(spec, job=all_trained), MCA), one, 0)
    trained = stage_parameters(case_with(spec, MCA), one, 0)
    copies = 1 if values.get("ckpt_format") == "torch_dist" or not resumable(spec, layout) else layout.ep
    to_hf = bool(values.get("save_hf_model"))
    weights_alone = bool(values.get("save_only_model"))
    state = 0 if weights_alone else _STATE_BYTES[str(values.get("optimizer", "adam"))]
    state_copies = 1 if layout.distributed_optimizer else layout.ep
    limit = values.get("save_total_limit")
    return CheckpointSize(
        megatron_bytes=0 if weights_alone and to_hf else _WEIGHT_BYTES * (every.expert + copies * every.dense),
        hf_bytes=_WEIGHT_BYTES * every.total if to_hf else 0,
        optimizer_bytes=state * (trained.expert + state_copies * trained.dense),
        at_once=0 if values.get("save_strategy") == "no" else None if limit is None else max(1, int(limit)) + 1,
    )
