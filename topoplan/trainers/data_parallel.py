"""What the trainers that split data alone have in common: the layout of a sharding, and what is not predicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from topoplan.layout.layout import Layout, Recompute
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.values import Keys
from topoplan.trainers import deepspeed_file, fsdp_file
from topoplan.trainers.codec import Comment, Reading, Row, Rows, layout_of, nothing
from topoplan.trainers.sharding import Sharding
from topoplan.trainers.usual import SYNC_EACH_BATCH, WHY_SYNC, must_say_sync, says_sync
from topoplan.units import shown

USUAL_SEQ_LEN = 2048
"""Tokens of a sequence where nothing says how many: LLaMA-Factory's default of cutoff_len."""
CHECKPOINTING = Recompute(granularity="full", method="uniform", num_layers=1)
"""Gradient checkpointing: each layer is recomputed."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_OTHER_LAUNCHERS = frozenset(["mpirun", "mpiexec"])
"""They start processes themselves, by options that are not read."""

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}
"""Of transformers' names (`training_args.py::OptimizerNames`), those whose memory is known."""


def read_layout(rows: Rows, reading: Reading) -> Layout:
    """The layout of a sharding. Raises what the rows' `read` raises."""
    sharding = reading.sharding
    parts = ("backend", "zero_stage", "offload_optimizer", "offload_param", "sharding", "offload")
    return layout_of(
        rows,
        reading,
        **{part: getattr(sharding, part) for part in parts},
        distributed_optimizer=False,
        grad_reduce_in_fp32=sharding.backend != "fsdp2",  # accelerate reduces in the type of the products
    )


# Rows ----------------------------------------------------------------------------------------------------------------


def recompute_row(key: str, comment: Comment = "", *, off: bool = False) -> Row:
    """Gradient checkpointing; `off` where the key switches it off."""

    def read(reading: Reading, key: str) -> Recompute:
        checkpoints = reading.sharding.checkpoints or reading.keys.flag(key) is not off
        return CHECKPOINTING if checkpoints else Recompute()

    return Row(key, "recompute", read, comment, lambda _, layout: (layout.recompute.granularity != "none") is not off)


def liger_row(key: str, types: Collection[str], whole: Callable[[Keys], bool], comment: str) -> Row:
    """Liger's loss: of these model types, and not where `whole` says that the trainer needs the logits as a whole."""
    part = "fused_linear_cross_entropy"

    def read(reading: Reading, key: str) -> bool:
        return reading.keys.flag(key) and reading.model.model_type in types and not whole(reading.keys)

    row = Row(key, part, read, comment)
    return replace(row, write=lambda spec, layout: row.value(spec, layout) or None, show=row.value)


def sharding_rows(presets: Callable[[Layout], tuple[str | None, str | None]]) -> tuple[Row, ...]:
    """What both trainers call the same. `presets` are the names of the files that DeepSpeed and FSDP2 are told by."""
    return (
        Row("deepspeed", show=lambda _, layout: presets(layout)[0] if layout.backend == "deepspeed" else None),
        Row("fsdp", show=lambda _, layout: presets(layout)[1] if layout.backend == "fsdp2" else None),
        Row("per_device_train_batch_size", "micro_batch_size"),
        Row("gradient_accumulation_steps", "gradient_accumulation_steps"),
        Row(
            "accelerator_config",
            "sync_each_batch",
            lambda reading, _: (
                reading.sharding.backend != "fsdp2"
                or reading.parts["gradient_accumulation_steps"] == 1
                or syncs_each_batch(reading.keys)
            ),
            WHY_SYNC,
            lambda _, layout: SYNC_EACH_BATCH if must_say_sync(layout) else None,
            lambda _, layout: "with sync_each_batch" if must_say_sync(layout) else None,
        ),
    )


ALLOCATOR_ROW = Row(
    "PYTORCH_CUDA_ALLOC_CONF",
    "expandable_segments",
    lambda reading, _: bool(expandable_segments(reading.launch)),
    write=nothing,
    show=lambda _, layout: "expandable_segments:True" if layout.expandable_segments else None,
)
"""A variable, not a key: shown beside them."""


def zero_words(layout: Layout) -> str:
    """`stage 2, offload_optimizer on cpu`."""
    offloads = [key for key in ("offload_optimizer", "offload_param") if getattr(layout, key)]
    return f"stage {layout.zero_stage}" + (f", {' and '.join(offloads)} on cpu" if offloads else "")


def zero_preset(layout: Layout, name: str, ending: str = "", *, stages: Collection[int] = (1, 2, 3)) -> str:
    """The file of a trainer's own for a stage, `name` and `ending` around it, or what a file has to say."""
    stage, offloads = layout.zero_stage, layout.offload_optimizer
    all_of_it = layout.offload_param or stage < 3
    if stage in stages and (all_of_it or not offloads) and not (stage == 1 and offloads):
        return f"{name}{stage}{'_offload' if offloads else ''}{ending}"
    return f"a file with {zero_words(layout)}"


# Reading -------------------------------------------------------------------------------------------------------------


def sharding_of(keys: Keys, setup: Setup) -> Sharding:
    """The sharding of a configuration.

    Raises NotPredictedError where files or a launcher that are not known decide it, and for what no layout has.
    """
    configuration = keys.configuration
    if written := keys.given("deepspeed"):
        return deepspeed_file.of_name(written, keys, setup, "deepspeed")
    if written := keys.given("fsdp"):
        return fsdp_file.of_keys(written, keys)
    launch = launch_of(setup, configuration)
    starter = launch.starter if launch else ""
    told = list(setup.of("accelerate"))
    if len(told) == 1 and starter in ("accelerate", ""):
        return fsdp_file.of_accelerate(told[0], keys, setup)
    key = next(
        (name for name in ("finetuning_type", "tuner_type", "train_type") if name in configuration.source.data),
        "deepspeed",
    )
    if starter in ("accelerate", "deepspeed"):
        keys.not_predicted((key,), f"what `{starter}` reads the sharding from was not given, and this")
    others = _OTHER_LAUNCHERS & set(launch.wrappers) if launch and not starter else ()
    if others:
        keys.not_predicted((key,), f"what `{min(others)}` starts, and how many processes,")
    is_alone = launch is not None and visible_gpus(launch) == 1
    if configuration.trainer == "swift" and not (starter or is_alone or (launch and launch.variable("NPROC_PER_NODE"))):
        # cli/main.py starts one process; several visible GPUs share the layers of the model (device_map auto).
        keys.not_predicted((key,), "one process that spreads the model over all GPUs that it sees (no NPROC_PER_NODE)")
    return Sharding()


def syncs_each_batch(keys: Keys) -> bool:
    """Whether the trainer reduces gradients after every micro batch (transformers `trainer.py`, accelerate no_sync)."""
    config = keys.given("accelerator_config")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            config = None
    return says_sync(config)


def optimizer_of(keys: Keys) -> str:
    """The job's optimizer. Raises NotPredictedError for one whose states are not known."""
    name = str(keys.value("optim"))
    if name not in _OPTIMIZERS:
        keys.not_predicted(("optim",))
    return _OPTIMIZERS[name]


def refuse(keys: Keys, off: Mapping[str, Sequence[Any]]) -> None:
    """Raise NotPredictedError, for all keys at once, that have a value other than those that leave them off."""
    on = [key for key, values in off.items() if keys.given(key) is not None and keys.given(key) not in values]
    if on:
        words = " and ".join(f"{key} {_word(keys.given(key))}" for key in on)
        keys.not_predicted(on, words)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


def expandable_segments(launch: Launch | None) -> bool | None:
    """Whether a command's allocator has expandable segments; None where it does not say."""
    found = [found for name in _ALLOCATOR if launch and (found := launch.variable(name))]
    return "expandable_segments:true" in found[-1].value.lower() if found else None
