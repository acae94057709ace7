"""Trinity-RFT's trainer (verl on FSDP): its files are recognized, and read as the job and the layout.

The prediction is for the trainer's step on its share of the GPUs, with samples of maximum length. Sources, at
Trinity-RFT 0.6.0: `common/config.py`, `common/config_validator.py` (max_token_len_per_gpu, GPUs of explorer and
trainer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.nested import flattened
from topoplan.reading.recognizer import SURE, Recognizer
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_whole
from topoplan.specs.job import Job
from topoplan.specs.source import at
from topoplan.trainers.codec import Codec, Reading, Row, StatedSharding, by_key, degree, flag
from topoplan.trainers.data_parallel import ALLOCATOR_ROW, read_layout, recompute_row, refuse

LENGTH = "max_model_len"
_VERL = "trainer.trainer_config.actor_rollout_ref"
_KEYS: Mapping[str, str] = {
    "mode": "mode",
    LENGTH: "model.max_model_len",
    "max_prompt_tokens": "model.max_prompt_tokens",
    "max_response_tokens": "model.max_response_tokens",
    "lora_configs": "model.lora_configs",
    "algorithm_type": "algorithm.algorithm_type",
    "repeat_times": "algorithm.repeat_times",
    "batch_size": "buffer.batch_size",
    "train_batch_size": "buffer.train_batch_size",
    "node_num": "cluster.node_num",
    "gpu_per_node": "cluster.gpu_per_node",
    "trainer_gpu_num": "cluster.trainer_gpu_num",
    "ppo_micro_batch_size_per_gpu": f"{_VERL}.actor.ppo_micro_batch_size_per_gpu",
    "enable_gradient_checkpointing": f"{_VERL}.model.enable_gradient_checkpointing",
}
_DEFAULTS: Mapping[str, Any] = {
    "mode": "both",
    "algorithm_type": "ppo",
    "trainer_type": "verl",
    "trainer_strategy": "fsdp",
    "repeat_times": 1,
    "use_dynamic_bsz": True,
    "node_num": 1,
    "gpu_per_node": 8,
    "enable_gradient_checkpointing": True,
    "enable_activation_offload": False,
    "use_remove_padding": True,
}
_OFF: Mapping[str, tuple[Any, ...]] = {
    "mode": ("both", "train"),
    "trainer_type": ("verl",),
    "trainer_strategy": ("fsdp", "fsdp2"),
    "lora_configs": ([],),
    "enable_activation_offload": (False,),
}
"""Keys that change memory in ways that no formula covers, and the values that disable them."""


def _view(configuration: Configuration, setup: Setup) -> Configuration:
    """Return the configuration with the keys that determine the trainer's step at the top level."""
    found = flattened(configuration, setup, ("trainer",), _KEYS)
    data, written = found.source.data, configuration.source.data
    parts = [as_whole(data.get(name)) for name in ("max_prompt_tokens", "max_response_tokens")]
    length = as_whole(data.get(LENGTH)) or (sum(map(int, filter(None, parts))) if all(parts) else None)
    models = [at(written, ("explorer", "rollout_model")), *(at(written, ("explorer", "auxiliary_models")) or ())]
    generating = sum(_engines(one) for one in models if isinstance(one, Mapping))
    said = {LENGTH: length, "explorer_gpus": generating}
    known = {name: value for name, value in said.items() if value is not None}
    return replace(found, source=replace(found.source, data={**data, **known}))


def _engines(model: Mapping[str, Any]) -> int:
    """Return the GPUs of a generating model; an unknown factor counts as one."""
    return (as_whole(model.get("engine_num")) or 1) * (as_whole(model.get("tensor_parallel_size")) or 1)


def _gpus(keys: Keys) -> int | None:
    if written := keys.count("trainer_gpu_num"):
        return written
    total = keys.degree("node_num") * keys.degree("gpu_per_node")
    left = total if keys.value("mode") == "train" else total - (as_whole(keys.value("explorer_gpus")) or 0)
    if left < 1:
        keys.fail("gpu_per_node", f"of {total} GPUs the explorer takes {total - left}, and none is left to train")
    return left


def _batch(keys: Keys) -> int:
    if keys.count("train_batch_size") is None and keys.count("batch_size") is None:
        keys.not_predicted((LENGTH,), "a batch that is not said", remedy="set buffer.batch_size")
    return keys.count("train_batch_size") or keys.degree("batch_size") * keys.degree("repeat_times")


def _micro_batch(reading: Reading, key: str) -> int:
    """Return how many samples of full length fill a micro-batch."""
    keys = reading.keys
    if not keys.flag("use_dynamic_bsz"):
        if keys.count("ppo_micro_batch_size_per_gpu") is None:
            keys.not_predicted(
                ("use_dynamic_bsz",),
                "a micro batch whose size is not said",
                remedy="set use_dynamic_bsz: true, or ppo_micro_batch_size_per_gpu",
            )
        return keys.degree("ppo_micro_batch_size_per_gpu")
    length = keys.degree(LENGTH)
    tokens = keys.count(key) or keys.count("ppo_max_token_len_per_gpu")
    most = max(1, (tokens * int(reading.parts["ulysses"]) // length) if tokens else 2)
    return min(most, max(1, _batch(keys) // reading.replicas))


ROWS = by_key(
    Row("ulysses_sequence_parallel_size", "ulysses", degree),
    Row(
        "max_token_len_per_gpu",
        "micro_batch_size",
        _micro_batch,
        show=lambda spec, layout: math.ceil(layout.micro_batch_size * spec.job.seq_len / layout.ulysses),
    ),
    Row(
        "train_batch_size",
        "gradient_accumulation_steps",
        lambda reading, _: math.ceil(_batch(reading.keys) / (reading.parts["micro_batch_size"] * reading.replicas)),
        show=lambda spec, _: spec.job.global_batch_size,
    ),
    recompute_row("enable_gradient_checkpointing"),
    ALLOCATOR_ROW,
)


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, _OFF)
    if keys.value("algorithm_type") in ("ppo", "opmd"):
        keys.not_predicted(
            ("algorithm_type",),
            "a critic beside the actor (PPO)",
            remedy="predicted are algorithms without one, such as grpo",
        )
    offload = keys.value("trainer_strategy") == "fsdp2" and flag(reading, "offload_policy")
    reading.sharding = StatedSharding(backend="fsdp2", offload=offload)
    return read_layout(ROWS, reading)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys = reading.keys
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        stage="dpo" if keys.value("algorithm_type") == "dpo" else "sft",
        pin={"backend": "fsdp2"},
    )


def _assumptions(reading: Reading, _: Layout, __: Job) -> Iterator[str]:
    keys = reading.keys
    yield "predicted is a step of the trainer, on samples of full length; a reference model is not counted"
    if keys.value("trainer_strategy") == "fsdp":
        yield "trainer_strategy fsdp is predicted as fsdp2, which needs a little less"
    if keys.given("trainer_config_path"):
        yield f"what {keys.given('trainer_config_path')} says is not read"


CODEC = Codec(
    reads="trinity",
    rows=ROWS,
    defaults=lambda: _DEFAULTS,
    view=_view,
    length=LENGTH,
    gpus=_gpus,
    layout=_layout,
    job=_job,
    assumptions=_assumptions,
)


_BLOCKS = frozenset(["algorithm", "buffer", "cluster", "explorer", "model", "monitor", "synchronizer", "trainer"])


def _claim(data: Mapping[str, Any], _known: int) -> float:
    if "actor_rollout_ref" in data:
        return 0.0  # a file of verl itself; Trinity-RFT has this key under trainer.trainer_config
    model = data.get("model")
    blocks = {key for key in _BLOCKS & data.keys() if isinstance(data[key], dict)}
    return SURE if len(blocks) >= 2 or (isinstance(model, dict) and "model_path" in model) else 0.0


RECOGNIZED = Recognizer(
    trainer="trinity",
    package="trinity-rft",
    claim=_claim,
    model_keys=("model.model_path",),
    names=("trinity",),
    rule_name_of=lambda text, module: (
        "trinity" if text == "trinity" or (module and text == "trinity.cli.launcher") else ""
    ),
    programs="trinity",
    command="trinity",
    methods="run",
    file_options=("config",),
    program_substring="trinity",
)
