"""Parse train.yaml, and the files beside it, with ms-swift's own argument classes and all of their checks."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import B200, CLUSTER, DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, V100
from tests.trainers.swift.plans import files_for
from tests.verify.swift import ROOT, need_swift, parse
from tests.verify.test_a_bundle_trains import make_model
from topoplan.layout.layout import Recompute
from topoplan.trainers.swift.refusals import LIGER_MODEL_TYPES, MEGATRON_MODEL_TYPES

pytestmark = pytest.mark.verify

FULL = Recompute(granularity="full")
ON_B200 = replace(CLUSTER, gpu=B200)
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-lora": {"job": {"finetuning": "lora"}},
    "ddp-qlora": {"job": {"finetuning": "qlora"}},
    "ddp-pure": {"job": {"pure_bf16": True}},
    "zero1": {"backend": "deepspeed", "zero_stage": 1},
    "zero2-8bit": {"backend": "deepspeed", "zero_stage": 2, "job": {"optimizer": "adamw_8bit"}},
    "zero3": {"backend": "deepspeed", "recompute": FULL},
    "zero3-offload": {"backend": "deepspeed", "offload_optimizer": True, "offload_param": True},
    "zero3-qlora": {"backend": "deepspeed", "job": {"finetuning": "qlora", "quantization_bit": 4}},
    "zero2-freeze": {"backend": "deepspeed", "zero_stage": 2, "job": {"finetuning": "freeze"}},
    "fsdp2": {"backend": "fsdp2", "recompute": FULL},
    "fsdp2-offload": {"backend": "fsdp2", "offload": True},
    "fsdp2-qlora": {"backend": "fsdp2", "job": {"finetuning": "qlora"}},
    "ulysses": {"backend": "deepspeed", "ulysses": 4},
    "liger": {"backend": "fsdp2", "fused_linear_cross_entropy": True},
    "vision": {"backend": "deepspeed", "model": QWEN3_VL_8B},
    "moe": {"backend": "deepspeed", "model": QWEN3_30B},
    "pretraining": {"job": {"stage": "pt", "packing": True}},
    "fp16": {"cluster": replace(CLUSTER, gpu=V100), "job": {"precision": "fp16", "packing": False}},
}
MEGATRON_CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "context": {"tp": 2, "cp": 2},
    "all-to-all": {"tp": 2, "cp": 2, "cp_comm_type": "a2a", "backend": "megatron"},
    "uneven": {"tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "vpp": 2, "ep": 4},
    "latent": {"model": DEEPSEEK, "tp": 1, "ep": 8, "backend": "megatron", "moe_token_dispatcher_type": "alltoall"},
    "flex": {"model": QWEN3_30B, "ep": 8, "tp": 1, "moe_token_dispatcher_type": "flex", "backend": "megatron"},
    "vision": {"model": QWEN3_VL_8B},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "offload": {"optimizer_offload_fraction": 0.5},
    "fp8": {"job": {"precision": "fp8"}},
    "mxfp8": {"job": {"precision": "mxfp8"}, "cluster": ON_B200, "fp8_param": True},
    "nvfp4": {"job": {"precision": "nvfp4"}, "cluster": ON_B200},
    "fp16": {"job": {"precision": "fp16"}},
    "part-of-an-epoch": {"job": {"epochs": 0.5}},
    "lora": {"job": {"finetuning": "lora"}, "backend": "megatron"},
    "lora-experts": {
        **{"model": QWEN3_30B, "tp": 2, "ep": 4, "backend": "megatron", "moe_token_dispatcher_type": "alltoall"},
        "job": {"finetuning": "lora", "lora_rank": 32, "lora_target": ("linear_qkv", "linear_fc1")},
    },
    "lora-vision": {
        **{"model": QWEN3_VL_8B, "backend": "megatron"},
        "job": {"finetuning": "lora", "freeze_vision_tower": True, "freeze_multi_modal_projector": True},
    },
}

Parsed = Mapping[str, Mapping[str, str]]
"""Case -> the parsed arguments, as repr."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_swift()
    root = tmp_path_factory.mktemp("swift")
    make_model(root / "tiny")
    (root / "samples.jsonl").touch()
    return root


@pytest.fixture(scope="module")
def parsed(folder: Path) -> Parsed:
    paths = {case: write(folder / "sft", case, **what) for case, what in CASES.items()}
    old = write(folder / "sft", "old")
    old.write_text(old.read_text(encoding="utf-8") + "train_type: lora\n", encoding="utf-8")
    wanted = {path: [*further(folder, path), "--use_cpu", "true"] for path in (*paths.values(), old)}
    found = parse(wanted, folder)
    return {case: found[str(path)] for case, path in (paths | {"old": old}).items()}


@pytest.fixture(scope="module")
def parsed_megatron(folder: Path) -> Parsed:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (the verify-swift extra has it)")
    cases = {case: {"backend": "mca", "model": QWEN3_8B, **what} for case, what in MEGATRON_CASES.items()}
    paths = {case: write(folder / "megatron", case, **what) for case, what in cases.items()}
    wanted = {path: further(folder, path) for path in paths.values()}
    found = parse(wanted, folder, megatron=True, ranks=CLUSTER.world_size)
    return {case: found[str(path)] for case, path in paths.items()}


def write(root: Path, case: str, **what: Any) -> Path:
    """Write a bundle, and return its train.yaml."""
    bundle = root / case
    bundle.mkdir(parents=True)
    for name, text in files_for(**what).items():
        (bundle / name).write_text(text, encoding="utf-8")
    return bundle / "train.yaml"


def further(folder: Path, path: Path) -> list[str]:
    """Return options for an existing model, and for the file beside train.yaml that the scripts pass by its path."""
    found = ["--model", str(folder / "tiny"), "--model_type", "qwen3", "--template", "qwen3"]
    for option, name in (("deepspeed", "ds_config.json"), ("fsdp", "fsdp.json")):
        beside = path.with_name(name)
        found += [f"--{option}", str(beside)] if beside.exists() else []
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_swift_sft_takes_every_argument(case: str, parsed: Parsed) -> None:
    seen, job = parsed[case], CASES[case].get("job", {})
    assert "error" not in seen, seen.get("error")
    assert seen["max_length"] == "4096"
    assert seen["packing"] == seen["padding_free"] == repr(job.get("packing", True))
    assert seen["tuner_type"] == repr("lora" if job.get("finetuning") in ("lora", "qlora") else "full")
    assert seen["add_version"] == "False"


def test_what_is_said_of_sharding_arrives(parsed: Parsed) -> None:
    assert "'stage': 3" in parsed["zero3"]["deepspeed"]
    assert "'offload_param': {'device': 'cpu'" in parsed["zero3-offload"]["deepspeed"]
    assert "'activation_checkpointing': True" in parsed["fsdp2"]["fsdp_config"]
    assert parsed["ulysses"]["sequence_parallel_size"] == "4"


def test_swift_sft_refuses_a_name_of_version_3(parsed: Parsed) -> None:
    assert "remaining_argv" in parsed["old"]["error"]


@pytest.mark.parametrize("case", MEGATRON_CASES, ids=str)
def test_megatron_sft_takes_every_argument(case: str, parsed_megatron: Parsed) -> None:
    seen = parsed_megatron[case]
    assert "error" not in seen, seen.get("error")
    assert seen["seq_length"] == "4096"
    assert int(seen["num_microbatches"]) * int(seen["data_parallel_size"]) * int(seen["micro_batch_size"]) == 64
    assert seen["finetune"] == "True"
    job = MEGATRON_CASES[case].get("job", {})
    assert seen["tuner_type"] == repr(job.get("finetuning", "full"))
    if "lora" in seen["tuner_type"]:
        assert seen["lora_rank"] == repr(job.get("lora_rank", 8))
        assert (seen["merge_lora"], seen["lora_dropout"]) == ("False", "0.05")
        assert seen["target_modules"] == repr([*job.get("lora_target", ["all-linear"])])


def test_the_list_of_arguments_is_what_the_installed_version_declares(folder: Path) -> None:
    """Runs in a separate process, because a stand-in replaces mcore_bridge there."""
    command = (
        "import json; from tests.verify.key_lists import swift_differences; print(json.dumps(swift_differences()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = partial(subprocess.run, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    assert json.loads(run([sys.executable, "-c", command]).stdout.splitlines()[-1]) == []


def test_the_model_types_that_mcore_bridge_builds_are_those_of_the_installed_version() -> None:
    found = importlib.util.find_spec("mcore_bridge")  # which cannot be imported without Transformer Engine
    if found is None or not found.submodule_search_locations:
        pytest.skip("mcore-bridge is not installed (the verify-swift extra has it)")
    registered: set[str] = set()
    for path in Path(found.submodule_search_locations[0], "model").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for types in re.findall(r"ModelMeta\(\s*\w+\.\w+,\s*\[(.*?)\]", text, re.DOTALL):
            registered |= set(re.findall(r"'(\w+)'", types))
    assert {"qwen3", "deepseek_v3"} <= registered
    assert registered >= MEGATRON_MODEL_TYPES


def test_the_model_types_with_kernels_of_liger_are_those_of_the_installed_version() -> None:
    found = importlib.util.find_spec("liger_kernel")  # which cannot be imported without Triton
    if found is None or not found.submodule_search_locations:
        pytest.skip("liger-kernel is not installed (the verify-swift extra has it)")
    source = Path(found.submodule_search_locations[0], "transformers", "monkey_patch.py").read_text(encoding="utf-8")
    table = source.partition("MODEL_TYPE_TO_APPLY_LIGER_FN = {")[2].partition("}")[0]
    assert set(re.findall(r'"(\w+)":', table)) >= LIGER_MODEL_TYPES
