from __future__ import annotations

import pytest

from tests.reading.setups import FULL, MEGATRON, PLAIN, make_setup, setup_of, with_lines
from topoplan.trainers.llamafactory.rules.llamafactory_keys import key_findings
from topoplan.trainers.llamafactory.rules.llamafactory_refusals import refusals

REFUSED = {
    "val_size: 0.1\neval_dataset: b": "val_size",
    "dataset: -\nval_size: 0.1": "val_size",
    "interleave_probs: 0.5,0.5": "interleave_probs",
    "streaming: true\nmax_steps: 10\nval_size: 0.1": "val_size",
    "streaming: true\nmax_steps: 10\nmax_samples: 5": "max_samples",
    "mask_history: true\ntrain_on_prompt: true": "mask_history",
    "image_max_pixels: 100": "image_max_pixels",
    "use_galore: true": "use_galore",
    "stage: dpo\npref_loss: hinge\ndpo_label_smoothing: 0.1": "dpo_label_smoothing",
    "stage: dpo\nneat_packing: true": "neat_packing",
    "stage: ppo": "stage",
    "fp16: true": "fp16",
    "streaming: true": "streaming",
    "eval_strategy: steps": "eval_strategy",
    "do_eval: true": "do_eval",
    "predict_with_generate: true": "predict_with_generate",
    "do_predict: true\nval_size: 0.1": "do_predict",
    "load_best_model_at_end: true": "load_best_model_at_end",
    "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 30\nsave_steps: 50\nval_size: 0.1": (
        "load_best_model_at_end"
    ),
    "lr_scheduler_type: reduce_lr_on_plateau": "lr_scheduler_type",
    "fp8: true\nquantization_bit: 4": "fp8",
    "infer_backend: vllm": "infer_backend",
    "dataloader_prefetch_factor: 2": "dataloader_prefetch_factor",
}
REFUSED_FULL = {
    "quantization_bit: 4": "quantization_bit",
    "use_dora: true": "use_dora",
    "adapter_name_or_path: a": "adapter_name_or_path",
    "use_llama_pro: true": "use_llama_pro",
    "use_galore: true\nuse_badam: true": "use_badam",
    "use_galore: true\ndeepspeed: z.json": "use_galore",
}
TAKEN = (
    "eval_strategy: steps\nval_size: 0.1",
    'eval_strategy: "no"',
    "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 25\nsave_steps: 50\nval_size: 0.1",
    "streaming: true\nmax_steps: 10",
    "quantization_bit: 4",
    "use_dora: true",
    "dataloader_prefetch_factor: 2\ndataloader_num_workers: 4",
    "neat_packing: true",
    "interleave_probs: 0.5,0.5\nmix_strategy: interleave_under\ndataset: a,b",
)


def keys(text: str) -> list[str]:
    setup = make_setup(text)
    return [key for key, what, remedy in refusals(setup, setup.configurations[0]) if what and remedy]


@pytest.mark.parametrize("lines", REFUSED, ids=str)
def test_what_the_parser_refuses_of_a_lora_job_is_refused(lines: str) -> None:
    assert keys(with_lines(PLAIN, lines)) == [REFUSED[lines]]


@pytest.mark.parametrize("lines", REFUSED_FULL, ids=str)
def test_what_the_parser_refuses_of_a_full_job_is_refused(lines: str) -> None:
    assert keys(with_lines(FULL, lines)) == [REFUSED_FULL[lines]]


@pytest.mark.parametrize("lines", TAKEN, ids=str)
def test_what_the_parser_takes_is_taken(lines: str) -> None:
    assert keys(with_lines(PLAIN, lines)) == []


@pytest.mark.parametrize("text", [PLAIN, FULL, MEGATRON, "use_dora: true\n", "val_size: 0.1\n"])
def test_right_files_and_a_few_lines_of_one_are_taken(text: str) -> None:
    assert keys(text) == []


def found_in(command: str) -> list[str]:
    setup = setup_of(command)
    (configuration,) = setup.configurations
    assert not [one for one in key_findings(setup, configuration) if one.severity == "error"]
    return [key for key, _, _ in refusals(setup, configuration)]


def test_what_only_the_shell_knows_of_a_command_is_not_judged() -> None:
    command = "llamafactory-cli train --model_name_or_path Qwen/Qwen3-8B --dataset a --template qwen3 --output_dir o"
    known = f"{command} --stage sft --do_train True --bf16 True --quantization_bit 4 --finetuning_type "

    assert found_in(known + "$TYPE\n") == []
    assert found_in(known + "full\n") == ["quantization_bit"]
