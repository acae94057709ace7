"""What LLaMA-Factory's Megatron Bridge path (USE_MEGATRON_BRIDGE=1) refuses, and does otherwise than it seems.

Sources, at LLaMA-Factory main of August 2026 (0.9.6.dev0, ff6d4d12e): `hparams/parser.py`
(`_validate_megatron_bridge_parallel_args`, get_train_args), `hparams/megatron_bridge_args.py`,
`train/megatron_bridge/workflow.py` and `config_builder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from topoplan.catalog.releases import releases
from topoplan.reading.finding import Finding
from topoplan.reading.processes import processes_for
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import flag, is_complete, whole
from topoplan.trainers.llamafactory.key_list import templates
from topoplan.trainers.llamafactory.reading import MODEL_KEY
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.models import model_at_hand
from topoplan.units import shown

STAGES, METHODS = ("pt", "sft"), ("full", "lora")
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def bridge_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """What is to be said of a configuration that Megatron Bridge trains, or that asks for it."""
    switch = "use_megatron_bridge"
    if setup.path_of(configuration) != "bridge":
        if flag(configuration, switch) and setup.path_of(configuration) == "plain":
            yield RULES["bridge-not-asked-for"].at(configuration, switch)
        return
    yield RULES["bridge-not-judged"].at(
        configuration, switch if switch in configuration.source.data else None, release=releases()[-1].name
    )
    model = model_at_hand(configuration.get(MODEL_KEY), configuration.part)
    if model is not None and model.model_type not in templates().bridge_model_types:
        yield RULES["bridge-model-type"].at(
            configuration,
            "model_name_or_path",
            model_type=model.model_type,
            model_types=", ".join(templates().bridge_model_types),
        )
    target = configuration.get("lora_target")
    if target not in (None, "all") and configuration.get("finetuning_type", "lora") == "lora":
        yield RULES["bridge-lora-target"].at(configuration, "lora_target", target=shown(target))


def bridge_refusals(setup: Setup, configuration: Configuration) -> Iterator[tuple[str, str, str]]:
    """Key, what LLaMA-Factory stops at, and what to do."""
    path, name = setup.path_of(configuration), "Megatron Bridge"
    if path == "mca" and flag(configuration, "use_megatron_bridge"):
        what = "use_megatron_bridge with USE_MCA=1: Megatron Bridge and the adapter exclude each other"
        yield "use_megatron_bridge", what, "take it out, or set USE_MEGATRON_BRIDGE=1 in place of USE_MCA"
    if path != "bridge":
        return
    have, stage = configuration.source.data, configuration.get("stage", "sft")
    method = configuration.get("finetuning_type", "lora")
    if stage not in STAGES:
        yield "stage", f"stage {shown(stage)}: {name} has pt and sft alone", "train it without USE_MEGATRON_BRIDGE"
    if method not in METHODS and ("finetuning_type" in have or is_complete(configuration)):
        yield "finetuning_type", f"finetuning_type {shown(method)}: {name} has full and lora alone", "write one of them"
    for key, what in (("quantization_bit", "quantized weights"), ("deepspeed", "DeepSpeed")):
        if have.get(key) is not None:
            yield key, f"{key}: {name} takes no {what}", "take it out"
    if flag(configuration, "use_hyper_parallel"):
        yield "use_hyper_parallel", f"use_hyper_parallel: {name} and HyperParallel exclude each other", "keep one"
    sizes = {key: whole(configuration, key, 1) for key in (*SIZES, "virtual_pipeline_model_parallel_size")}
    for key, size in sizes.items():
        if size is not None and size < 1:
            yield key, f"{key} is {size}", "write 1 or more"
    if flag(configuration, "sequence_parallel") and sizes["tensor_model_parallel_size"] == 1:
        yield "sequence_parallel", "sequence_parallel without tensor_model_parallel_size above 1", "take it out"
    yield from _refused_sizes(setup, configuration, {key: sizes[key] for key in SIZES})


def _refused_sizes(
    setup: Setup, configuration: Configuration, sizes: dict[str, int | None]
) -> Iterator[tuple[str, str, str]]:
    """`_validate_megatron_bridge_parallel_args`: it counts the experts' size beside the others, unlike Megatron."""
    started = processes_for(setup, configuration)
    known = [size for size in sizes.values() if size is not None and size > 0]
    if started is None or started.nodes is None or started.gpus_per_node is None or len(known) < len(sizes):
        return
    product, world = math.prod(known), started.nodes * started.gpus_per_node
    if world > 0 and world % product:
        equation = " * ".join(f"{key.partition('_')[0]} {size}" for key, size in sizes.items())
        key = next((key for key in reversed(sizes) if sizes[key] != 1), SIZES[0])
        yield key, f"{equation} = {product} does not divide the {world} processes of the launch", "change one of them"
