"""Files of other trainers are recognized by their form, named, and not mistaken for each other."""

from pathlib import Path

import pytest

from topoplan.errors import InputError
from topoplan.lint.check import check
from topoplan.reading.setup import Setup
from topoplan.trainers.recognizers import codec_of, others

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: a, type: alpaca}]
sequence_len: 2048
adapter: lora
lora_r: 16
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
optimizer: adamw_8bit
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
deepspeed: deepspeed_configs/zero1.json
"""
NEMO = """\
grpo: {num_prompts_per_step: 32}
policy: {model_name: Qwen/Qwen2.5-1.5B, train_global_batch_size: 512, dtensor_cfg: {enabled: true}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
VERL = """\
data: {train_batch_size: 256, max_prompt_length: 512}
actor_rollout_ref:
  model: {path: "${oc.env:MODEL,Qwen/Qwen3-8B}"}
  actor: {strategy: fsdp2}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
PPO = "python3 -m verl.trainer.main_ppo data.train_batch_size=8 +trainer.nnodes=2 \\\n actor_rollout_ref.model.path=$M"


@pytest.mark.parametrize(
    ("name", "text", "trainer", "words"),
    [
        ("a.yml", AXOLOTL, "axolotl", ["NousResearch/Llama-3.2-1B, 2,048 tokens", "adapter lora"]),
        ("a.yaml", NEMO, "nemo-rl", ["Qwen/Qwen2.5-1.5B, 2 nodes, 8 GPUs per node, batch 512"]),
        ("a.yaml", VERL, "verl-ppo", ["Qwen/Qwen3-8B, 1 nodes", "strategy fsdp2"]),
        ("a.sh", f"M=Qwen/Qwen3-8B\n{PPO}\n", "verl-ppo", ["Qwen/Qwen3-8B, 2 nodes, batch 8"]),
        ("a.sh", "torchrun -m verl.trainer.sft_trainer data.train_files=a model.path=b", "verl-sft", ["b"]),
        ("a.sh", "axolotl train a.yml", "axolotl", ["sequence_len"]),
        ("a.sh", "uv run examples/run_grpo.py --config a.yml policy.model_name=b", "nemo-rl", ["b"]),
        (
            "a.sh",
            "torchrun run_recipe.py train.global_batch_size=64",
            "megatron-bridge",
            ["batch 64"],
        ),
        ("a.sh", "deepspeed --module openrlhf.cli.train_dpo --pretrain a --zero_stage 3", "openrlhf", ["a, ZeRO-3"]),
        ("a.yaml", "model: a\nrlhf_type: grpo\ntrain: {gpus: 4}\nrollout: {gpus: 2}\n", "swift-ray", ["4 GPUs train"]),
        ("a.yaml", "sampler_type: distill\nmodel: a\nstream: true\n", "swift-sample", ["which trains nothing"]),
        (
            "a.yaml",
            "model: {_component_: m}\noptimizer: {_component_: o}\nbatch_size: 2\n",
            "torchtune",
            ["m, micro"],
        ),
        ("a.json", '{"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}', "fsdp-json", ["FSDP"]),
    ],
)
def test_each_is_known_and_named(tmp_path: Path, name: str, text: str, trainer: str, words: list[str]) -> None:
    (tmp_path / "a.yml").write_text(AXOLOTL)
    (tmp_path / name).write_text(text)
    checked = check([str(tmp_path / name)])
    assert {one.trainer for one in checked.setup.configurations} <= {trainer, "axolotl"}
    assert checked.count("error") == 0
    told = " ".join(one.what for one in checked.findings if one.rule == "other-trainer")
    assert trainer == "axolotl" or others()[trainer].title in told
    assert all(word in told for word in words if word != "sequence_len")
    assert all(codec_of(one, checked.setup) is None for one in checked.setup.configurations)


def test_documents_of_one_file_are_looked_at_one_by_one(tmp_path: Path) -> None:
    swift = "model: Qwen/Qwen3-8B\ntuner_type: full\ndataset: a\nlearnin_rate: 1e-5\n"
    (tmp_path / "both.yaml").write_text(f"# two jobs\n---\n{AXOLOTL}---\n{swift}")
    checked = check([str(tmp_path / "both.yaml")])
    assert [one.trainer for one in checked.setup.configurations] == ["axolotl", "swift"]
    (error,) = (one for one in checked.findings if one.severity == "error")
    assert error.place.endswith(f"both.yaml:{3 + AXOLOTL.count(chr(10)) + 4}")


HEADED = """\
# Start it so (all machines):
# accelerate launch \\
#     --config_file examples/accelerate/fsdp.yaml \\
#     src/train.py examples/train.yaml
# It's for `two` GPUs.
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: a
bf16: true
"""


def test_a_command_in_the_comment_at_the_top_starts_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n")
    (tmp_path / "examples" / "train.yaml").write_text(HEADED)
    setup: Setup = check([str(tmp_path / "examples" / "train.yaml")]).setup
    (launch,) = setup.launches
    assert (launch.starter, launch.first_line) == ("accelerate", 2)
    assert [one.trainer for one in setup.of("accelerate")] == ["accelerate"]  # found from the repository's root


def test_what_nobody_knows_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("problem: In a triangle\nsolution: 4\n")
    with pytest.raises(InputError, match="unknown kind"):
        check([str(tmp_path / "a.yaml")])
