import pytest

from topoplan.catalog.packages import releases
from topoplan.errors import SpecError
from topoplan.trainers.llamafactory.key_list import (
    bridge_keys,
    check_key,
    default_template,
    judge_key,
    keys_for,
    known_keys,
    missing_template,
    needed_transformers,
    newer_than,
    plain_keys,
    removed_keys,
    templates,
    trainer_versions,
)

WHERE = "job.trainer.x"


def test_the_list_has_the_keys_of_every_argument_class_and_names_its_versions() -> None:
    keys = known_keys()
    assert len(keys) > 350
    assert {key.package for key in keys.values()} == {"llamafactory", "transformers", "mcore_adapter"}
    assert keys["tensor_model_parallel_size"].package == "mcore_adapter"
    assert keys["tensor_model_parallel_size"].types == ("int",)
    assert keys["cutoff_len"].default == 2048
    assert trainer_versions()["llamafactory"] == "0.9.5"


def test_every_choice_and_default_of_the_list_is_of_its_own_type() -> None:
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list}
    for key in known_keys().values():
        assert set(key.types) <= set(kinds), key.name
        allowed = tuple(
            kind for name in key.types for kind in (kinds[name] if isinstance(kinds[name], tuple) else (kinds[name],))
        )
        assert key.default is None or isinstance(key.default, allowed), key.name
        assert all(isinstance(choice, str) for choice in key.choices), key.name


@pytest.mark.parametrize(
    ("model", "model_type", "template"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", "qwen3_vl_nothink"),
        ("/models/Qwen3-30B-A3B-Instruct-2507/", "qwen3_moe", "qwen3_nothink"),
        ("/models/my-own-vl", "qwen3_vl", "qwen3_vl"),
        ("meta-llama/Llama-2-7b-hf", "llama", "llama2"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama", "llama3"),
        ("openai/gpt-oss-20b", "gpt_oss", "gpt_oss"),
        ("/models/my-own-llama", "llama", None),
    ],
)
def test_the_template_follows_the_model_and_then_its_type(model: str, model_type: str, template: str | None) -> None:
    assert default_template(model, model_type) == template


def test_every_default_template_exists() -> None:
    known = templates()
    assert set(known.by_model.values()) | set(known.by_model_type.values()) <= known.names
    assert set(known.by_model_type) <= set(known.supported_model_types)


def test_without_megatron_other_keys_are_known_and_none_is_left_unread() -> None:
    plain = plain_keys()
    assert "tensor_model_parallel_size" not in plain
    assert {"overwrite_output_dir", "predict_with_generate", "ray_num_workers"} <= plain.keys()
    assert plain["fp8"].types == ("bool",)
    assert known_keys()["fp8"].types == ("str",)
    assert not any(key.ignored for key in plain.values())
    assert not removed_keys().keys() & known_keys().keys()


@pytest.mark.parametrize(
    ("name", "value", "with_megatron", "without"),
    [
        ("lora_rank", 16, "ignored", ""),
        ("report_to", "wandb", "dropped", ""),
        ("overwrite_output_dir", True, "gone", ""),
        ("lr_scheduler_type", "polynomial", "type", ""),
        ("tensor_model_parallel_size", 2, "", "unknown"),
        ("hub_token", "a", "secret", "secret"),
        ("cutoff_len", 10**400, "", ""),
        ("learning_rate", 10**400, "type", "type"),
        ("save_strategy", "best", "type", ""),
        ("pref_loss", "simpo", "type", ""),
    ],
)
def test_a_key_is_judged_for_the_path_that_trains(name: str, value: object, with_megatron: str, without: str) -> None:
    assert judge_key(name, value).trouble == with_megatron
    assert judge_key(name, value, path="plain").trouble == without


# Versions -------------------------------------------------------------------------------------------------------------


def test_every_version_of_the_lists_is_a_known_one() -> None:
    versions = {release.version for release in releases()}
    keys = [key for path in ("mca", "bridge", "plain") for key in keys_for(path).values() if key.since]
    assert {key.since for key in keys if key.package == "llamafactory"} == versions - {releases()[0].version}
    assert set(templates().since.values()) <= versions
    assert templates().since.keys() <= templates().names


def test_a_key_of_a_newer_version_is_known_and_not_written_for_an_older_one() -> None:
    wanted = "use_megatron_bridge needs LLaMA-Factory newer than 0.9.5 (main of August 2026)"
    assert judge_key("use_megatron_bridge", True).trouble == ""
    assert judge_key("use_megatron_bridge", True, version="0.9.6.dev0").trouble == ""
    verdict = judge_key("use_megatron_bridge", True, version="0.9.5")
    assert (verdict.trouble, verdict.what) == ("newer", wanted)
    for path in ("mca", "plain"):
        with pytest.raises(SpecError, match=r"newer than 0\.9\.5"):
            check_key("use_megatron_bridge", True, WHERE, path=path)


def test_a_key_of_a_newer_transformers_says_which() -> None:
    keys = known_keys()
    assert needed_transformers(keys["train_sampling_strategy"]).startswith(
        "the key train_sampling_strategy needs transformers 5.2.0 or newer: 4.55.0 refuses"
    )
    assert needed_transformers(keys["learning_rate"]) == needed_transformers(keys["use_megatron_bridge"]) == ""
    assert newer_than("4.6.0", "ms-swift") == "ms-swift 4.6.0 or newer"


def test_a_template_that_only_a_newer_version_has_is_named_with_it() -> None:
    assert missing_template("qwen3") == ""
    assert "needs LLaMA-Factory newer than 0.9.5" in missing_template("moss_vl")
    assert "did you mean 'llama3'" in missing_template("llama33")


def test_megatron_bridge_takes_what_is_known_without_megatron_and_keys_of_its_own() -> None:
    own = bridge_keys().keys() - plain_keys().keys()
    assert {"tensor_model_parallel_size", "export_hf_on_finish", "extra_config"} <= own
    assert "pipeline_model_parallel_layout" not in bridge_keys()
    assert bridge_keys()["tensor_model_parallel_size"].package == "llamafactory"
    assert known_keys()["tensor_model_parallel_size"].package == "mcore_adapter"
