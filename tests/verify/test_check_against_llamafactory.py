"""Files with one mistake each: LLaMA-Factory refuses those with an error from `topoplan check`, and no others."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from tests.lint.test_cases import SECTIONS, files_of
from tests.reading.setups import FULL, MEGATRON, MOE, PLAIN, make_setup, with_lines
from tests.verify import key_lists
from tests.verify.llamafactory import need_llamafactory, parse
from topoplan import catalog
from topoplan.reading.finding import Finding
from topoplan.trainers.llamafactory import rules as llamafactory

pytestmark = pytest.mark.verify

PLAIN_REFUSED = (
    "evaluation_strategy: steps",
    "learnig_rate: 1.0e-4",
    "save_safetensors: true",
    "tensor_model_parallel_size: 2",
    "eval_strategy: no",
    "save_strategy: off",
    "lr_scheduler_type: linaer",
    "finetuning_type: fulll",
    "model_name_or_path: -",
    "dataset: -",
    "media_dir: '${HOME'",
)
PLAIN_TAKEN = (
    "overwrite_output_dir: true",
    "warmup_ratio: 0.03",
    "lora_rank: 8",
    "save_steps: 5",
    "val_size: 0.1",
    "gradient_checkpointing: false",
    "bf16: -",
    "template: llama3",
    "media_dir: ${HOME}/x",
    "packing: 'false'",
    "do_train: false",
    "output_dir: -",
    "lr_scheduler_type: polynomial",
    "learning_rate: 2e-5",
)
MEGATRON_REFUSED = (
    "evaluation_strategy: no",
    "overwrite_output_dir: true",
    "num_layers_in_first_pipeline_stage: 4",
    "ray_num_workers: 4",
    "fp16: true",
    "streaming: true",
)
MEGATRON_TAKEN = (
    "gradient_checkpointing: true",
    "optim: adamw_8bit",
    "disable_shuffling: true",
    "report_to: wandb",
    "finetuning_type: lora",
    "sequence_parallel: false",
    "sequence_parallel: 'false'",
    "recompute_num_layers: 2",
    "additional_configs: {moe_z_los_coeff: 0.1}",
    "cutoff_len: 1000",
)
ADAPTER_REFUSED = (
    "variable_seq_lengths: true",
    "overlap_param_gather: true",
    "pipeline_model_parallel_size: 8",
    "expert_model_parallel_size: 2",
    "recompute_granularity: full\nrecompute_method: uniform",
    "recompute_granularity: full\nrecompute_num_layers: 2",
    "recompute_granularity: full\nrecompute_method: recompute\nrecompute_num_layers: 1",
    "recompute_granularity: selective\nrecompute_num_layers: 2",
    "recompute_granularity: full\nmoe_layer_recompute: true",
    'recompute_granularity: selective\nrecompute_modules: "core_attn, mlp"',
    'recompute_granularity: "null"',
    "tensor_model_parallel_size: 3",
)
ADAPTER_TAKEN = (
    "deepspeed: no-such-file.json",
    "sequence_parallel: true\ntensor_model_parallel_size: 1",
    "recompute_granularity: full",
    "recompute_granularity: selective\nrecompute_modules: core_attn,mlp",
    "pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 3\ngradient_accumulation_steps: 8",
    "additional_configs: {moe_z_los_coeff: 0.1}",
    "tensor_model_parallel_size: 16",
)
NO_ADAPTER = pytest.mark.skipif(
    importlib.util.find_spec("mcore_adapter") is None,
    reason="mcore_adapter is not installed (https://github.com/alibaba/ROLL, mcore_adapter/)",
)


def findings(text: str, *, megatron: bool) -> list[Finding]:
    """Return the findings of the rules in a file."""
    setup = make_setup(text, variables={"USE_MCA": str(int(megatron))})
    return list(llamafactory.findings(setup))


def parser_cases(kind: str) -> dict[str, str]:
    """Return the files of the cases in which the parser refuses a combination, without those that need DeepSpeed."""
    cases = [case for case in SECTIONS["llamafactory-refused-together"] if isinstance(case.get(kind), dict)]
    texts = {str(case[kind]): files_of(case)["train.yaml"] for case in cases if case[kind].keys() <= {"plain", "full"}}
    return {name: text for name, text in texts.items() if "deepspeed" not in name}


def answers(texts: Mapping[str, str], folder: Path, *, megatron: bool, model: str = "") -> dict[str, str]:
    """Return case -> LLaMA-Factory's error, empty if it accepts the file; with `model`, the adapter checks it too."""
    checkpoint = None
    if model:
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(catalog.model_config(model)), encoding="utf-8")
    paths = {}
    for number, (case, text) in enumerate(texts.items()):
        paths[case] = folder / f"{number}.yaml"
        paths[case].write_text(text, encoding="utf-8")
    found = parse(dict.fromkeys(paths.values(), checkpoint), folder, megatron=megatron, checked=True)
    return {case: found[str(path)].get("error", "") for case, path in paths.items()}


FULL_TAKEN = {"full": FULL, "full with lora_rank": with_lines(FULL, "lora_rank: 8")}


def of(base: str, *rows: str) -> dict[str, str]:
    return {lines: with_lines(base, lines) for lines in rows}


@pytest.mark.parametrize(
    ("megatron", "model", "texts"),
    [
        (False, "", of(PLAIN, *PLAIN_REFUSED) | parser_cases("finds")),
        (True, "", of(MEGATRON, *MEGATRON_REFUSED)),
        pytest.param(True, "Qwen/Qwen3-8B", of(MEGATRON, *ADAPTER_REFUSED), marks=NO_ADAPTER),
    ],
    ids=["plain", "megatron", "adapter"],
)
def test_what_is_an_error_is_refused(tmp_path: Path, megatron: bool, model: str, texts: dict[str, str]) -> None:
    need_llamafactory()
    said = answers(texts, tmp_path, megatron=megatron, model=model)
    assert {case for case, text in texts.items() if not _has_error(text, megatron=megatron)} == set()
    assert {case for case, error in said.items() if not error} == set()


@pytest.mark.parametrize(
    ("megatron", "model", "texts"),
    [
        (
            False,
            "",
            of(PLAIN, "", *PLAIN_TAKEN)
            | parser_cases("not")
            | {"full": FULL, "full, rank": with_lines(FULL, "lora_rank: 8")},
        ),
        (True, "", of(MEGATRON, "", *MEGATRON_TAKEN)),
        pytest.param(True, "Qwen/Qwen3-8B", of(MEGATRON, "", *ADAPTER_TAKEN), marks=NO_ADAPTER),
    ],
    ids=["plain", "megatron", "adapter"],
)
def test_what_is_taken_or_ignored_is_no_error(
    tmp_path: Path, megatron: bool, model: str, texts: dict[str, str]
) -> None:
    need_llamafactory()
    said = answers(texts, tmp_path, megatron=megatron, model=model)
    if model:
        assert {case for case, text in texts.items() if _has_error(text, megatron=megatron)} == set()
    assert {case: error for case, error in said.items() if error} == {}


@NO_ADAPTER
def test_experts_are_told_what_the_adapter_makes_of_their_keys(tmp_path: Path) -> None:
    need_llamafactory()
    path, plain = tmp_path / "experts.yaml", tmp_path / "default.yaml"
    path.write_text(with_lines(MOE, "sequence_parallel: false"), encoding="utf-8")
    unset = "expert_tensor_parallel_size: -\nmoe_token_dispatcher_type: -\nmoe_grouped_gemm: -"
    plain.write_text(with_lines(MOE, unset), encoding="utf-8")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = catalog.model_config("Qwen/Qwen3-30B-A3B")
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = parse({path: checkpoint, plain: checkpoint}, tmp_path)
    assert found[str(path)]["sequence_parallel"] == "True"
    assert found[str(plain)]["expert_tensor_parallel_size"] == "2"
    assert found[str(plain)]["moe_token_dispatcher_type"] == "'allgather'"
    assert found[str(plain)]["moe_grouped_gemm"] == "False"


def test_the_settings_of_additional_configs_are_those_of_the_installed_version() -> None:
    core = pytest.importorskip("megatron.core", reason="megatron-core is not installed (the verify extra has it)")
    document = key_lists.read("megatron_config.json")
    oldest, newest = (Version(document["versions"]["megatron_core"][at]).release[:2] for at in (0, -1))
    if not oldest <= Version(core.__version__).release[:2] <= newest:
        pytest.skip(f"the list does not know megatron-core {core.__version__}")
    assert key_lists.name_differences(document, "megatron_core", key_lists.of_megatron(), core.__version__) == []


@NO_ADAPTER
def test_the_settings_that_the_adapter_adds_are_listed() -> None:
    assert set(key_lists.read("megatron_config.json")["mcore_adapter"]) == key_lists.of_adapter()


def _has_error(text: str, *, megatron: bool) -> bool:
    return any(
        finding.severity == "error" and finding.rule != "mca-hub-id" for finding in findings(text, megatron=megatron)
    )
