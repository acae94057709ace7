"""Layouts of LLaMA-Factory's Megatron path that Megatron refuses or whose results cannot be used.

The cluster is unknown here, so only rules that do not need one are checked, for the fewest GPUs that the degrees allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from topoplan.engines.megatron.rules import RULES as LAYOUT_RULES
from topoplan.errors import LayoutError, SpecError
from topoplan.layout.layout import Layout, Recompute
from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule, read_rules
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_number, flag, is_complete, value_of, whole, words
from topoplan.specs import known
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.codec import Reading
from topoplan.trainers.fault_rules import fault_findings
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.layout_keys import KEYS_OF_RULE
from topoplan.trainers.llamafactory.key_list import templates
from topoplan.trainers.llamafactory.mca_job import ROWS, packs
from topoplan.trainers.megatron_keys import CP, EP, ETP, PP, SPLIT, TP, VPP

_MOST = 65536
"""Larger degrees and counts are not examined."""
_ASSUMED_GPU = "h100-sxm-80gb"

UNKNOWN_MODEL = Model(name="", model_type="", hidden_size=0, vocab_size=0, layers=(), tie_word_embeddings=False)
"""Placeholder if no model is known; only rules that ignore the model may then be checked."""


def spec_and_layout(configuration: Configuration, model: Model) -> tuple[Spec, Layout] | None:
    """Return the input of the layout rules; None if a degree or count is invalid.

    The configuration is assumed to run on the smallest number of GPUs that the degrees allow, all in one NVLink domain.
    Rules about the cluster can then not fail.
    """
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
    fraction = as_number(configuration.get("optimizer_offload_fraction")) or 0.0
    offloads = flag(configuration, "optimizer_cpu_offload")
    reading.world = math.lcm(tp * pp * parts["cp"], etp * ep * pp)
    layout = Layout.of(
        **parts,
        dp=reading.replicas,
        recompute=_recompute(configuration),
        pipeline_layout=words(configuration, SPLIT),
        optimizer_offload_fraction=fraction if offloads and 0 < fraction <= 1 else 0.0,
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


_WITHOUT_MODEL = ("overlap", "optimizer", "interleaving", "sequence-length")
_WITHOUT_CLUSTER = (
    *_WITHOUT_MODEL,
    *("heads", "kv-heads", "widths", "vocabulary", "context-parallel", "experts", "expert-widths"),
    *("pipeline-split", "mtp-stage", "vision-first-stage", "sequence-parallel", "recompute"),
)
_NEED_STAGES = ("mtp-stage", "vision-first-stage")
_REMEDIES: Mapping[str, str] = {
    "overlap": "set use_distributed_optimizer and overlap_grad_reduce to true",
    "optimizer": "set use_distributed_optimizer: true",
    "sequence-parallel": "set sequence_parallel: true",
}
"""Remedies in terms of the trainer's keys, replacing those of the rule, which are about plans."""
_TABLE = read_rules(__package__, "mca_layouts.toml")
RULES = {**_TABLE} | {
    f"mca-{rule.name}": Rule(
        id=f"mca-{rule.name}",
        level="error",
        reads="LLaMA-Factory's YAML that mcore_adapter trains (USE_MCA=1)",
        what=f"the layout breaks the rule {rule.name}: the equation that fails, with its numbers",
        why=rule.source,
        remedy=_REMEDIES.get(rule.name, rule.fix),
    )
    for rule in LAYOUT_RULES
    if rule.name in _WITHOUT_CLUSTER
}


def layouts_findings(setup: Setup, configuration: Configuration, model: Model | None) -> Iterator[Finding]:
    """Report broken layout rules, checkpoints that nothing else can read, and known faults of packages."""
    asked = spec_and_layout(configuration, model or UNKNOWN_MODEL)
    is_built = model is not None and model.model_type in templates().supported_model_types
    if asked is not None:
        try:
            yield from _broken_rules(configuration, *asked, with_model=is_built)
        except LayoutError as error:
            key = "pipeline_model_parallel_layout"
            yield RULES["mca-pipeline-split.text"].at(configuration, key, error=error.what, remedy=error.remedy)
    yield from _not_exported(configuration, asked if is_built else None)
    if asked is not None:
        yield from fault_findings(setup, configuration, *asked)


def _broken_rules(configuration: Configuration, spec: Spec, layout: Layout, *, with_model: bool) -> Iterator[Finding]:
    case = case_of(spec, layout.backend)
    stages_known = with_model
    told: set[str] = set()
    for rule in LAYOUT_RULES:
        keys = KEYS_OF_RULE.get(rule.name, ())
        if rule.name not in (_WITHOUT_CLUSTER if with_model else _WITHOUT_MODEL) or told & set(keys):
            continue
        if rule.name in _NEED_STAGES and not stages_known:
            continue
        if rule.name == "overlap" and not is_complete(configuration):
            continue  # in an excerpt; the rest of the file may enable them
        equation = rule.failed(case, layout)
        if equation is None:
            continue
        if rule.name == "pipeline-split":
            stages_known = False
            if layout.vpp > 1 and layout.pp == 1:
                continue  # reported already
        key = next((key for key in keys if key in configuration.source.data), None)
        told |= {key} if key else set()
        what = f"{equation}{f' ({spec.model.name})' if with_model else ''}"
        yield RULES[f"mca-{rule.name}"].at(configuration, key, what=what)


def _not_exported(configuration: Configuration, asked: tuple[Spec, Layout] | None) -> Iterator[Finding]:
    key, have = "save_hf_model", configuration.source.data
    if not is_complete(configuration) or flag(configuration, key) or (asked and not can_export(*asked)):
        return
    yield RULES["mca-no-hf-model"].at(configuration, key if key in have else None)
