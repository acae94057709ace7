"""The layout of a Megatron path configuration, if no cluster is known.

It is assumed to run on the smallest number of GPUs that the degrees allow, all in one NVLink domain. Rules about the
cluster can then not fail; those about model, job and layout are the ones of `topoplan.engines.megatron.rules`.
"""

from __future__ import annotations

import math

from topoplan.errors import SpecError
from topoplan.layout.layout import Layout, Recompute
from topoplan.reading.setup import Configuration
from topoplan.reading.values import Keys, as_number, flag, value_of, whole, words
from topoplan.specs import known
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Reading
from topoplan.trainers.llamafactory.mca_job import ROWS, packs
from topoplan.trainers.megatron_keys import CP, EP, ETP, PP, SPLIT, TP, VPP

_MOST = 65536
"""Larger degrees and counts are not examined."""
_ASSUMED_GPU = "h100-sxm-80gb"

UNKNOWN_MODEL = Model(name="", model_type="", hidden_size=0, vocab_size=0, layers=(), tie_word_embeddings=False)
"""Placeholder if no model is known; only rules that ignore the model may then be checked."""


def spec_and_layout(configuration: Configuration, model: Model) -> tuple[Spec, Layout] | None:
    """Return the input of the layout rules; None if a degree or count is invalid."""
    keys = Keys(configuration, {})
    reading, length = Reading(keys=keys, model=model, world=1), whole(configuration, "cutoff_len", 2048)
    if not length or not 0 < length <= 2**30 or not configuration.source.data.keys() & _LAYOUT_KEYS:
        return None
    parts = reading.parts
    try:
        parts["vpp"] = keys.degree(VPP)
        keys.count(ETP)
        for row in ROWS.values():
            if row.part in _COUNTS or row.part in _SWITCHES:
                parts[row.part] = row.read(reading, row.key)
    except SpecError:
        return None
    tp, pp, ep, etp = (parts[name] for name in ("tp", "pp", "ep", "etp"))
    if any(parts[name] > _MOST for name in (*_COUNTS, "vpp")):
        return None
    reading.world = math.lcm(tp * pp * parts["cp"], etp * ep * pp)
    layout = Layout.of(
        **parts,
        dp=reading.replicas,
        recompute=_recompute(configuration),
        pipeline_layout=words(configuration, SPLIT),
        optimizer_offload_fraction=_offload(configuration),
    )
    stage = configuration.get("stage", "sft")
    apart = any(flag(configuration, key) for key in ("neat_packing", "sequence_packing"))
    job = Job(
        seq_len=length,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        stage=stage if isinstance(stage, str) else "sft",
        packing=apart or packs(stage, value_of(configuration, "packing")),
        precision="bf16",
        mtp_num_layers=max(0, whole(configuration, "mtp_num_layers", 0) or 0),
    )
    return Spec(cluster=known.machines(known.gpu(_ASSUMED_GPU), 1, reading.world), model=model, job=job), layout


_COUNTS = ("tp", "pp", "cp", "ep", "etp", "micro_batch_size", "gradient_accumulation_steps")
_SWITCHES = ("sequence_parallel", "distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
_LAYOUT_KEYS = {
    *(TP, PP, VPP, SPLIT, CP, EP, ETP),
    *("overlap_param_gather", "optimizer_offload_fraction", "recompute_granularity", "mtp_num_layers"),
}


def _recompute(configuration: Configuration) -> Recompute:
    granularity = configuration.get("recompute_granularity")
    if granularity == "full":
        method, number = configuration.get("recompute_method"), whole(configuration, "recompute_num_layers")
        return Recompute(
            granularity="full",
            method=method if method in ("uniform", "block") else "uniform",
            num_layers=number if number is not None and 0 < number <= _MOST else 1,
        )
    if granularity == "selective":
        text = words(configuration, "recompute_modules") or "core_attn"
        return Recompute(granularity="selective", modules=tuple(text.split(",")))
    return Recompute()


def _offload(configuration: Configuration) -> float:
    fraction = as_number(configuration.get("optimizer_offload_fraction")) or 0.0
    return fraction if flag(configuration, "optimizer_cpu_offload") and 0 < fraction <= 1 else 0.0
