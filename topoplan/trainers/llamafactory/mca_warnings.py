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
            "job.samples is not in the spec (--set samples=N), so the steps of warm-up are a guess: a run that has no"
            " more steps than these ends in an assertion of Megatron's scheduler"
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
            f"the weights of {model.name} are published quantized, and the adapter reads none with scales beside them:"
            " convert them to bf16, and name the directory as model"
        )


def caveats(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about what the adapter cannot do with a model or its checkpoints."""
    model = spec.model
    adapter = f"mcore_adapter {trainer_versions()['mcore_adapter'].rpartition(' ')[2]}"
    if model.model_type == "qwen3_next":
        # models/qwen3_next/__init__.py, constant_mca_config; megatron-core 0.16 transformer_config.py.
        yield (
            f"{adapter} calls a setting of qwen3_next linear_attention_type, which is experimental_attention_variant in"
            " megatron-core 0.16, and ends in a TypeError: change the word in its models/qwen3_next/__init__.py"
        )
    if not resumable(spec, layout):
        yield (
            f"checkpoints are torch_dist where etp differs from tp, and {adapter} cannot resume a run from one: to go"
            " on from its weights, name it as model_name_or_path, with an output_dir of its own"
        )
    if not can_export(spec, layout):
        yield (
            f"no Hugging Face weights are saved, as {adapter} ends in a TypeError where it would export experts with"
            " etp other than tp: afterwards, `python -c 'from mcore_adapter.models.converter.post_converter import"
            ' convert_checkpoint_to_hf as convert; convert("CHECKPOINT", "OUT", low_mem=False)\'` makes them of a'
            " checkpoint"
        )
    if model.model_type in _FUSED_EXPERTS and layout.ep > 1 and layout.etp > 1:
        # models/converter/model_converter.py, _convert_moe_weight_with_allgather.
        yield (
            f"{adapter} gathers the experts of {model.model_type} over ep and not over etp {layout.etp}: the Hugging"
            " Face weights that it saves lack parts; pin etp 1, or convert them from the Megatron ones"
        )
