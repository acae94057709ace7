"""The rules on Trinity-RFT's configurations: keys, its validator's refusals, long contexts, sequence parallelism.

Sources, at Trinity-RFT 0.6.0: `common/config_validator.py`; `trainer/verl_legacy/verl_config.py`
(_check_parallel_config). Only values in the file are checked; those taken from the running Ray cluster or the
environment are unknown. Of long contexts and sequence parallelism, only what is certain is reported: transformers
`modeling_rope_utils.py` (_validate_yarn_parameters); the Qwen3 model cards ("32,768 natively and 131,072 tokens with
YaRN"; config.json has 40,960, including 8,192 for a prompt); verl `models/transformers/monkey_patch.py`, whose Ulysses
attention asserts that heads divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.operators.layers import sizes_divided
from topoplan.reading import interpolation
from topoplan.reading.finding import Finding
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at
from topoplan.specs.model import Model
from topoplan.specs.source import KeyPath
from topoplan.trainers.around import context_of
from topoplan.trainers.key_classes import KeyClasses
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.relations import read_relations
from topoplan.trainers.trinity.document import trained_positions

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
    if read.is_whole and not written[2] and not all(written[:2]):
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


_ROPE: KeyPath = ("model", "rope_scaling")
_SIZE = ULYSSES[-1]
_RELATIONS = read_relations("topoplan.trainers.trinity", "relations.toml")
_KEYS = KeyClasses(
    listed="trinity",
    top="Config",
    unknown=RULES["trinity-unknown-key"],
    wrong=RULES["trinity-wrong-value"],
    removed=RULES["trinity-removed-key"],
)
"""OmegaConf validates a file against the classes of `common/config.py`."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of Trinity-RFT configurations."""
    for configuration in setup.of("trinity"):
        name = filled(setup, configuration, ("model", "model_path"))
        model = model_at_hand(name, configuration.part)
        of_keys = list(_KEYS.findings(configuration))
        yield from of_keys
        is_old = any(finding.rule == "trinity-removed-key" for finding in of_keys)
        yield from refused_findings(setup, configuration, is_old=is_old)
        known = context_of(setup, configuration)
        refused, unwise = RULES["trinity-refused-together"], RULES["trinity-refused-together.unwise"]
        yield from _RELATIONS.findings(refused, configuration, known, unwise=unwise)
        yield from _rope(setup, configuration, model)
        yield from _sequence_parallel(setup, configuration, model)


def _rope(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    rope = at(configuration.source.data, _ROPE)
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type", rope.get("type"))
    factor = as_number(filled(setup, configuration, (*_ROPE, "factor")))
    original = as_whole(filled(setup, configuration, (*_ROPE, "original_max_position_embeddings")))
    length = as_whole(filled(setup, configuration, ("model", "max_model_len")))
    if kind not in ("yarn", "linear", "dynamic"):
        return
    if factor is not None and factor < 1:
        yield RULES["trinity-rope-factor"].at(configuration, (*_ROPE, "factor"), factor=factor, kind=kind)
        return
    if kind != "yarn":
        return
    if model is not None and model.max_position_embeddings == original != trained_positions(model):
        yield RULES["trinity-rope-original"].at(
            configuration,
            (*_ROPE, "original_max_position_embeddings"),
            original=original,
            model=model.name,
            native=trained_positions(model),
        )
    if factor is None or original is None or length is None or original < 1:
        return
    place, reach = (*_ROPE, "factor"), factor * original
    if length > reach:
        yield RULES["trinity-rope-too-short"].at(
            configuration, place, length=length, factor=factor, original=original, reach=reach, needed=length / original
        )
    elif factor > 1 and length <= original:
        yield RULES["trinity-rope-not-needed"].at(configuration, place, length=length, original=original)


def _sequence_parallel(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    if model is None:
        return
    for path in _places(configuration.source.data):
        size = as_whole(filled(setup, configuration, path))
        if size is None or size < 2:
            continue
        equations = [
            f"heads {heads} % {_SIZE} {size} = {heads % size}"
            for heads in sizes_divided(model, "heads")
            if heads % size
        ] + [
            f"KV heads {heads} % {_SIZE} {size} = {heads % size}, and {size} % {heads} = {size % heads}"
            for heads in sizes_divided(model, "KV heads")
            if heads % size and size % heads
        ]
        for equation in equations[:1]:
            yield RULES["trinity-sequence-parallel"].at(configuration, path, equation=equation, model=model.name)


def _places(data: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every path at which the size of sequence-parallel groups is set."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == _SIZE:
                yield (*path, key)
            else:
                yield from _places(value, (*path, key))
