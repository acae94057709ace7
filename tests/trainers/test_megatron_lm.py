"""Megatron-LM's own commands, whose flags describe a model, a job and a layout."""

import pytest

from tests.reading.setups import setup_of
from topoplan.errors import InputError
from topoplan.lint.check import check_setup
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.translate import Translation, translate
from topoplan.operators.params import parameter_count
from topoplan.specs import known
from topoplan.specs.load import load_cluster

QWEN3_8B = (
    "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 151936"
)
MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --tokenizer-model {tokenizer}"
)
RUN = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16"


def translated(*flags: str) -> Translation:
    setup = setup_of(f"torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py {' '.join(flags)}\n")
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/h100-4x8.yaml"))


def test_flags_describe_the_model() -> None:
    found = translated(QWEN3_8B, RUN).spec.model
    assert parameter_count(found) == parameter_count(known.model("Qwen/Qwen3-8B"))
    mixtral = translated(MIXTRAL.format(tokenizer="/models/mistralai/Mixtral-8x7B-v0.1"), RUN).spec.model
    assert parameter_count(mixtral) == parameter_count(known.model("mistralai/Mixtral-8x7B-v0.1"))


def test_flags_describe_the_layout_and_the_job() -> None:
    split = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 9"
    found = translated(QWEN3_8B, RUN, split, "--sequence-parallel --recompute-activations --grad-reduce-in-bf16")
    layout, job = found.layout, found.spec.job
    assert (layout.backend, layout.tp, layout.pp, layout.vpp, layout.dp) == ("megatron", 2, 2, 2, 8)
    assert (layout.gradient_accumulation_steps, layout.recompute.granularity) == (8, "selective")
    assert not layout.distributed_optimizer  # off by default
    assert (job.stage, job.seq_len, job.global_batch_size, job.precision) == ("pt", 4096, 64, "bf16")


def test_experts_may_exchange_tokens_beside_the_other_pass() -> None:
    flags = "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
    model = MIXTRAL.format(tokenizer="/models/mistralai/Mixtral-8x7B-v0.1")
    assert translated(model, RUN, flags).layout.overlap_moe_expert_parallel_comm
    assert not translated(model, RUN).layout.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    ("stated", "batch"),
    [("--global-batch-size 7", 7), ("--global-batch-size 7 --tensor-model-parallel-size 3", 7), ("", 8)],
)
def test_the_batch_is_what_the_flags_say_whether_possible_or_not(stated: str, batch: int) -> None:
    run = RUN.replace("--global-batch-size 64", f"--pipeline-model-parallel-size 4 {stated}")
    found = translated(QWEN3_8B, run)
    assert (found.spec.job.global_batch_size, found.has_batch) == (batch, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((QWEN3_8B, RUN.replace("--bf16", "")), "neither bf16 nor fp16"),
        ((QWEN3_8B, RUN, "--use-megatron-fsdp"), "use_megatron_fsdp true is not predicted"),
        (("--num-layers 4", RUN), "a model that the flags do not describe"),
        ((MIXTRAL.format(tokenizer="/here --tokenizer-type Llama2Tokenizer"), RUN), "a vocabulary whose size"),
        ((QWEN3_8B, RUN, "'${MORE[@]}'"), "known only when the script runs"),
    ],
)
def test_what_is_not_predicted_says_why(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        translated(*flags)


def test_megatron_deepspeed_is_neither_judged_nor_predicted_as_megatron_lm() -> None:
    flags = f"{QWEN3_8B} {RUN} --pipeline-model-parallel-size 8"
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}"
    told = [
        {one.rule for one in check_setup(setup_of(f"{command}{more}\n"), PredictionTarget()).findings}
        for more in ("", " --deepspeed")
    ]
    assert told == [{"megatron-lm-refused-together"}, set()]
    with pytest.raises(InputError, match="deepspeed true is not predicted"):
        translated(QWEN3_8B, RUN, "--deepspeed")
