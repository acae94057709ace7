"""Megatron-LM's own commands: `torchrun ... pretrain_gpt.py --tensor-model-parallel-size 4 ...`.

The flags are the keys of ms-swift's `megatron sft` with defaults of their own, and also describe the model. Source:
Megatron-LM `megatron/training/arguments.py` (main of August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan import catalog
from topoplan.layout.layout import Layout
from topoplan.reading.nested import flattened
from topoplan.reading.processes import launch_of
from topoplan.reading.recognizer import Recognizer
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.trainers.codec import Codec, Reading, Row, by_key, flag, layout_of
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.megatron_keys import DEGREES, ETP, VPP
from topoplan.trainers.swift import megatron_job

MEGATRON_LM = Recognizer(
    trainer="megatron-lm",
    claim=lambda data, known: 0.0,
    model_keys=("num_layers",),
    programs=r"(?:.*/)?pretrain_(?:gpt|mamba|hybrid|vlm|t5|bert)\.py",
    program_substring="pretrain_",
    reads_rank=True,
)

_DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "main_grads_dtype": "fp32",
    "moe_token_dispatcher_type": "allgather",
    "moe_router_topk": 2,
    "attention_backend": "auto",
    "cross_entropy_fusion_impl": "native",
    "gradient_accumulation_fusion": True,
    "optimizer_offload_fraction": 1.0,
    "torch_dtype": "float32",
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
_OFF: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_torch_fsdp2", "use_checkpoint_args", "fp16_lm_cross_entropy", "deepspeed"), (False,)
    ),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern", "spec"), ()),
    "optimizer": ("adam",),
    "fp4_format": (),
}
_FIRST_DENSE = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?")
_GPT2_VOCABULARY = 50257

ROWS = by_key(
    *megatron_job.ROWS.values(),
    replace(
        DEGREES[ETP],
        # arguments.py, validate_args: None takes tensor_model_parallel_size.
        read=lambda reading, key: (reading.keys.count(key) or reading.parts["tp"]) if reading.is_moe else 1,
    ),
    Row("overlap_moe_expert_parallel_comm", "overlap_moe_expert_parallel_comm", flag),
)


def _view(configuration: Configuration, setup: Setup) -> Configuration:
    """Return the configuration with flags that correspond to keys of ms-swift converted to those keys."""
    launch = launch_of(setup, configuration)
    unknown = [one for one in launch.arguments if one.startswith("${") and one.endswith("[@]}")] if launch else []
    if unknown:
        what = f"what {unknown[0]} holds is known only when the script runs: such a command is not predicted"
        where = configuration.part.place(configuration.line("num_layers"))
        remedy = "write the command with the options themselves"
        raise NotPredictedError("num_layers", what, where=where, remedy=remedy)
    found = flattened(configuration, setup, (), {key: key for key in configuration.source.data})
    data = found.source.data
    said: dict[str, Any] = {}
    for switch, key, value in (
        ("bf16", "torch_dtype", "bfloat16"),
        ("fp16", "torch_dtype", "float16"),
        ("recompute_activations", "recompute_granularity", "selective"),
        ("no_gradient_accumulation_fusion", "gradient_accumulation_fusion", False),
        ("grad_reduce_in_bf16", "main_grads_dtype", None),
    ):
        if data.get(switch) is True:
            said[key] = value
    layers, stages = data.get("num_layers"), data.get("pipeline_model_parallel_size", 1)
    for key in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        count = data.get(key)
        if isinstance(count, int) and count > 0 and isinstance(layers, int) and isinstance(stages, int) and stages > 0:
            said[VPP] = count if key.startswith("num_virtual") else max(1, layers // stages // count)
    return replace(found, source=replace(found.source, data={**data, **said}))


def _layout(reading: Reading) -> Layout:
    refuse(reading.keys, _OFF)
    return layout_of(ROWS, reading, backend="megatron")


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    """Return the job, which is pretraining: every sample is seq_length tokens long."""
    keys = reading.keys
    dtype = keys.value("torch_dtype")
    if dtype == "float32":
        keys.not_predicted(("num_layers",), "training with neither bf16 nor fp16", remedy="add --bf16")
    precision = "fp16" if dtype == "float16" else "bf16"
    if keys.value("fp8_format") is not None:
        precision = "mxfp8" if keys.value("fp8_recipe") == "mxfp8" else "fp8"
    return Job(
        seq_len=seq_len,
        # arguments.py, validate_args: a micro batch of every replica, if it is not given.
        global_batch_size=keys.count("global_batch_size") or layout.micro_batch_size * layout.dp,
        precision=precision,
        stage="pt",
        packing=True,
        mtp_num_layers=keys.count("mtp_num_layers") or 0,
        pin={"backend": "megatron"},
    )


def _model(configuration: Configuration, given: str, seq_len: int) -> tuple[Model, str]:
    """Return the model that the flags describe, or the one that the user names instead. Raises ModelError."""
    if catalog.knows_model(given):
        return known.model(given), ""
    keys = Keys(configuration, _DEFAULTS)
    vocabulary, said = _vocabulary(keys)
    config = {**_dense(keys), **_experts(keys), **_latent(keys), "vocab_size": vocabulary}
    model = model_from_config(
        config, name="the model of the flags", where=configuration.part.place(None), default_positions=seq_len
    )
    return model, said


def _dense(keys: Keys) -> dict[str, Any]:
    hidden, heads, gated = keys.count("hidden_size"), keys.count("num_attention_heads"), keys.flag("swiglu")
    if hidden is None or heads is None:
        keys.not_predicted(("num_layers",), "a model that the flags do not describe", remedy="name it with --model")
    # arguments.py, validate_args: with a gated MLP, two thirds of the usual width, rounded down to a multiple of 64.
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    learned = keys.given("position_embedding_type") in (None, "learned_absolute")
    return {
        "model_type": "gpt2" if learned and not gated else "llama",
        "num_hidden_layers": keys.count("num_layers"),
        "hidden_size": hidden,
        "intermediate_size": keys.count("ffn_hidden_size") or usual,
        "num_attention_heads": heads,
        "num_key_value_heads": (keys.count("num_query_groups") or 1) if keys.flag("group_query_attention") else heads,
        "head_dim": keys.count("kv_channels") or hidden // heads,
        "hidden_act": "silu" if gated else "gelu",
        "max_position_embeddings": keys.count("max_position_embeddings"),
        "tie_word_embeddings": not keys.flag("untie_embeddings_and_output_weights"),
        "use_qk_norm": keys.flag("qk_layernorm"),
        "attention_bias": keys.flag("add_qkv_bias"),
    }


def _experts(keys: Keys) -> dict[str, Any]:
    if (experts := keys.count("num_experts")) is None:
        return {}
    found: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": keys.count("moe_router_topk"),
        "moe_intermediate_size": keys.count("moe_ffn_hidden_size") or keys.count("ffn_hidden_size"),
        "shared_expert_intermediate_size": keys.count("moe_shared_expert_intermediate_size") or 0,
        "decoder_sparse_step": 1,
    }
    every = keys.given("moe_layer_freq")
    if isinstance(every, int):
        return {**found, "decoder_sparse_step": every}
    if every is not None:
        if (match := _FIRST_DENSE.fullmatch(str(every).replace(" ", ""))) is None:
            keys.not_predicted(
                ("moe_layer_freq",), remedy="predicted are a number, and dense layers first, as in ([0]*3+[1]*58)"
            )
        found |= {"first_k_dense_replace": int(match[1]), "model_type": "deepseek_v3"}
    return found


def _latent(keys: Keys) -> dict[str, Any]:
    if not keys.flag("multi_latent_attention"):
        return {}
    return {
        "model_type": "deepseek_v3",
        "q_lora_rank": keys.count("q_lora_rank"),
        "kv_lora_rank": keys.count("kv_lora_rank"),
        "qk_nope_head_dim": keys.count("qk_head_dim"),
        "qk_rope_head_dim": keys.count("qk_pos_emb_head_dim"),
        "v_head_dim": keys.count("v_head_dim"),
    }


def _vocabulary(keys: Keys) -> tuple[int, str]:
    """Return the size of the vocabulary, and a sentence on how it was found if it is not given."""
    if (size := keys.count("vocab_size")) is not None:
        return size, ""
    tokenizer = str(keys.given("tokenizer_model") or "")
    name = "/".join(tokenizer.rstrip("/").split("/")[-2:])
    for reference in (name, name.rpartition("/")[2]):
        if catalog.knows_model(reference):
            return known.model(reference).vocab_size, f"the vocabulary is that of {reference} (tokenizer_model)"
    if keys.given("tokenizer_type") in (None, "GPT2BPETokenizer"):
        return _GPT2_VOCABULARY, "the vocabulary is GPT-2's, as no vocab_size is given"
    keys.not_predicted(("num_layers",), "a vocabulary whose size is not said (vocab_size)", remedy="add --vocab-size")


CODEC = Codec(
    reads="megatron-lm",
    rows=ROWS,
    defaults=lambda: _DEFAULTS,
    view=_view,
    length="seq_length",
    model=_model,
    layout=_layout,
    job=_job,
)
