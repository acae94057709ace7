"""ms-swift's GRPO: which of its steps are predicted as training on prompts with answers, and how long these are.

The policy update equals supervised fine-tuning on samples of prompt and answer (ms-swift 4.6
`rlhf_trainers/grpo_trainer.py`, `megatron/trainers/grpo_trainer.py`), unless something else stays on the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, as_whole
from topoplan.trainers.codec import Reading

_ANSWER = 512
"""Default of `max_completion_length` (rlhf_trainers/arguments.py)."""
LENGTH = "max_length"
_WITHOUT_REFERENCE = ("cpo", "simpo", "orpo", "rm")
"""Methods on answer pairs whose loss needs no reference model (rlhf_trainers/, megatron/trainers/rlhf_mixin.py)."""


def with_answers(configuration: Configuration, _: Setup) -> Configuration:
    """Change max_length from the prompt alone, as GRPO counts it, to prompt and answer together."""
    data = configuration.source.data
    prompt = as_whole(data.get(LENGTH))
    if data.get("rlhf_type") != "grpo" or prompt is None:
        return configuration
    whole = prompt + (as_whole(data.get("max_completion_length")) or _ANSWER)
    return replace(configuration, source=replace(configuration.source, data={**data, LENGTH: whole}))


def job_of(keys: Keys) -> Mapping[str, Any]:
    """Return the keys of the job that an `rlhf` configuration is predicted as.

    Raises NotPredictedError for other methods, and for anything that stays on the GPUs while the policy is trained.
    """
    kind = keys.given("rlhf_type")
    if kind in _WITHOUT_REFERENCE:
        return {"stage": "dpo", "reference_forwards": 0}
    if keys.given("ref_model") not in (None, keys.given("model")):
        keys.not_predicted(("ref_model",))
    if kind in ("dpo", None):
        return {"stage": "dpo"}
    if kind == "kto":
        # kto_trainer.py of both: policy and reference see the sample, and again with a mismatched answer.
        return {"stage": "sft", "reference_forwards": 1 if keys.given("loss_type") == "apo_zero_unpaired" else 3}
    if kind != "grpo":
        keys.not_predicted(("rlhf_type",))
    if keys.flag("use_vllm") and keys.given("vllm_mode") != "server" and not as_whole(keys.given("sleep_level")):
        keys.not_predicted(("use_vllm",), "GRPO with vLLM awake on the GPUs that train (sleep_level 0)")
    beta = keys.number("beta")
    if keys.given("teacher_model") is not None:
        keys.not_predicted(("teacher_model",))
    return {"stage": "sft", "reference_forwards": 0 if beta == 0.0 else 1}


def assumptions(reading: Reading) -> Iterator[str]:
    """State what is predicted of a step that generates, scores and trains."""
    if reading.keys.given("rlhf_type") == "grpo":
        yield "predicted is the update of the policy, on prompts and answers of full length: samples are made beside it"
