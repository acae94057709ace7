"""Experts, packing and speed on the Megatron path: what fails late, and what is slow."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration
from topoplan.reading.values import flag, is_complete, value_of, whole
from topoplan.specs.facts import facts_of
from topoplan.specs.model import Model
from topoplan.trainers.llamafactory.rules.keys import degree
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.trainers.megatron_keys import DISPATCHER, EP, ETP
from topoplan.trainers.traits import MCA

_GROUPED = "moe_grouped_gemm"


def training_findings(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """Report faults in how a legal layout is trained."""
    yield from _dispatcher(configuration, model)
    yield from _experts(configuration, model)
    yield from _packing(configuration)
    yield from _length(configuration)
    yield from _fusions(configuration, model)


# Experts --------------------------------------------------------------------------------------------------------------


def _has_experts(configuration: Configuration, model: Model | None) -> bool:
    return facts_of(model).is_moe if model else (degree(configuration, "expert_model_parallel") or 1) > 1


def _dispatcher(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    ep, dispatcher = degree(configuration, "expert_model_parallel") or 1, value_of(configuration, DISPATCHER)
    if dispatcher not in (None, "allgather"):
        return
    if flag(configuration, "variable_seq_lengths"):
        yield RULES["mca-variable-lengths"].at(configuration, "variable_seq_lengths")
    elif ep > 1 and _has_experts(configuration, model):
        place = DISPATCHER if DISPATCHER in configuration.source.data else EP
        yield RULES["mca-allgather-dispatcher"].at(
            configuration, place, default="" if dispatcher else "default ", ep=ep
        )


def _experts(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    if not _has_experts(configuration, model):
        return
    tp, ep = degree(configuration, "tensor_model_parallel") or 1, degree(configuration, "expert_model_parallel") or 1
    if tp > 1 and ep > 1 and value_of(configuration, ETP) is None:
        yield RULES["mca-expert-tensor-unset"].at(configuration, EP, tp=tp, ep=ep)
    if model is not None and value_of(configuration, _GROUPED) is None and is_complete(configuration):
        yield RULES["mca-experts-one-by-one"].at(configuration, "model_name_or_path")


# Packing and lengths --------------------------------------------------------------------------------------------------


def _packing(configuration: Configuration) -> Iterator[Finding]:
    cp, stage = degree(configuration, "context_parallel") or 1, configuration.get("stage", "sft")
    for key in ("neat_packing", "sequence_packing"):
        if not flag(configuration, key):
            continue
        if cp > 1:
            yield RULES["mca-packing-with-context-parallel"].at(configuration, key, cp=cp, multiple=2 * cp)
        elif stage == "dpo" and key == "sequence_packing":
            yield RULES["mca-packing-in-dpo.sequence"].at(configuration, key)
        elif configuration.get("transformer_impl") == "local":
            yield RULES["mca-packing-without-te"].at(configuration, key)
    if stage == "dpo" and flag(configuration, "packing"):
        yield RULES["mca-packing-in-dpo"].at(configuration, "packing")


def _length(configuration: Configuration) -> Iterator[Finding]:
    length, multiple = whole(configuration, "cutoff_len"), MCA.padding.multiple
    if length and length > 0 and configuration.get("stage", "sft") in ("sft", "dpo") and length % multiple:
        padded = -(-length // multiple) * multiple
        rule = RULES["mca-length-padded"]
        yield rule.at(configuration, "cutoff_len", length=length, multiple=multiple, padded=padded)


# Speed ----------------------------------------------------------------------------------------------------------------


def _fusions(configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    micro_batch, tp = degree(configuration, "per_device_train_batch"), degree(configuration, "tensor_model_parallel")
    fuses_rope = flag(configuration, "apply_rope_fusion")
    if fuses_rope and model is not None and model.vision is not None and micro_batch is not None and micro_batch > 1:
        yield RULES["mca-rope-fusion"].at(configuration, "apply_rope_fusion", model=model.name)
    if flag(configuration, "cross_entropy_loss_fusion") and tp is not None and tp > 1:
        yield RULES["mca-cross-entropy-fusion"].at(configuration, "cross_entropy_loss_fusion", tp=tp)
