"""A trainer's own file as the job of a spec."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topoplan.errors import ModelError, SpecError
from topoplan.lint.job_file import JobFile, job_of, trainer_file
from topoplan.lint.translate import translate
from topoplan.planner.predict import predict
from topoplan.specs import known
from topoplan.specs.load import load_spec
from topoplan.specs.source import Source
from topoplan.specs.written import cluster_keys
from topoplan.trainers.registry import writer_of

FULL = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
output_dir: saves/mine
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 2.0
warmup_ratio: 0.1
weight_decay: 0.0
logging_steps: 10
bf16: true
"""
SWIFT = """\
NNODES=2 NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --tuner_type lora --lora_rank 16 --dataset a#5 b \\
  --max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --num_train_epochs 2
"""
OF_FULL = {"logging_steps": 10, "lr_scheduler_type": "linear", "warmup_ratio": 0.1, "weight_decay": 0.0}
"""Further keys of FULL, of which transformers' default schedule is not that of bundles."""
QLORA = "quantization_bit: 4\nlora_alpha: 32\nlora_rank: 16\n"
MEGATRON = """\
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: pt
cutoff_len: 4096
bf16: true
tensor_model_parallel_size: 4
per_device_train_batch_size: 2
"""


def job(tmp_path: Path, text: str, name: str = "train.yaml", *, nodes: int = 2, **given: Any) -> JobFile:
    path = tmp_path / name
    path.write_text(text)
    file = trainer_file(str(path))
    assert file is not None
    return job_of(file, known.machines(known.gpu("h100"), nodes, 8, "here"), **given)


@pytest.mark.parametrize(
    ("text", "name", "model", "keys"),
    [
        (
            FULL,
            "train.yaml",
            "Qwen/Qwen3-8B",
            {
                **{"stage": "sft", "finetuning": "full", "seq_len": 2048, "global_batch_size": 32},
                **{"dataset": "identity,alpaca_en_demo", "template": "qwen3_nothink"},
                **{"learning_rate": 1e-5, "epochs": 2.0, "trainer": {**OF_FULL, "max_samples": 1000}},
            },
        ),
        (
            FULL.replace("full", "lora") + QLORA,
            "train.yml",
            "Qwen/Qwen3-8B",
            {
                **{"stage": "sft", "finetuning": "qlora", "seq_len": 2048, "global_batch_size": 32},
                **{"lora_rank": 16, "quantization_bit": 4, "dataset": "identity,alpaca_en_demo"},
                **{"template": "qwen3_nothink", "learning_rate": 1e-5, "epochs": 2.0},
                "trainer": {**OF_FULL, "max_samples": 1000, "lora_alpha": 32},
            },
        ),
        (
            SWIFT,
            "train.sh",
            "Qwen/Qwen3-8B",
            {
                **{"stage": "sft", "finetuning": "lora", "seq_len": 4096, "global_batch_size": 64, "lora_rank": 16},
                # Neither is stated, and bundles warm up and scale otherwise.
                **{"dataset": "a#5,b", "epochs": 2.0, "trainer": {"warmup_ratio": 0.0, "lora_alpha": 32}},
            },
        ),
        (
            MEGATRON,
            "train.yaml",
            "Qwen/Qwen3-30B-A3B",
            {"stage": "pt", "finetuning": "full", "seq_len": 4096, "global_batch_size": 8},
        ),
    ],
    ids=["full", "qlora", "swift", "megatron"],
)
def test_the_job_is_what_the_file_means(tmp_path: Path, text: str, name: str, model: str, keys: dict[str, Any]) -> None:
    found = job(tmp_path, text, name).source.data
    assert found["model"] == model
    assert {key: found["job"].get(key) for key in keys} == keys


ON_BOTH = "--lora_alpha 8 --weight_decay 0.05 --hub_token hf_abc --output_dir out"


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        # `megatron sft` has counterparts of all but neftune_noise_alpha, and one of its plans may be the best.
        (
            "swift sft --warmup_ratio 0.1 --max_grad_norm 0.5 --neftune_noise_alpha 5 --tuner_type lora",
            {"trainer": {"warmup_ratio": 0.1, "max_grad_norm": 0.5, "lora_alpha": 8, "weight_decay": 0.05}},
        ),
        (
            "megatron sft --lr 3e-5 --max_epochs 2 --lr_warmup_fraction 0.1 --adam_beta1 no --train_type lora",
            {
                "trainer": {"lr_warmup_fraction": 0.1, "lora_alpha": 8, "weight_decay": 0.05},
                **{"learning_rate": 3e-5, "epochs": 2.0},
            },
        ),
    ],
)
def test_what_ms_swift_is_told_beside_the_layout_goes_with_the_job(
    tmp_path: Path, command: str, keys: dict[str, Any]
) -> None:
    text = f"NPROC_PER_NODE=8 {command} --model Qwen/Qwen3-8B --dataset a --max_length 4096 {ON_BOTH}\n"
    found = job(tmp_path, text, "train.sh").source.data["job"]
    assert {key: found.get(key) for key in keys} == keys


RLHF = "swift rlhf --model Qwen/Qwen3-8B --dataset a --max_length 4096 --tuner_type full --deepspeed zero3"
ON_MEGATRON = "megatron rlhf --model Qwen/Qwen3-8B --dataset a --max_length 4096 --tensor_model_parallel_size 8"


@pytest.mark.parametrize(
    "command",
    [
        f"{RLHF} --rlhf_type grpo",
        f"{RLHF} --rlhf_type kto",
        f"{RLHF} --rlhf_type orpo",
        f"{RLHF.replace('rlhf', 'sft')} --task_type seq_cls --num_labels 7",
        f"{RLHF} --rlhf_type rm",
        f"{ON_MEGATRON} --rlhf_type grpo",
        f"{ON_MEGATRON} --rlhf_type rm --packing true",
        f"{ON_MEGATRON} --rlhf_type dpo --packing true",
    ],
)
def test_the_spec_that_is_made_of_it_predicts_what_the_file_does(tmp_path: Path, command: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"NPROC_PER_NODE=8 {command}\n")
    file = trainer_file(str(path))
    cluster = known.machines(known.gpu("h100"), 1, 8, "here")
    of_file = translate(file.configuration, file.setup, cluster)
    where = Source(name="cluster", data=cluster_keys(cluster))
    spec = load_spec(where, job=job_of(file, cluster).source)
    one, other = (predict(replace(each, trainer="swift"), of_file.layout) for each in (of_file.spec, spec))
    assert (one.memory.device_bytes, one.time.step_s) == (other.memory.device_bytes, other.time.step_s)
    if "dpo" not in command:
        with pytest.raises(SpecError, match="no trainer's files are written for it yet"):
            writer_of(spec, of_file.layout, "swift")


def test_what_is_not_taken_over_is_said(tmp_path: Path) -> None:
    found = job(tmp_path, FULL)
    assert found.on_batch == ("a batch of 32: micro batch 1 x gradient accumulation 2 x 16 data parallel ranks",)
    notes = found.notes
    layout = "deepspeed, per_device_train_batch_size, gradient_accumulation_steps"
    assert f"its layout is not taken over: {layout}" in notes
    assert notes[-1] == "left out: output_dir"


@pytest.mark.parametrize(
    ("text", "name", "of_megatron", "of_others"),
    [
        (FULL + "neftune_noise_alpha: 5\n", "train.yaml", "mca", "ddp, deepspeed or fsdp2"),
        (
            SWIFT.replace("swift sft", "swift sft --neftune_noise_alpha 5"),
            "run.sh",
            "megatron",
            "ddp, deepspeed or fsdp2",
        ),
    ],
)
def test_a_key_of_some_plans_alone_goes_with_those(
    tmp_path: Path, text: str, name: str, of_megatron: str, of_others: str
) -> None:
    of_every, of_one, of_another = (job(tmp_path, text, name, backend=one) for one in (None, "deepspeed", of_megatron))
    assert f"only in the files of plans with {of_others}: neftune_noise_alpha" in of_every.notes
    assert [one.source.data["job"]["trainer"].get("neftune_noise_alpha") for one in (of_every, of_one)] == [None, 5]
    assert of_another.left_out["neftune_noise_alpha"] in (5, "5")
    assert "neftune_noise_alpha" not in of_one.left_out


def test_another_trainer_gets_the_keys_that_it_takes(tmp_path: Path) -> None:
    text = SWIFT.replace("swift sft", "swift sft --truncation_strategy left --max_grad_norm 0.5 --warmup_ratio 0.1")
    for_it = job(tmp_path, text, "run.sh", trainer="llamafactory", backend="deepspeed")
    shared = {"max_grad_norm": 0.5, "warmup_ratio": 0.1, "lora_alpha": 32}
    assert for_it.source.data["job"]["trainer"] == shared
    assert "truncation_strategy" in for_it.left_out
    assert "left out: truncation_strategy" in job(tmp_path, text, "run.sh", trainer="llamafactory").notes
    own = job(tmp_path, text, "run.sh").source.data["job"]["trainer"]
    assert own == {**shared, "truncation_strategy": "left"}
    assert job(tmp_path, text, "run.sh", trainer="trinity").source.data["job"]["trainer"] == {}
    back = job(tmp_path, FULL, trainer="swift", backend="megatron").source.data["job"]["trainer"]
    assert back == OF_FULL


def test_the_gpus_of_the_command_give_the_batch_and_are_not_those_planned_for(tmp_path: Path) -> None:
    found = job(tmp_path, SWIFT, "run.sh", nodes=4)
    (batch,) = found.on_batch
    assert batch.endswith("8 data parallel ranks on the 2 x 4 GPUs that the command uses")
    assert not any("predicted on" in note for note in found.notes)


def test_a_layout_that_the_gpus_do_not_divide_into_leaves_the_job_with_a_batch_that_is_told(tmp_path: Path) -> None:
    found = job(tmp_path, MEGATRON.replace("parallel_size: 4", "parallel_size: 3"), nodes=1)
    assert found.source.data["job"]["global_batch_size"] == 4
    assert found.on_batch[1].startswith("its layout splits a model over 3 GPUs, and 8 GPUs % 3 = 2: --batch")


def test_a_model_of_an_unknown_path_is_named_by_the_option(tmp_path: Path) -> None:
    text = FULL.replace("Qwen/Qwen3-8B", "/models/mine")
    with pytest.raises(ModelError, match=r"train.yaml:1: .*'/models/mine' was not found.*--model"):
        job(tmp_path, text)
    assert job(tmp_path, text, model="Qwen/Qwen3-4B").source.data["model"] == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    "text",
    ["seq_len: 4096\nglobal_batch_size: 64\n", "job: {stage: pt}\n", "gpu: h100\n", "cutoff_len: 7\n", "a: [\n"],
)
def test_other_yaml_is_left_to_the_reader_of_jobs(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    if text == "a: [\n":
        with pytest.raises(SpecError):
            trainer_file(str(path))
    else:
        assert trainer_file(str(path)) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "names no model"),
        ("run.sh", "echo hello\n", "starts no training"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=message):
        trainer_file(str(tmp_path / name))


def test_a_file_of_several_jobs_is_refused_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "both.sh"
    path.write_text(SWIFT + SWIFT.replace("Qwen3-8B", "Qwen3-4B"))
    with pytest.raises(SpecError, match=r"holds 2 jobs .*both.sh:1.* and .*both.sh:3"):
        trainer_file(str(path))
