"""What data-parallel trainers have in common: the layout of a sharding, and what is not predicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout, Recompute
from topoplan.trainers.codec import Comment, Reading, Row, Rows, layout_of, nothing
from topoplan.trainers.train_yaml import SYNC_EACH_BATCH, WHY_SYNC, must_say_sync, says_sync
from topoplan.units import shown

if TYPE_CHECKING:
    from topoplan.reading.setup import Launch
    from topoplan.reading.values import Keys

USUAL_SEQ_LEN = 2048
"""Assumed sequence length in tokens if none is given: LLaMA-Factory's default of cutoff_len."""
CHECKPOINTING = Recompute(granularity="full", method="uniform", num_layers=1)
"""Gradient checkpointing: each layer is recomputed."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}
"""Optimizers by their names in transformers (`training_args.py::OptimizerNames`), as far as their memory is known."""


def read_layout(rows: Rows, reading: Reading) -> Layout:
    """Return the layout of a sharding. Raises what the rows' `read` raises."""
    sharding = reading.sharding
    parts = ("backend", "zero_stage", "offload_optimizer", "offload_param", "sharding", "offload")
    return layout_of(
        rows,
        reading,
        **{part: getattr(sharding, part) for part in parts},
        distributed_optimizer=False,
        grad_reduce_in_fp32=sharding.backend != "fsdp2",  # accelerate reduces in the compute dtype
    )


# Rows ----------------------------------------------------------------------------------------------------------------


def recompute_row(key: str, comment: Comment = "", *, off: bool = False) -> Row:
    """Return the row for gradient checkpointing; `off` if the key disables it."""

    def read(reading: Reading, key: str) -> Recompute:
        checkpoints = reading.sharding.checkpoints or reading.keys.flag(key) is not off
        return CHECKPOINTING if checkpoints else Recompute()

    return Row(key, "recompute", read, comment, lambda _, layout: (layout.recompute.granularity != "none") is not off)


def liger_row(key: str, types: Collection[str], whole: Callable[[Keys], bool], comment: str) -> Row:
    """Return the row for Liger's fused loss.

    It applies to these model types, unless `whole` says that the trainer needs the full logits.
    """
    part = "fused_linear_cross_entropy"

    def read(reading: Reading, key: str) -> bool:
        return reading.keys.flag(key) and reading.model.model_type in types and not whole(reading.keys)

    row = Row(key, part, read, comment)
    return replace(row, write=lambda spec, layout: row.value(spec, layout) or None, show=row.value)


def sharding_rows(presets: Callable[[Layout], tuple[str | None, str | None]]) -> tuple[Row, ...]:
    """Return rows for keys that both trainers share. `presets` gives the names of the DeepSpeed and FSDP2 files."""
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
"""Row of an environment variable rather than a key; displayed with the keys."""


def zero_words(layout: Layout) -> str:
    """Return a ZeRO setup in words: `stage 2, offload_optimizer on cpu`."""
    offloads = [key for key in ("offload_optimizer", "offload_param") if getattr(layout, key)]
    return f"stage {layout.zero_stage}" + (f", {' and '.join(offloads)} on cpu" if offloads else "")


def zero_preset(layout: Layout, name: str, ending: str = "", *, stages: Collection[int] = (1, 2, 3)) -> str:
    """Return the trainer's preset for a ZeRO stage, with `name` and `ending` around it, or else what a file needs."""
    stage, offloads = layout.zero_stage, layout.offload_optimizer
    all_of_it = layout.offload_param or stage < 3
    if stage in stages and (all_of_it or not offloads) and not (stage == 1 and offloads):
        return f"{name}{stage}{'_offload' if offloads else ''}{ending}"
    return f"a file with {zero_words(layout)}"


# Reading -------------------------------------------------------------------------------------------------------------


def syncs_each_batch(keys: Keys) -> bool:
    """Whether the trainer reduces gradients after every micro-batch (transformers `trainer.py`, accelerate no_sync)."""
    config = keys.given("accelerator_config")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            config = None
    return says_sync(config)


def optimizer_of(keys: Keys) -> str:
    """Return the job's optimizer. Raises NotPredictedError for one whose state size is unknown."""
    name = str(keys.value("optim"))
    if name not in _OPTIMIZERS:
        keys.not_predicted(("optim",), remedy=f"predicted are {listed([*_OPTIMIZERS])}")
    return _OPTIMIZERS[name]


def refuse(keys: Keys, off: Mapping[str, Sequence[Any]]) -> None:
    """Raise NotPredictedError if any of these keys has a value that enables it; `off` lists the other values."""
    on = [key for key, values in off.items() if keys.given(key) is not None and keys.given(key) not in values]
    if on:
        words = (f"{key} {_shown(keys.given(key))}" for key in on)
        predicted = listed([_predicted(key, off[key]) for key in on])
        keys.not_predicted(on, " and ".join(words), remedy=f"predicted {'is' if len(on) == 1 else 'are'} {predicted}")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


def _predicted(key: str, values: Sequence[Any]) -> str:
    """Return a key with those of its values that a user would write; without any, that the key is left out."""
    words = dict.fromkeys(_shown(one) for one in values if one != "" and not isinstance(one, list))
    return f"{key} {listed([*words], 'or')}" if words else f"no {key}"


def expandable_segments(launch: Launch | None) -> bool | None:
    """Whether a command enables the allocator's expandable segments; None if it does not say."""
    found = [found for name in _ALLOCATOR if launch and (found := launch.variable(name))]
    return "expandable_segments:true" in found[-1].value.lower() if found else None
