"""train.yaml through LLaMA-Factory's own reader and parser, on the path that USE_MCA=1 takes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from tests.emit.samples import DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_plan
from tests.verify.llamafactory import need_llamafactory, parse
from topoplan.emit.bundle import generate
from topoplan.emit.trainer_keys import Key, known_keys, plain_keys, templates, trainer_versions
from topoplan.layout.layout import Recompute

pytestmark = pytest.mark.verify

CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": QWEN3_8B},
    "dense-context": {"model": QWEN3_8B, "tp": 2, "cp": 2},
    "dense-pt": {"model": QWEN3_8B, "job": {"stage": "pt"}},
    "dense-dpo": {"model": QWEN3_8B, "job": {"stage": "dpo"}},
    "dense-fp8": {"model": QWEN3_8B, "job": {"precision": "fp8"}},
    "dense-offload": {"model": QWEN3_8B, "optimizer_offload_fraction": 0.5},
    "dense-uneven": {"model": QWEN3_8B, "tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "vpp": 2, "ep": 4},
    "moe-latent": {"model": DEEPSEEK, "tp": 1, "ep": 8},
    "vision": {"model": QWEN3_VL_8B},
    "vision-pipeline": {"model": QWEN3_VL_8B, "tp": 2, "pp": 2, "vpp": 2},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "uniform": {"recompute": Recompute(granularity="full", method="uniform", num_layers=2)},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "user": {
        "model": QWEN3_8B,
        "job": {
            "trainer": {
                "additional_configs": {"moe_z_loss_coeff": 1e-3},
                "eval_strategy": "steps",
                "lr_scheduler_kwargs": {"min_lr": 1e-6},
                "neat_packing": True,
                "report_to": ["tensorboard"],
                "save_strategy": "no",
                "val_size": 0.1,
            }
        },
    },
}


def is_listed_version(package: str) -> bool:
    """True when the installed version is the one, or the newest one, that the key list was taken from."""
    listed = trainer_versions()[package]
    return importlib.metadata.version(package) == (listed if isinstance(listed, str) else listed[-1])


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Case -> what the parser made of its train.yaml, key by key, as repr."""
    need_llamafactory()
    folder = tmp_path_factory.mktemp("yaml")
    paths = {}
    for case, what in CASES.items():
        paths[case] = folder / f"{case}.yaml"
        paths[case].write_text(generate(*make_spec_and_plan(**what))["train.yaml"], encoding="utf-8")
    for case, line in {
        "bad-renamed": "evaluation_strategy: steps",
        "bad-gone": "overwrite_output_dir: true",
        "bad-unknown": "micro_batch_size: 1",
    }.items():
        paths[case] = folder / f"{case}.yaml"
        paths[case].write_text(paths["dense"].read_text(encoding="utf-8") + line + "\n", encoding="utf-8")

    by_path = parse(dict.fromkeys(paths.values()), tmp_path_factory.mktemp("parser"))
    return {case: by_path[str(path)] for case, path in paths.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_parser_takes_every_key_and_gets_the_value_that_was_meant(
    case: str, parsed: Mapping[str, Mapping[str, str]]
) -> None:
    seen = parsed[case]
    assert "error" not in seen, seen.get("error")
    spec, plan = make_spec_and_plan(**CASES[case])
    layout = plan.layout
    assert seen["tensor_model_parallel_size"] == repr(layout.tp)
    assert seen["pipeline_model_parallel_size"] == repr(layout.pp)
    assert seen["context_parallel_size"] == repr(layout.cp)
    assert seen["virtual_pipeline_model_parallel_size"] == (repr(layout.vpp) if layout.vpp > 1 else "None")
    assert seen["per_device_train_batch_size"] == repr(layout.micro_batch_size)
    assert seen["gradient_accumulation_steps"] == repr(layout.gradient_accumulation_steps)
    assert seen["sequence_parallel"] == repr(layout.sequence_parallel)
    assert seen["use_distributed_optimizer"] == seen["bf16"] == "True"
    assert seen["learning_rate"] == "2e-05"
    assert float(seen["warmup_steps"]) == 141
    assert seen["stage"] == repr(spec.job.stage)
    # Stated as true, packing takes one token off, which the Megatron workflow adds again.
    packs = spec.job.stage == "sft"
    assert seen["cutoff_len"] == repr(spec.job.seq_len - packs)
    granularity = layout.recompute.granularity
    assert seen["recompute_granularity"] == ("None" if granularity == "none" else repr(granularity))
    assert seen["report_to"] == ("['tensorboard']" if case == "user" else "[]")


def test_the_parser_refuses_what_the_key_list_refuses(parsed: Mapping[str, Mapping[str, str]]) -> None:
    for case in ("bad-renamed", "bad-gone", "bad-unknown"):
        assert "not used by the HfArgumentParser" in parsed[case].get("error", ""), case


def test_the_key_list_is_the_one_of_the_installed_versions() -> None:
    need_llamafactory()
    import dataclasses

    import transformers
    from llamafactory.hparams import DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments

    shared = (ModelArguments, DataArguments, FinetuningArguments, GeneratingArguments)
    compare_fields(known_keys(), {"llamafactory": shared, "transformers": (transformers.TrainingArguments,)})
    # Without Megatron LLaMA-Factory adds some of its own to transformers' Seq2SeqTrainingArguments.
    base = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    own = {field.name for field in dataclasses.fields(TrainingArguments)} - base
    compare_fields(
        plain_keys(), {"llamafactory": shared, "transformers": (transformers.Seq2SeqTrainingArguments,)}, further=own
    )


def compare_fields(
    keys: Mapping[str, Key], declared: Mapping[str, tuple[Any, ...]], further: Collection[str] = ()
) -> None:
    """The keys of each package are the fields of its argument classes; `further` ones are LLaMA-Factory's."""
    import dataclasses

    import transformers

    major = transformers.__version__.split(".")[0]
    for package, groups in declared.items():
        real = {field.name for group in groups for field in dataclasses.fields(group) if field.init}
        real |= set(further) if package == "llamafactory" else set()
        listed = {key.name for key in keys.values() if key.package == package}
        wanted = {name for name in listed if keys[name].transformers in ("", major)}
        assert wanted <= real, f"{package}: {sorted(wanted - real)} are gone"
        if is_listed_version(package):
            assert real <= listed, f"{package}: {sorted(real - listed)} are new"


def test_templates_and_model_types_are_those_of_the_installed_version() -> None:
    need_llamafactory()
    from llamafactory.data.template import TEMPLATES
    from llamafactory.extras.constants import MCA_SUPPORTED_MODELS

    if not is_listed_version("llamafactory"):
        pytest.skip(f"the lists are of LLaMA-Factory {templates().version}")
    assert set(templates().supported_model_types) == set(MCA_SUPPORTED_MODELS)
    assert templates().names == set(TEMPLATES)


def test_the_launcher_module_trains_when_it_is_run() -> None:
    """The launch form of the node scripts: argv[1] is the YAML, and there is no word `train`."""
    need_llamafactory()
    import inspect

    import llamafactory.launcher

    main = inspect.getsource(llamafactory.launcher).partition('if __name__ == "__main__":')[2]
    assert "run_exp()" in main
    assert "subprocess" not in main
