"""Arguments of ms-swift that are right alone and refused together, in the order of its classes.

Sources, at ms-swift 4.6.0: `swift/megatron/arguments/megatron_args.py` (MegatronTunerMixin and MegatronArguments,
__post_init__, _check_muon), `swift/arguments/sft_args.py` (_init_deepspeed, _init_fsdp), `swift/utils/env.py` (is_mp),
`swift/arguments/rlhf_args.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import flag, number, value_of, whole
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.swift.rules.table import RULES
from topoplan.units import shown

Refusal = tuple[str, str, str]
"""Key, what is wrong, remedy."""
_TUNERS = (
    *("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone"),
    *("ia3", "lora_llm", "dummy"),
)
"""`base_args.py`, get_supported_tuners, which plug-ins add to."""


def refused_findings(setup: Setup, configuration: Configuration) -> Iterator[Finding]:
    """What ms-swift stops at."""
    is_sharded = configuration.trainer == "swift"
    for key, refusal, remedy in (_sharded if is_sharded else _megatron)(configuration):
        yield RULES["swift-refused-together"].at(configuration, key, refusal=refusal, remedy=remedy)
    launch = launch_of(setup, configuration)
    if is_sharded and launch is not None:
        yield from _spread(configuration, launch)


def _sharded(configuration: Configuration) -> Iterator[Refusal]:
    tuner = configuration.get("tuner_type")
    plugs_in = configuration.get("external_plugins") or configuration.get("custom_register_path")
    if isinstance(tuner, str) and tuner not in _TUNERS and "$" not in tuner and not plugs_in:
        quantized = "write lora, with --quant_method bnb --quant_bits 4" if tuner == "qlora" else "write lora or full"
        yield "tuner_type", f"tuner_type {shown(tuner)} is none of ms-swift's: {', '.join(_TUNERS)}", quantized
    if flag(configuration, "streaming") and flag(configuration, "lazy_tokenize"):
        yield "lazy_tokenize", "streaming and lazy_tokenize exclude each other", "take lazy_tokenize out"
    if flag(configuration, "streaming") and configuration.get("max_steps") is None:
        yield "streaming", "streaming without max_steps: the length of an epoch is not known", "set max_steps"
    if configuration.get("deepspeed_autotp_size") is not None and not configuration.get("deepspeed"):
        yield "deepspeed_autotp_size", "deepspeed_autotp_size without deepspeed", "add --deepspeed zero2"
    if configuration.get("fsdp") == "fsdp2" and flag(configuration, "save_only_model"):
        what = "save_only_model with the preset fsdp2, which saves sharded checkpoints"
        yield "save_only_model", what, "take it out, or name an FSDP file with state_dict_type FULL_STATE_DICT"
    bits, method = configuration.get("quant_bits"), configuration.get("quant_method")
    if bits is None and method not in (None, "fp8"):
        yield "quant_method", f"quant_method {shown(method)} without quant_bits", "add --quant_bits 4"
    if method == "bnb" and whole(configuration, "quant_bits", 4) not in (4, 8):
        yield "quant_bits", f"quant_bits {shown(bits)} with bnb", "write 4 or 8"
    if bits is not None and tuner == "full":
        yield "tuner_type", "tuner_type full with quantized weights, which are not trained", "write lora"
    yield from _preferences(configuration)


def _preferences(configuration: Configuration) -> Iterator[Refusal]:
    kind = configuration.get("rlhf_type")
    if kind == "grpo" and configuration.get("truncation_strategy") not in (None, "left", "delete"):
        yield "truncation_strategy", "GRPO takes truncation_strategy left or delete alone", "write delete"
    if kind in ("cpo", "orpo") and configuration.get("ref_model") is not None:
        yield "ref_model", f"ref_model with {kind}, which has no reference model", "take it out"


def _megatron(configuration: Configuration) -> Iterator[Refusal]:
    stages = whole(configuration, "pipeline_model_parallel_size", 1)
    limit = whole(configuration, "save_total_limit")
    if limit is not None and flag(configuration, "async_save"):
        yield "async_save", "async_save and save_total_limit exclude each other", "keep one"
    elif limit is not None and limit < 2:
        yield "save_total_limit", f"save_total_limit {limit}", "write 2 or more"
    if flag(configuration, "group_by_length") and flag(configuration, "padding_free", default=True):
        what = "group_by_length with padding_free, which is on unless it is switched off"
        yield "group_by_length", what, "take it out, or add --padding_free false"
    tp = whole(configuration, "tensor_model_parallel_size", 1)
    if flag(configuration, "tp_comm_overlap") and (tp == 1 or not flag(configuration, "sequence_parallel")):
        yield (
            "tp_comm_overlap",
            "tp_comm_overlap without sequence_parallel",
            "add --sequence_parallel true, or take it out",
        )
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if stages == 1 and configuration.get(key) is not None:
            yield key, f"{key} without pipeline stages", "take it out, or set --pipeline_model_parallel_size"
    share = number(configuration, "freeze_parameters_ratio")
    if share is not None and 0 < share < 1 and stages is not None and stages > 1:
        yield "freeze_parameters_ratio", "freeze_parameters_ratio with pipeline stages", "take one of them out"
    yield from _tuners(configuration)
    optimizer = value_of(configuration, "optimizer")
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        if optimizer == "muon" and flag(configuration, key):
            yield key, f"{key} with optimizer muon", "take it out, or set --optimizer dist_muon"
    if flag(configuration, "use_megatron_fsdp") and optimizer not in (None, "adam", "sgd"):
        yield "optimizer", f"optimizer {shown(optimizer)} with use_megatron_fsdp", "write adam"


def _tuners(configuration: Configuration) -> Iterator[Refusal]:
    tuner, model = configuration.get("tuner_type"), model_at_hand(configuration.get("model"), configuration.part)
    if configuration.get("bridge_backend") == "megatron-bridge" and tuner not in (None, "full"):
        yield "tuner_type", f"tuner_type {shown(tuner)} with bridge_backend megatron-bridge", "write full"
    if tuner != "lora_llm":
        return
    if model is not None and model.vision is None:
        yield "tuner_type", f"tuner_type lora_llm is for multimodal models, and {model.name} is none", "write lora"
    elif not flag(configuration, "no_save_optim"):
        yield "tuner_type", "tuner_type lora_llm without no_save_optim", "add --no_save_optim true"


def _spread(configuration: Configuration, launch: Launch) -> Iterator[Finding]:
    """Several GPUs a process are ms-swift's device_map, which DeepSpeed and FSDP do not go with."""
    method = next((key for key in ("deepspeed", "fsdp") if configuration.get(key)), None)
    gpus, per_node = visible_gpus(launch), launch.variable("NPROC_PER_NODE")
    is_cli = launch.program == "swift" and not launch.starter
    if method is None or gpus is None or not is_cli or (per_node is not None and not per_node.value.isdecimal()):
        return
    processes = 1 if per_node is None else int(per_node.value)
    if processes and gpus // processes >= 2:
        state = "is not set, or not exported," if per_node is None else f"is {processes},"
        yield RULES["swift-spread-weights"].on(launch, per_node, state=state, gpus=gpus, method=method)
