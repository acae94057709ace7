"""Parse bundles for DeepSpeed, FSDP2 and plain data parallel training with the real parsers of the programs they start.

train.yaml is read by LLaMA-Factory's own reader and checks (hparams/parser.py, get_train_args), with the arguments that
follow it in the node scripts; ds_config.json by transformers, which fills in `auto`, and DeepSpeed's config class;
accelerate.yaml and its options by `accelerate launch`.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from tests.verify.answers import ONE_RANK, answers
from tests.verify.llamafactory import need_llamafactory
from topoplan.bundle.bundle import generate
from topoplan.layout.layout import Recompute
from topoplan.trainers.llamafactory.plain import written_keys
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, LIGER_MODEL_TYPES
from topoplan.trainers.llamafactory.user_keys import fixed_values

pytestmark = pytest.mark.verify

TWO_NODES = replace(CLUSTER, nodes=2, hosts=HOSTS[:2], host_memory_bytes=2**41)
FULL = Recompute(granularity="full")
CASES: dict[str, dict[str, Any]] = {
    "ddp-full": {"backend": "ddp"},
    "ddp-freeze": {"backend": "ddp", "job": {"finetuning": "freeze", "freeze_trainable_layers": -4}},
    "ddp-lora": {"backend": "ddp", "job": {"finetuning": "lora", "lora_target": ("q_proj", "v_proj")}},
    "ddp-lora-dpo": {"backend": "ddp", "job": {"finetuning": "lora", "stage": "dpo"}},
    "ddp-pt": {"backend": "ddp", "job": {"stage": "pt"}},
    "ddp-qlora": {"backend": "ddp", "job": {"finetuning": "qlora"}},
    "ddp-qlora8": {"backend": "ddp", "job": {"finetuning": "qlora", "quantization_bit": 8}},
    "ddp-pure": {"backend": "ddp", "job": {"pure_bf16": True, "optimizer": "adamw_8bit"}},
    "ddp-vision": {"backend": "ddp", "model": QWEN3_VL_8B, "job": {"finetuning": "lora"}},
    "ddp-liger": {"backend": "ddp", "fused_linear_cross_entropy": True, "recompute": FULL},
    "ddp-user": {
        "backend": "ddp",
        "job": {"trainer": {"eval_strategy": "steps", "val_size": 0.1, "optim": "adamw_torch"}},
    },
    "zero1": {"backend": "deepspeed", "zero_stage": 1},
    "zero2-offload": {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True, "recompute": FULL},
    "zero2-qlora": {"backend": "deepspeed", "zero_stage": 2, "job": {"finetuning": "qlora"}},
    "zero3": {"backend": "deepspeed", "zero_stage": 3, "recompute": FULL},
    "zero3-lora": {"backend": "deepspeed", "zero_stage": 3, "job": {"finetuning": "lora"}},
    "zero3-offload": {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True, "offload_param": True},
    "fsdp2": {"backend": "fsdp2", "recompute": FULL},
    "fsdp2-lora": {"backend": "fsdp2", "offload": True, "job": {"finetuning": "lora"}},
    "fsdp2-pure": {"backend": "fsdp2", "job": {"pure_bf16": True}},
}
NEEDS = {"zero": "deepspeed", "qlora": "bitsandbytes", "liger": "liger_kernel"}
"""Part of a case's name -> package that LLaMA-Factory or DeepSpeed needs to read the case."""

# Reads each YAML with its further arguments as a rank does, and prints what the trainer would get.
PARSE = """
import json, sys
from llamafactory.hparams import parser

parser.is_torch_bf16_gpu_available = lambda: True  # asked for by pure_bf16
found = {}
for case, words in json.load(open(sys.argv[1])).items():
    sys.argv = ["launcher", *words, "use_cpu=true"]  # bf16 is refused without a GPU otherwise
    try:
        model, data, training, finetuning, _ = parser.get_train_args()
    except Exception as error:
        found[case] = {"error": f"{type(error).__name__}: {error}"}
        continue
    finally:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    groups = [model, data, training, finetuning]
    found[case] = {key: repr(getattr(group, key)) for group in groups for key in vars(group) if key[0] != "_"}
    if training.deepspeed:
        from types import SimpleNamespace
        from deepspeed.runtime.config import DeepSpeedConfig

        config = training.hf_deepspeed_config
        config.trainer_config_finalize(training, SimpleNamespace(config=SimpleNamespace(hidden_size=4096)), 100)
        read = DeepSpeedConfig(config.config)
        zero = json.loads(read.zero_config.model_dump_json())
        found[case]["read by deepspeed"] = {"zero": zero, "bf16": read.bfloat16_config.enabled,
            "micro": read.train_micro_batch_size_per_gpu, "steps": read.gradient_accumulation_steps}
print(json.dumps(found))
"""

# Prints what accelerate derives from its options and its file: the environment and the options of torchrun.
LAUNCH = """
import json, sys
from accelerate.commands import launch

found = {}
for case, words in json.load(open(sys.argv[1])).items():
    args = launch.launch_command_parser().parse_args(words)
    args, _, _ = launch._validate_launch_command(args)
    env = launch.prepare_multi_gpu_env(args)
    import torch.distributed.run as distrib_run
    filtered = launch._filter_args(args, distrib_run.get_args_parser(), ["--training_script", args.training_script])
    found[case] = {"env": env, "torchrun": {key: str(value) for key, value in vars(filtered).items()},
                   "fsdp": args.use_fsdp, "module": args.module, "script": args.training_script}
print(json.dumps(found))
"""


def needed(case: str) -> str | None:
    """Return the package that is missing for a case, if any."""
    wanted = [package for part, package in NEEDS.items() if part in case]
    return next((package for package in wanted if importlib.util.find_spec(package) is None), None)


def words_of(script: Path, behind: str) -> list[str]:
    """Return the words of the script's last command that follow `behind`, as bash expands them."""
    last = script.read_text(encoding="utf-8").partition(f'exec "$python" {behind}')[2]
    assert last
    code = f"bundle_dir={script.parent} master_addr=10.0.0.1 master_port=23456 log_dir=/tmp/logs; printf '%s\\0' {last}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def asked(code: str, wanted: Mapping[str, list[str]], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a separate process prints for these words, by case."""
    environment = {**ONE_RANK, "DISABLE_VERSION_CHECK": "1", "DS_ACCELERATOR": "cpu"}
    return answers(code, wanted, folder, environment=environment)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    need_llamafactory()
    folders = {}
    for case, what in CASES.items():
        folders[case] = tmp_path_factory.mktemp(case)
        files = generate(*make_spec_and_plan(**{"model": QWEN3_8B, "cluster": TWO_NODES, **what}))
        for name, text in files.items():
            (folders[case] / name).write_text(text, encoding="utf-8")
    return folders


@pytest.fixture(scope="module")
def parsed(bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    wanted = {}
    for case, folder in bundles.items():
        start = "-m accelerate" if case.startswith("fsdp2") else "-m torch.distributed.run"
        words = words_of(folder / "node-01.sh", start)
        if needed(case) is None:
            wanted[case] = words[words.index("llamafactory.launcher") + 1 :]
    return asked(PARSE, wanted, tmp_path_factory.mktemp("parser"))


@pytest.mark.parametrize("case", CASES)
def test_the_parser_takes_every_key_and_gets_the_value_that_was_meant(
    case: str, parsed: Mapping[str, Mapping[str, Any]]
) -> None:
    if package := needed(case):
        pytest.skip(f"{package} is not installed")
    seen = parsed[case]
    assert "error" not in seen, seen.get("error")
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": TWO_NODES, **CASES[case]})
    wanted = fixed_values(spec, written_keys(spec, plan.layout))
    for key, found in {
        "optim": lambda value: f"<OptimizerNames.{value.upper()}: '{value}'>",
        "lora_target": lambda value: repr(value.split(",")),
        "freeze_trainable_modules": lambda value: repr(value.split(",")),
        "quantization_method": lambda value: (
            "<QuantizationMethod.BNB: 'bnb'>" if "<" in seen["quantization_method"] else repr(value)
        ),
    }.items():
        # Without a value the key is left out, and the parser uses its default.
        if values := [value for value in wanted.pop(key, ()) if value is not None]:
            assert seen[key] in map(found, values)
    # The parser sets these itself, or removes a token for packing.
    for key in ("packing", "cutoff_len", "deepspeed", "fsdp", "fsdp_config", "do_train", "parallelism_config"):
        wanted.pop(key, None)
    wrong = {key: seen[key] for key, values in wanted.items() if seen[key] not in map(repr, values)}
    assert wrong == {}
    compute = "torch.float16" if spec.job.precision == "fp16" else "torch.bfloat16"
    assert seen["compute_dtype"] == compute


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("zero")])
def test_deepspeed_reads_the_sharding_that_was_planned(case: str, parsed: Mapping[str, Mapping[str, Any]]) -> None:
    if package := needed(case):
        pytest.skip(f"{package} is not installed")
    read = parsed[case]["read by deepspeed"]
    layout = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": TWO_NODES, **CASES[case]})[1].layout
    zero = read["zero"]
    assert (zero["stage"], read["bf16"]) == (layout.zero_stage, True)
    assert (read["micro"], read["steps"]) == (layout.micro_batch_size, layout.gradient_accumulation_steps)
    for key, wanted in (("offload_optimizer", layout.offload_optimizer), ("offload_param", layout.offload_param)):
        device = zero[key]["device"] if zero[key] else "none"
        assert (device == "cpu") == wanted
        assert not wanted or zero[key]["pin_memory"]
    assert zero["reduce_bucket_size"] == (4096 * 4096 if layout.zero_stage == 3 else 500_000_000)
    assert zero["gather_16bit_weights_on_model_save"] == (layout.zero_stage == 3)


@pytest.fixture(scope="module")
def launched(bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    cases = [case for case in CASES if case.startswith("fsdp2")]
    start = "-m accelerate.commands.launch"
    wanted = {case: words_of(bundles[case] / "node-01.sh", start) for case in cases}
    return asked(LAUNCH, wanted, tmp_path_factory.mktemp("launch"))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("fsdp2")])
def test_accelerate_starts_the_processes_and_the_sharding_that_were_planned(
    case: str, launched: Mapping[str, Mapping[str, Any]]
) -> None:
    seen = launched[case]
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": TWO_NODES, **CASES[case]})
    assert (seen["fsdp"], seen["module"], seen["script"]) == (True, True, "llamafactory.launcher")
    wanted = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "no" if spec.job.pure_bf16 else "bf16",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": str(plan.layout.offload).lower(),
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    assert {key: seen["env"].get(key) for key in wanted} == wanted
    torchrun = {
        "nnodes": "2",
        "node_rank": "1",
        "nproc_per_node": "8",
        "rdzv_endpoint": "10.0.0.1:23456",
        "rdzv_backend": "static",
        "max_restarts": "0",
        "tee": "3",
        "log_dir": "/tmp/logs",
    }
    assert {key: seen["torchrun"].get(key) for key in torchrun} == torchrun


def test_the_lists_of_model_types_are_those_of_the_installed_version() -> None:
    need_llamafactory()
    code = (
        "import inspect, json, re\n"
        "from llamafactory.model.model_utils import liger_kernel, visual\n"
        "text = inspect.getsource(liger_kernel)\n"
        "liger = re.findall(r'model_type == \"(\\w+)\"', text)\n"
        "lists = ' '.join(re.findall(r'model_type in \\[(.*?)\\]', text))\n"
        "liger += re.findall(r'\\w+', lists)\n"
        "print(json.dumps([sorted(set(liger)), sorted(visual.COMPOSITE_MODELS)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    liger, composite = json.loads(done.stdout.splitlines()[-1])
    assert set(liger) == LIGER_MODEL_TYPES
    assert set(composite) == FREEZABLE_MODEL_TYPES


def test_accelerate_has_not_what_transformers_asks_a_hybrid_sharding_for() -> None:
    """The reason why hybrid sharding is refused; if this test fails, it can be supported."""
    pytest.importorskip("accelerate")
    from accelerate.parallelism_config import ParallelismConfig

    assert not hasattr(ParallelismConfig(dp_replicate_size=2, dp_shard_size=8), "sp_backend")
