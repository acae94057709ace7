"""Builds train.yaml from sections, with the user's keys overriding the generated ones, and names the run.

First come the defaults for every trainer's files if the spec says nothing: warm-up, saving, data-loading processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.trainer import MAIN_FILE, TrainerFiles
from topoplan.trainers.yaml_text import Entry, Section, mapping_text
from topoplan.units import file_name

DIGEST_CHARACTERS = 8
WARMUP_FRACTION = 0.03
"""Fraction of all steps."""
DDP_TIMEOUT_S = 7200
SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""Value for accelerator_config; otherwise transformers `trainer.py` runs all but the last micro-batch in no_sync."""
WHY_SYNC = "reduces gradients to their shards after each micro batch; otherwise each GPU accumulates full gradients"
_WARMUP_STEPS_WHEN_UNKNOWN = 20
_SAVES_A_RUN = 5
_SAVE_STEPS_WHEN_UNKNOWN = 200
_MOST_WORKERS = 16
_MOST_LOADERS = 4


def run_name(model: Model, plan_id: str, identity: object) -> str:
    """Return the name of a run and its output: model, plan, and a digest of everything that distinguishes runs."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{file_name(model.name.rstrip('/').rpartition('/')[2], 'model')}-{plan_id}-{digest}"


def must_say_sync(layout: Layout) -> bool:
    """Whether a trainer that uses accelerate needs SYNC_EACH_BATCH in its files to reduce gradients as planned."""
    return layout.backend == "fsdp2" and layout.sync_each_batch and layout.gradient_accumulation_steps > 1


def says_sync(accelerator_config: object) -> bool:
    """Whether an accelerator_config makes the trainer reduce gradients after every micro-batch."""
    config = accelerator_config if isinstance(accelerator_config, dict) else {}
    kwargs = config.get("gradient_accumulation_kwargs")
    return isinstance(kwargs, dict) and kwargs.get("sync_each_batch") is True


def warmup_steps(steps: int | None) -> int:
    """Return the number of warm-up steps for a run of `steps`; None if that number is unknown."""
    return _WARMUP_STEPS_WHEN_UNKNOWN if steps is None else max(1, round(WARMUP_FRACTION * steps))


def save_steps(steps: int | None) -> int:
    """Return the number of steps between checkpoints."""
    return _SAVE_STEPS_WHEN_UNKNOWN if steps is None else max(1, math.ceil(steps / _SAVES_A_RUN))


def workers(cluster: Cluster) -> int:
    """Return the number of tokenizing processes per node."""
    return _MOST_WORKERS if cluster.cpu_cores is None else min(_MOST_WORKERS, cluster.cpu_cores)


def loaders(cluster: Cluster) -> int:
    """Return the number of data-loading processes per GPU."""
    if cluster.cpu_cores is None:
        return _MOST_LOADERS
    return max(1, min(_MOST_LOADERS, cluster.cpu_cores // cluster.gpus_per_node // 2))


def slow_precision(spec: Spec) -> Iterator[str]:
    """Warn if another precision is faster on this card."""
    gpu = spec.cluster.gpu
    if gpu.architecture == "volta" and spec.job.precision == "bf16":
        yield f"{gpu.name} has no bf16 units: precision fp16 is faster"


def why_accumulation(spec: Spec, layout: Layout) -> str:
    """Return the equation by which gradient accumulation gives the batch size."""
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    what = "pairs" if spec.job.sequences_per_sample > 1 else "sequences"
    return f"micro batch * this * dp {layout.dp} = {batch} {what} per step"


OUTPUT_TITLE = "Checkpoints and logs"
"""Title of the section that begins with output_dir."""


DDP_TIMEOUT = Entry("ddp_timeout", DDP_TIMEOUT_S, "seconds: enough for tokenization, and ends a hang")


def head(spec: Spec, layout: Layout, what: str) -> tuple[str, ...]:
    """Return the first lines of a file; `what` says what it is for."""
    return (
        f"{spec.model.name} on {spec.cluster.name}: plan {layout.id}",
        f"For {what}.",
        "Relative paths are relative to the directory in which the node scripts start the trainer.",
    )


def values_of(sections: Iterable[Section]) -> dict[str, Any]:
    """Return the sections as a YAML parser reads them."""
    return {entry.key: entry.value for section in sections for entry in section.entries}


def output_section(steps: int | None, *further: Entry, first: Sequence[Entry] = ()) -> Section:
    """Return the section on where and how often a run of `steps` is saved; output_dir is later put in front."""
    entries = (
        *first,
        Entry("save_strategy", "steps"),
        Entry("save_steps", save_steps(steps)),
        Entry("save_total_limit", 2, "older checkpoints of this run are deleted"),
        *further,
    )
    return Section(title=OUTPUT_TITLE, entries=entries)


def trainer_files(
    spec: Spec,
    layout: Layout,
    sections: Iterable[Section],
    *,
    user: Mapping[str, Any],
    head: Iterable[str],
    warnings: Iterable[str],
    further: Mapping[str, str] | None = None,
) -> TrainerFiles:
    """Return the trainer's files: the sections, and `further` files, which are part of the run's identity too."""
    named = _with_user_keys(list(sections), user)
    identity = [spec.cluster.world_size, values_of(named), *([dict(further)] if further else [])]
    name = run_name(spec.model, layout.id, identity)
    named = _with_output_dir(named, user, name)
    return TrainerFiles(
        files={MAIN_FILE: mapping_text(tuple(head), named), **(further or {})},
        values=values_of(named),
        run_name=name,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _with_output_dir(sections: list[Section], user: Mapping[str, Any], name: str) -> list[Section]:
    if "output_dir" in user:
        return sections
    entry = Entry(
        "output_dir",
        f"saves/{name}",
        "for this plan only, on shared storage; a checkpoint found there is resumed automatically",
    )
    return [
        section._replace(entries=(entry, *section.entries)) if section.title == OUTPUT_TITLE else section
        for section in sections
    ]


def _with_user_keys(sections: list[Section], user: Mapping[str, Any]) -> list[Section]:
    """Override generated values with the user's, and add the user's other keys in a section of their own."""
    ours = {entry.key for section in sections for entry in section.entries}
    origin = "from job.trainer in the spec"
    merged = [
        section._replace(
            entries=tuple(
                entry._replace(value=user[entry.key], comment=origin)
                if entry.key in user and user[entry.key] != entry.value
                else entry
                for entry in section.entries
            ),
        )
        for section in sections
    ]
    further = tuple(Entry(key=key, value=value) for key, value in user.items() if key not in ours)
    return [*merged, Section(title="Further keys of the spec (job.trainer)", entries=further)]


def place_of(spec: Spec, name: str) -> str:
    """Return where a trainer key of the user stands, for messages."""
    return ": ".join(part for part in (spec.path, f"job.trainer.{name}") if part)


def check_user_keys(
    spec: Spec,
    given: Mapping[str, Any],
    check: Callable[[str, Any, str], Any],
    decided: Mapping[str, tuple[Any, ...]],
    of_the_job: Mapping[str, str],
    *,
    left_out: str = "was made for None",
    remedy: str = "leave it out, or ask for it under job.pin",
) -> dict[str, Any]:
    """Return the keys with the values that `check(name, value, where)` gives; it raises SpecError for refused ones.

    `decided` maps a key to the values that agree with the plan, the plan's own first; `of_the_job` maps a trainer's key
    to the job's key that determines it. Raises SpecError for a value that contradicts the job, and LayoutError with
    `remedy` for one that contradicts the plan; `left_out` describes a key that the plan leaves out.
    """
    checked = {}
    for name, value in ((str(name), value) for name, value in given.items()):
        where = place_of(spec, name)
        checked[name] = found = check(name, value, where)
        if found in decided.get(name, (found,)):
            continue
        planned = decided[name][0]
        wanted = left_out if planned is None else f"was made for {planned!r}"
        what = f"{name} is {found!r}, and the plan {wanted}"
        if name in of_the_job:
            raise SpecError(what, where=where, remedy=f"set job.{of_the_job[name]} and leave {name} out")
        raise LayoutError(what, where=where, remedy=remedy)
    return checked
