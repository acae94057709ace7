"""A DeepSpeed file without its trainer's configuration."""

from pathlib import Path

import pytest

from tests.reading.setups import all_of, configuration
from topoplan.errors import SpecError
from topoplan.lint.translate import translate
from topoplan.reading.parts import Part
from topoplan.reading.values import Keys
from topoplan.specs.load import load_cluster
from topoplan.trainers.deepspeed_alone import gpus_of, model_in_text

TEXT = """{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
"fp16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}"""


def test_the_batch_sizes_say_for_how_many_gpus_it_is() -> None:
    for text, gpus in (
        (TEXT, 8),
        (TEXT.replace("256", "250"), None),
        (TEXT.replace("256", '"auto"'), None),
    ):
        assert gpus_of(Keys(configuration(text, trainer="deepspeed"), {})) == gpus


def test_it_is_full_fine_tuning_with_the_trainers_defaults() -> None:
    one = configuration(TEXT, trainer="deepspeed", name="ds.json")
    found = translate(one, all_of(one), load_cluster("cluster_specs/h100-4x8.yaml"), model="Qwen/Qwen3-8B")

    assert found.layout.id == "zero3-dp8-mbs4-full-offload"
    assert (found.spec.cluster.nodes, found.spec.cluster.gpus_per_node) == (1, 8)
    job = found.spec.job
    assert (job.finetuning, job.precision, job.seq_len, job.global_batch_size) == ("full", "fp16", 2048, 256)
    assert any("2,048 tokens" in words for words in found.assumptions)


def test_without_a_model_it_says_how_to_name_one() -> None:
    one = configuration(TEXT, trainer="deepspeed", name="ds.json")
    with pytest.raises(SpecError, match="without a model; name it with --model"):
        translate(one, all_of(one), load_cluster("cluster_specs/h100-4x8.yaml"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("模型训练qwen3-8b的配置要求", "Qwen/Qwen3-8B"),
        ("Qwen3-8B, and again Qwen/Qwen3-8B.", "Qwen/Qwen3-8B"),
        ("Qwen3-8B and Qwen3-32B", None),
        ("Qwen3-8B-Thinking-of-ours", None),
        ("no model", None),
    ],
)
def test_the_one_model_that_the_text_names_is_taken(tmp_path: Path, text: str, name: str | None) -> None:
    path = tmp_path / "note.md"
    path.write_text(text, encoding="utf-8")

    assert model_in_text(Part(kind="json", name=str(path), text="{}", label="json block 1")) == name
    assert model_in_text(Part(kind="json", name=str(path), text="{}")) is None  # a whole file has no surrounding text
