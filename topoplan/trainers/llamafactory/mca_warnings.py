"""What the Megatron (MCA) trainer does contrary to expectation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from topoplan.layout.layout import Layout
from topoplan.operators.padding import pad_multiple
from topoplan.specs.spec import Spec
from topoplan.trainers.known_faults import can_export
from topoplan.trainers.llamafactory.common import usual_warnings
from topoplan.trainers.llamafactory.key_list import trainer_versions
from topoplan.trainers.llamafactory.mca_facts import resumable
from topoplan.trainers.traits import MCA

_QUANTIZED = re.compile(r"-(?:fp8|awq|gptq|int[48]|w[48]a16|bnb)\b", re.IGNORECASE)
"""Matches hub ids of quantized weights; DeepSeek's own deepseek_v3 models are in fp8 without saying so in the name."""

_FUSED_EXPERTS = frozenset(["qwen3_vl_moe", "qwen3_5_moe"])
"""Model types whose experts Hugging Face keeps in one tensor per layer; a separate export routine gathers them."""


def trainer_warnings(spec: Spec, layout: Layout) -> list[str]:
    """Warn about valid settings that may surprise the user."""
    job = spec.job
    found = [*_weights(spec), *caveats(spec, layout)]
    if job.samples is None and not {"max_steps", "warmup_steps"} & set(job.trainer):
        found.append(
            "job.samples is not in the spec (--set samples=N), so the number of warm-up steps is a guess: Megatron's"
            " scheduler fails an assertion if the run has no more steps than that"
        )
    pad = pad_multiple(MCA.padding, job)
    if job.seq_len % pad:
        longest = math.ceil(job.seq_len / pad) * pad
        padded = f"full sequences are padded to {longest} tokens"
        found.append(f"cutoff_len {job.seq_len} is not a multiple of {pad}: {padded}")
    return [*found, *usual_warnings(spec)]


def _weights(spec: Spec) -> Iterator[str]:
    """Warn about published weights that have to be converted first."""
    model = spec.model
    in_fp8 = model.model_type == "deepseek_v3" and model.name.startswith("deepseek-ai/")
    if model.config_path is None and (in_fp8 or _QUANTIZED.search(model.name)):
        yield (
            f"the published weights of {model.name} are quantized, and the adapter cannot read weights with scales:"
            " convert them to bf16, and set model to their directory"
        )


def caveats(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about what the adapter cannot do with a model or its checkpoints."""
    model = spec.model
    adapter = f"mcore_adapter {trainer_versions()['mcore_adapter'].rpartition(' ')[2]}"
    if model.model_type == "qwen3_next":
        # models/qwen3_next/__init__.py, constant_mca_config; megatron-core 0.16 transformer_config.py.
        yield (
            f"{adapter} sets linear_attention_type for qwen3_next, which is experimental_attention_variant in"
            " megatron-core 0.16, and fails with a TypeError: rename it in its models/qwen3_next/__init__.py"
        )
    if not resumable(spec, layout):
        yield (
            f"checkpoints have the format torch_dist because etp differs from tp, and {adapter} cannot resume from"
            " those: to continue from the weights of one, set model_name_or_path to it, and another output_dir"
        )
    if not can_export(spec, layout):
        yield (
            f"no Hugging Face weights are saved, because {adapter} fails with a TypeError when it exports experts with"
            " etp other than tp: convert a checkpoint afterwards with `python -c 'from"
            " mcore_adapter.models.converter.post_converter import convert_checkpoint_to_hf as convert;"
            ' convert("CHECKPOINT", "OUT", low_mem=False)\'`'
        )
    if model.model_type in _FUSED_EXPERTS and layout.ep > 1 and layout.etp > 1:
        # models/converter/model_converter.py, _convert_moe_weight_with_allgather.
        yield (
            f"{adapter} gathers the experts of {model.model_type} over ep but not over etp {layout.etp}, so the Hugging"
            " Face weights that it saves are incomplete: pin etp 1, or convert them from the Megatron checkpoint"
        )
