"""Combinations of arguments that ms-swift refuses: its tables of relations, and what these cannot express.

Sources, at ms-swift 4.6.0: `swift/arguments/sft_args.py` (_init_deepspeed, _init_fsdp), `swift/utils/env.py` (is_mp).
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.trainers.around import context_of
from topoplan.trainers.relations import read_relations
from topoplan.trainers.swift.rules.table import RULES
from topoplan.units import shown

_SHARDED = read_relations(__package__, "relations.toml")
_MEGATRON = read_relations(__package__, "megatron_relations.toml")
_TUNERS = (
    *("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone"),
    *("ia3", "lora_llm", "dummy"),
)
"""Tuners of `base_args.py`, get_supported_tuners; plug-ins may add others."""


def refused_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """Report combinations that ms-swift refuses."""
    is_sharded = configuration.trainer == "swift"
    table = _SHARDED if is_sharded else _MEGATRON
    refused, unwise = RULES["swift-refused-together"], RULES["swift-refused-together.unwise"]
    yield from table.findings(refused, configuration, context_of(setup, configuration), unwise=unwise)
    yield from _unknown_tuner(configuration)
    launch = launch_of(setup, configuration)
    if is_sharded and launch is not None:
        yield from _spread(configuration, launch)


def _unknown_tuner(configuration: Configuration) -> Iterator[Finding]:
    tuner = configuration.get("tuner_type")
    plugs_in = configuration.get("external_plugins") or configuration.get("custom_register_path")
    if isinstance(tuner, str) and tuner not in _TUNERS and "$" not in tuner and not plugs_in:
        remedy = "write lora, with --quant_method bnb --quant_bits 4" if tuner == "qlora" else "write lora or full"
        refusal = f"tuner_type {shown(tuner)} is none of ms-swift's: {', '.join(_TUNERS)}"
        yield RULES["swift-refused-together"].at(configuration, "tuner_type", refusal=refusal, remedy=remedy)


def _spread(configuration: Configuration, launch: Launch) -> Iterator[Finding]:
    """Report several GPUs per process: ms-swift then uses device_map, which DeepSpeed and FSDP do not support."""
    method = next((key for key in ("deepspeed", "fsdp") if configuration.get(key)), None)
    gpus, per_node = visible_gpus(launch), launch.variable("NPROC_PER_NODE")
    is_cli = launch.program == "swift" and not launch.starter
    if method is None or gpus is None or not is_cli or (per_node is not None and not per_node.value.isdecimal()):
        return
    processes = 1 if per_node is None else int(per_node.value)
    if processes and gpus // processes >= 2:
        state = "is not set, or not exported," if per_node is None else f"is {processes},"
        yield RULES["swift-spread-weights"].on(launch, per_node, state=state, gpus=gpus, method=method)
