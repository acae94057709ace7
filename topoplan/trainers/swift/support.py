"""Valid settings for ms-swift that may surprise the user."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.swift.samples import is_file, is_hub_name, samples_of
from topoplan.trainers.traits import SHARDED
from topoplan.trainers.usual import slow_precision


def swift_warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about valid settings that may surprise the user."""
    job, model = spec.job, spec.model
    if job.template is not None:
        yield (
            f"template {job.template} is a name of LLaMA-Factory's: ms-swift uses its own for the model; for another,"
            " write template under job.trainer"
        )
    if model.config_path is not None and "template" not in job.trainer:
        yield (
            "ms-swift finds model_type and template by the name of the model's directory: where the hub has no such"
            " name, write both under job.trainer"
        )
    for name in samples_of(job):
        if not is_file(name) and not is_hub_name(name):
            yield (
                f"ms-swift knows no data set {name}: name a file of samples (.jsonl) or a hub id (org/name), which is"
                " looked for on ModelScope, or with use_hf under job.trainer on Hugging Face"
            )
    adapts = job.finetuning in ("lora", "qlora") and layout.backend in SHARDED
    if adapts and facts_of(model).is_moe and "all" in job.lora_target:
        yield (
            "experts get no adapters, as predicted: from transformers 5 on those of a layer are one tensor and no"
            " linear layers; before, all-linear has them too, with more memory"
        )
    yield from slow_precision(spec)
