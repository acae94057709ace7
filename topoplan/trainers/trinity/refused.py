"""What Trinity-RFT's own validator refuses: inconsistent numbers of GPUs, lengths and batches.

Sources, at Trinity-RFT 0.6.0: `common/config_validator.py`; `trainer/verl_legacy/verl_config.py`
(_check_parallel_config). Only values in the file are checked; those taken from the running Ray cluster or the
environment are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.reading import interpolation
from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at
from topoplan.specs.source import KeyPath

RULES = read_rules(__package__, "rules.toml")
ULYSSES = ("trainer", "ulysses_sequence_parallel_size")
_DEGREES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
_ROLLOUT: KeyPath = ("explorer", "rollout_model")
_VERL_ACTOR: KeyPath = ("trainer", "trainer_config", "actor_rollout_ref", "actor")
_NO_ENGINE_OF_ITS_OWN = ("external", "tinker")
_WITH_TASKS = ("both", "explore", "colocate")


def filled(setup: Setup, configuration: Configuration, path: KeyPath) -> Any:
    """Return a value with interpolations resolved from what the scripts set; None if it is unknown."""
    data = configuration.source.data
    return interpolation.filled(at(data, path), data, setup.environment)


class _Read:
    """A configuration as the validator sees it."""

    def __init__(self, setup: Setup, configuration: Configuration) -> None:
        self.setup, self.configuration, self.data = setup, configuration, configuration.source.data

    def count(self, path: KeyPath, default: int | None = None) -> int | None:
        """Return a whole number, None if it is unknown; `default` if the key is absent."""
        if at(self.data, path) is None:
            return default
        return as_whole(filled(self.setup, self.configuration, path))

    def get(self, *path: str | int) -> Any:
        return at(self.data, path)

    @property
    def mode(self) -> object:
        return self.data.get("mode", "both")

    @property
    def is_whole(self) -> bool:
        """Whether the file is a complete run, rather than an excerpt, or several stages with keys of their own."""
        named = isinstance(self.get("model", "model_path"), str)
        return named and {"algorithm", "buffer"} <= self.data.keys() and not self.get("stages")

    def engine(self, path: KeyPath) -> int | None:
        """Return the GPUs of one engine; 0 if it runs elsewhere."""
        if self.get(*path, "engine_type") in _NO_ENGINE_OF_ITS_OWN:
            return 0
        degrees = [self.count((*path, key), 1) for key in _DEGREES]
        return None if None in degrees else math.prod(degree for degree in degrees if degree is not None)

    def engines(self) -> int | None:
        """Return the GPUs of all engines."""
        others = self.get("explorer", "auxiliary_models")
        paths = [_ROLLOUT, *(("explorer", "auxiliary_models", number) for number in range(len(others or ())))]
        if self.mode == "train":
            return 0
        total = 0
        for path in paths:
            gpus, number = self.engine(path), self.count((*path, "engine_num"), 1)
            if gpus is None or number is None:
                return None
            total += gpus * number
        return total

    def cluster(self) -> tuple[int, int] | None:
        """Return the number of nodes and of GPUs per node; None if the running cluster determines them."""
        nodes, gpus = self.count(("cluster", "node_num")), self.count(("cluster", "gpu_per_node"))
        return (nodes, gpus) if nodes and gpus and nodes > 0 and gpus > 0 else None


def refused_findings(setup: Setup, configuration: Configuration, *, is_old: bool) -> Iterator[Finding]:
    """Report what the validator refuses. `is_old`: the file has keys of earlier versions, which required less."""
    read = _Read(setup, configuration)
    yield from _lengths(read)
    if not is_old:
        yield from _batch(read)
        yield from _tasks(read)
    yield from _styles(read)
    if not read.get("stages") and not read.get("model", "tinker", "enable"):
        yield from _gpus(read)


def _lengths(read: _Read) -> Iterator[Finding]:
    """Report lengths that `_check_model_len` refuses."""
    keys = ("max_prompt_tokens", "max_response_tokens", "max_model_len")
    prompt, response, longest = (read.count(("model", key)) for key in keys)
    if prompt is not None and response is not None and longest is not None and prompt + response > longest:
        yield RULES["trinity-lengths"].at(
            read.configuration,
            ("model", "max_model_len"),
            prompt=prompt,
            response=response,
            total=prompt + response,
            longest=longest,
        )
    written = [read.get("model", key) is not None for key in keys]
    if read.is_whole and not any(written):
        yield RULES["trinity-lengths.none"].at(read.configuration, "model")


def _batch(read: _Read) -> Iterator[Finding]:
    """Report a missing batch size, which `BufferConfigValidator.validate` refuses."""
    algorithm = read.get("algorithm", "algorithm_type")
    if (
        not read.is_whole
        or read.get("buffer", "train_batch_size")
        or not (read.mode == "train" or algorithm in ("sft", "dpo"))
    ):
        return
    reason = "mode is train" if read.mode == "train" else f"algorithm_type is {algorithm}"
    yield RULES["trinity-missing-batch"].at(read.configuration, "buffer", reason=reason)


def _tasks(read: _Read) -> Iterator[Finding]:
    """Report missing or conflicting data, which `_check_explorer_input` and `_check_trainer_input` refuse."""
    if not read.is_whole:
        return
    if read.mode == "train" and not read.get("buffer", "trainer_input", "experience_buffer"):
        yield RULES["trinity-missing-data"].at(read.configuration, "buffer", key="trainer_input.experience_buffer")
    inputs: KeyPath = ("buffer", "explorer_input")
    one, several = read.get(*inputs, "taskset"), read.get(*inputs, "tasksets")
    if one and several:
        yield RULES["trinity-two-tasksets"].at(read.configuration, (*inputs, "tasksets"))
    if read.mode not in _WITH_TASKS or read.get("data_processor", "task_pipeline"):
        return
    if not one and not several:
        yield RULES["trinity-missing-data"].at(read.configuration, "buffer", key="explorer_input.taskset")
    elif isinstance(one, Mapping) and not one.get("path"):
        yield RULES["trinity-missing-data"].at(read.configuration, (*inputs, "taskset"), key="taskset.path")


def _styles(read: _Read) -> Iterator[Finding]:
    """Report settings that exclude the style of synchronization."""
    style = str(read.get("synchronizer", "sync_style") or "fixed").lower()
    share: KeyPath = ("explorer", "over_rollout", "ratio")
    ratio = as_number(read.get(*share)) or 0.0
    if ratio > 0 and style == "fixed":
        yield RULES["trinity-over-rollout"].at(read.configuration, share)
    if style == "fully_async" and read.get("buffer", "explorer_input", "eval_tasksets"):
        place: KeyPath = ("buffer", "explorer_input", "eval_tasksets")
        yield RULES["trinity-evaluation-without-sync"].at(read.configuration, place)
    adapters = read.get("model", "lora_configs")
    if isinstance(adapters, list) and len(adapters) > 1:
        yield RULES["trinity-adapters"].at(read.configuration, ("model", "lora_configs"), count=len(adapters))


# GPUs -----------------------------------------------------------------------------------------------------------------


def _gpus(read: _Read) -> Iterator[Finding]:
    """Report GPU counts that `ClusterConfigValidator` refuses: engines come first, and the trainer gets the rest."""
    for key in (*_DEGREES, "engine_num"):
        size = read.count((*_ROLLOUT, key), 1)
        if size is not None and size < 1:
            return  # the key itself is reported
    cluster, engines, engine = read.cluster(), read.engines(), read.engine(_ROLLOUT)
    if read.mode == "colocate":
        yield from _colocated(read, cluster)
        return
    if cluster is None or engines is None or engine is None:
        return
    nodes, gpus_per_node = cluster
    total, place = nodes * gpus_per_node, _place(read)
    if engine > gpus_per_node and engine % gpus_per_node and read.mode != "train":
        yield RULES["trinity-engine-nodes"].at(read.configuration, place, engine=engine, gpus=gpus_per_node)
        return
    if read.mode not in ("both", "train"):
        if engines > total:
            yield RULES["trinity-no-gpus"].at(read.configuration, place, engines=engines, total=total)
        return
    left = total - engines
    if left < 1:
        yield RULES["trinity-no-gpus.train"].at(read.configuration, place, engines=engines, total=total)
    elif left > gpus_per_node and left % gpus_per_node:
        yield RULES["trinity-part-of-a-node"].at(read.configuration, place, left=left, gpus=gpus_per_node)
    else:
        yield from _trainer(read, left)


def _place(read: _Read) -> KeyPath:
    """Return the key that decides how many GPUs the engines take."""
    keys = [key for key in ("engine_num", *_DEGREES) if (read.count((*_ROLLOUT, key), 1) or 1) > 1]
    return (*_ROLLOUT, keys[0]) if keys else ("cluster", "gpu_per_node")


def _colocated(read: _Read, cluster: tuple[int, int] | None) -> Iterator[Finding]:
    """Report anything but one shared GPU in mode colocate."""
    if cluster is not None and math.prod(cluster) != 1:
        what = f"{math.prod(cluster)} GPUs"
        yield RULES["trinity-colocate"].at(read.configuration, ("cluster", "gpu_per_node"), what=what)
    paths = ((*_ROLLOUT, "engine_num"), *((*_ROLLOUT, key) for key in _DEGREES), ULYSSES)
    for path in paths:
        size = read.count(path, 1)
        if size is not None and size > 1:
            yield RULES["trinity-colocate"].at(read.configuration, path, what=f"{path[-1]} {size}")


def _trainer(read: _Read, gpus: int) -> Iterator[Finding]:
    """Report a split of the trainer's GPUs that `_check_parallel_config` refuses."""
    strategies = [read.get("trainer", "trainer_strategy"), read.get(*_VERL_ACTOR, "strategy")]
    if "megatron" in strategies:
        return
    size = read.count(ULYSSES, 1)
    if size is None or size < 1:
        return
    if gpus % size:
        yield RULES["trinity-sequence-parallel.gpus"].at(read.configuration, ULYSSES, size=size, gpus=gpus)
        return
    batch, ranks = _train_batch(read), gpus // size
    if batch is not None and batch % ranks:
        key = "train_batch_size" if read.get("buffer", "train_batch_size") else "batch_size"
        split = f" / {ULYSSES[1]} {size}" if size > 1 else ""
        yield RULES["trinity-batch"].at(
            read.configuration, ("buffer", key), batch=batch, gpus=gpus, split=split, ranks=ranks, rest=batch % ranks
        )


def _train_batch(read: _Read) -> int | None:
    written = read.count(("buffer", "train_batch_size"), 0)
    if written != 0:
        return written
    tasks, repeats = read.count(("buffer", "batch_size")), read.count(("algorithm", "repeat_times"), 1)
    return tasks * repeats if tasks and repeats else None
