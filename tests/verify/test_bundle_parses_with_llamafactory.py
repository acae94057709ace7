"""Parse train.yaml with LLaMA-Factory's own reader and parser, on the path of USE_MCA=1."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from packaging.version import Version

from tests.bundle.samples import DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_plan
from tests.verify import key_lists
from tests.verify.llamafactory import need_llamafactory, parse
from topoplan.bundle.bundle import generate
from topoplan.catalog.packages import releases
from topoplan.layout.layout import Recompute
from topoplan.trainers.llamafactory.key_list import templates

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
        "overlap_param_gather": False,  # required by save_strategy "no"
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


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    """Return case -> the parsed keys of its train.yaml, as repr."""
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
    # An explicit `packing: true` removes one token, which the Megatron workflow adds again.
    packs = spec.job.stage == "sft"
    assert seen["cutoff_len"] == repr(spec.job.seq_len - packs)
    granularity = layout.recompute.granularity
    assert seen["recompute_granularity"] == ("None" if granularity == "none" else repr(granularity))
    assert seen["report_to"] == ("['tensorboard']" if case == "user" else "[]")


def test_the_parser_refuses_what_the_key_list_refuses(parsed: Mapping[str, Mapping[str, str]]) -> None:
    for case in ("bad-renamed", "bad-gone", "bad-unknown"):
        assert "not used by the HfArgumentParser" in parsed[case].get("error", ""), case


def test_the_key_list_is_what_the_installed_versions_declare() -> None:
    """Compares the names for every version, and types, choices and defaults for versions that the list names."""
    need_llamafactory()
    found = list(key_lists.of_llamafactory())
    assert {"megatron", "plain"} <= {one.view for one in found}
    differences = {
        f"{one.package} {one.version}, {one.view}": key_lists.llamafactory_differences(one)
        for one in found
        if one.package != "llamafactory" or is_known(one.version)
    }
    assert {name: said for name, said in differences.items() if said} == {}


def is_known(version: str) -> bool:
    return version in {release.version for release in releases()}


def test_each_known_version_takes_the_versions_of_transformers_that_are_listed() -> None:
    need_llamafactory()
    import inspect

    from llamafactory.extras.misc import check_dependencies

    version = key_lists.llamafactory_version()
    if not is_known(version):
        pytest.skip(f"the lists do not know LLaMA-Factory {version}")
    (said,) = re.findall(r'"transformers([^"]+)"', inspect.getsource(check_dependencies))
    release = next(one for one in reversed(releases()) if Version(one.version) <= Version(version))
    assert set(said.split(",")) == set(release.transformers.split(","))


def test_templates_and_model_types_are_those_of_the_installed_version() -> None:
    need_llamafactory()
    version, document = key_lists.llamafactory_version(), key_lists.read("llamafactory_templates.json")
    if not is_known(version):
        pytest.skip(f"the lists do not know LLaMA-Factory {version}")
    for key, real in key_lists.of_templates().items():
        assert key_lists.name_differences(document, key, real, version) == [], key
    real = key_lists.templates_by_model()
    listed = {name: template for name, template in templates().by_model.items() if name in real}
    assert len(listed) > 150
    assert listed == {name: real[name] for name in listed}


def test_the_launcher_module_trains_when_it_is_run() -> None:
    """The node scripts pass the YAML as argv[1], without the word `train`."""
    need_llamafactory()
    import inspect

    import llamafactory.launcher

    main = inspect.getsource(llamafactory.launcher).partition('if __name__ == "__main__":')[2]
    assert "run_exp()" in main
    assert "subprocess" not in main
